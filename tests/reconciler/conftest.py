from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing.yard import Yard
from tests.reconciler.replicas import Records


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


@pytest.fixture(params=["sqlite, sync", "postgres, async"])
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Each engine and each flavour once: one decides about the SQL, the other about the waiting."""
    engine, flavour = request.param.split(", ")
    return request.getfixturevalue(f"{engine}_url"), flavour


@pytest.fixture
def records(place: tuple[str, str]) -> Records:
    return Records(place[0])
