"""The lock contract on every engine of this machine, in both flavours."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from holdfast.testing.lock_contract import LockContract
from tests.children import eventually
from tests.conftest import MAJORS, fresh
from tests.lock.looks import advisory


@lru_cache
def shared(major: int) -> str:
    return fresh(major)


@pytest.fixture(params=["sqlite", *sorted({MAJORS[0], MAJORS[-1]})])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One database for all these tests: what a test has locked is free when its clients are closed."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'app.db'}"
    url = shared(request.param)
    eventually(lambda: not advisory(url), "the test before has left nothing")
    return url


class TestLock(LockContract):
    pass
