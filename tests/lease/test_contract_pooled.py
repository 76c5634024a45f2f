"""The lease contract through PgBouncer in transaction mode, where it is installed: leases need no session of their own.

In one flavour and on one server: what differs there is below the pooler, and tested without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing import Pooler
from holdfast.testing.lease_contract import LeaseContract
from tests.conftest import migrated, server
from tests.lease.test_contract import stored

pytestmark = pytest.mark.usefixtures("needs_pgbouncer")


@pytest.fixture(scope="module")
def behind() -> str:
    return migrated(server().database())


@pytest.fixture(scope="module")
def through(behind: str) -> Iterator[str]:
    with Pooler(behind) as pool:
        yield pool.url


@pytest.fixture
def url(through: str, behind: str) -> str:
    with psycopg.connect(behind, autocommit=True) as database:
        database.execute("truncate holdfast.lease, holdfast.beat, holdfast.history")
    return through


@pytest.fixture
def connect() -> Iterator[Callable[..., Any]]:
    made: list[holdfast.Client] = []

    def make(url: str, **options: Any) -> holdfast.Client:
        made.append(holdfast.Client(url, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


class TestLeaseThroughAPooler(LeaseContract):
    @pytest.fixture(autouse=True)
    def _behind(self, behind: str) -> None:
        self._direct = behind

    def rows(self, url: str, client: Any) -> dict[str, list[Any]]:
        return stored(self._direct)
