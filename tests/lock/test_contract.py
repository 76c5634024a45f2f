"""The lock contract on every engine, in both flavours."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from holdfast.testing.lock_contract import LockContract
from tests.children import eventually
from tests.conftest import fresh
from tests.lock.looks import advisory
from tests.pairs import ALL


@lru_cache
def shared(major: int) -> str:
    return fresh(major)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One database for all these tests: what a test has locked is free when its clients are closed."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'app.db'}"
    url = shared(request.param)
    eventually(lambda: not advisory(url), "the test before has left nothing")
    return url


@pytest.mark.parametrize(("connect", "url"), ALL, indirect=True)
class TestLock(LockContract):
    pass
