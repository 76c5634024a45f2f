"""What the tests of lineage share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.migrated_file import migrated_file


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A file with its tables, which these tests do not look at being made."""
    return migrated_file(tmp_path / "app.db")
