"""The lease contract through PgBouncer in transaction mode, where it is installed: leases need no session of their own.

In one flavour and on one server: what differs there is below the pooler, and tested without it. Left out is what
combines, on our side of the pooler, calls that the other tests make through it.
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


for _name in (
    "test_try_acquire_answers_none_when_somebody_has_it",
    "test_or_skip_runs_the_block_either_way",
    "test_with_holds_it_for_the_block",
    "test_with_raises_when_somebody_has_it",
    "test_an_exception_in_the_block_releases_and_propagates",
    "test_the_decorator_holds_it_for_each_call",
    "test_a_default_holder_does_not_re_enter",
    "test_a_stale_release_takes_nothing_from_the_next_holder",
    "test_at_least_of_a_long_block_keeps_nothing",
    "test_names_are_separate_and_nest",
    "test_an_expired_lease_cannot_be_renewed",
    "test_renewing_by_hand_outlives_the_ttl",
    "test_what_at_least_keeps_is_free_when_its_time_is_over",
):
    assert callable(getattr(LeaseContract, _name))
    setattr(TestLeaseThroughAPooler, _name, None)
