"""What several files of tests of operations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.migrated_file import migrated_file
from tests.operations.policies import WAYS, connected, runs


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A file with its tables, which these tests do not look at being made."""
    return migrated_file(tmp_path / "app.db")


@pytest.fixture(params=WAYS)
def attempt(request: pytest.FixtureRequest, either: str) -> Iterator[Callable[..., Any]]:
    with connected(either) as mine:
        yield runs(request.param, mine)
