"""Fixtures for pytest, available as soon as holdfast is installed.

    def test_only_one_imports(holdfast_client):
        with holdfast_client.lease("nightly-import", ttl=30):
            ...

pytest imports this module in every run, whether a test uses it or not: heavy imports are inside the fixtures.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import holdfast
    from holdfast.testing import Postgres

_CONTRACTS = ("lease_contract", "lock_contract", "object_contract", "operation_contract")
pytest.register_assert_rewrite(*(f"holdfast.testing.{name}" for name in _CONTRACTS))


def _missing() -> str | None:
    """Why no PostgreSQL server can be started here; None if one can."""
    from holdfast.testing import available

    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'holdfast[postgres]'"
    if not available():
        return "there is no PostgreSQL on this machine: pip install 'holdfast[testing]' brings one"
    return None


@pytest.fixture(scope="session")
def holdfast_postgres() -> Iterator["Postgres"]:
    """A running PostgreSQL server of the newest version installed. Skips the test if there is none."""
    from holdfast.testing import Postgres

    if reason := _missing():
        pytest.skip(reason)
    with Postgres.create() as postgres:
        yield postgres


@pytest.fixture
def holdfast_client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["holdfast.Client"]:
    """A client on a new, migrated database: on PostgreSQL if it is installed, else in a SQLite file."""
    import holdfast

    if _missing():
        with holdfast.Client(f"sqlite:///{tmp_path}/holdfast.db") as client:
            client.migrate()
            yield client
        return
    postgres: Postgres = request.getfixturevalue("holdfast_postgres")
    url = postgres.database()
    try:
        with holdfast.Client(url) as client:
            client.migrate()
            yield client
    finally:
        postgres.drop(url)
