"""What several files of tests of operations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.lease.terms import LeaseTerms
from tests.migrated_file import migrated_file
from tests.operations.policies import WAYS, connected, runs


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A file with its tables, which these tests do not look at being made."""
    return migrated_file(tmp_path / "app.db")


@pytest.fixture
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten a second, whatever the TTL, which may then be longer than any pause of the machine."""
    monkeypatch.setattr(LeaseTerms, "check", staticmethod(partial(LeaseTerms.check, renew_every=0.1)))


@pytest.fixture(params=WAYS)
def attempt(request: pytest.FixtureRequest, either: str) -> Iterator[Callable[..., Any]]:
    with connected(either) as mine:
        yield runs(request.param, mine)
