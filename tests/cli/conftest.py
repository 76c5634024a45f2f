"""A command line refuses an SQLite file that does not exist, so its tests have one."""

from __future__ import annotations

import pytest

from tests.migrated_file import migrated_file


@pytest.fixture
def sqlite_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return migrated_file(tmp_path_factory.mktemp("database") / "app.db")
