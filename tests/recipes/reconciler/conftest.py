from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing.fake_driver import FakeDriver
from tests.recipes.reconciler.replicas import Records


@pytest.fixture
def yard(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path)


@pytest.fixture(params=["sqlite, sync", "postgres, async"])
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Each engine and each flavour once: the engine matters for the SQL, the flavour for the waiting."""
    engine, flavour = request.param.split(", ")
    return request.getfixturevalue(f"{engine}_url"), flavour


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Retry a failing driver after 50 ms instead of up to a minute. Returns the number of failures at each retry."""
    asked: list[int] = []

    def retry_delay(failures: int, limit: float) -> float:
        asked.append(failures)
        return 0.05

    for flavour in ("", "_async"):
        monkeypatch.setattr(f"holdfast.recipes.reconciler{flavour}.retry_delay", retry_delay)
    return asked


@pytest.fixture
def records(place: tuple[str, str]) -> Records:
    return Records(place[0])
