"""An owner that lives is not called dead, and a review of its operation does not stay open."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
from holdfast.testing.operation_contract import LONG, leave_half_done
from tests.children import eventually, query

NOBODY_LIVES = """
create or replace function holdfast.operation_alive(lease text, fence bigint) returns boolean
language sql volatile as 'select false'
"""
"""Every owner has ended between the look at the log and the look at its lease."""


@pytest.mark.parametrize("attempts", [1, 3])
def test_an_owner_that_ends_between_two_looks_is_not_called_dead(postgres_url: str, attempts: int) -> None:
    begun, go_on, retry = threading.Event(), threading.Event(), holdfast.Retry(attempts=attempts)

    def work() -> str:
        begun.set()
        assert go_on.wait(LONG)
        return "done"

    with (
        holdfast.Client(postgres_url) as client,
        holdfast.Client(postgres_url) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        owner = pool.submit(lambda: client.operation("k", ttl=LONG, retry=retry).run(work))
        assert begun.wait(LONG)
        query(postgres_url, NOBODY_LIVES)
        waiter = pool.submit(lambda: other.operation("k", ttl=LONG, timeout=LONG, retry=retry).run(pytest.fail))
        eventually(lambda: _waits(postgres_url), "the other one waits")
        go_on.set()
        assert owner.result(LONG).result == "done"
        assert (waiter.result(LONG).result, waiter.result(LONG).replayed) == ("done", True)
        assert other.reviews.list(status=None) == []


def _waits(url: str) -> bool:
    """Whether a session waits for the release of a lease."""
    waiting = (
        "select 1 from pg_locks where locktype = 'advisory'"
        " and classid::int8::bit(32)::int4 = hashtext('holdfast.free')"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    return bool(query(url, waiting))


def test_an_owner_that_is_dead_is_called_so_under_its_lease(either: str) -> None:
    leave_half_done(either, "k")
    with holdfast.Client(either) as client:
        with pytest.raises(holdfast.OperationFailed, match="half done"):
            client.operation("k").run(int)
        [review] = client.reviews.list()
        assert review.reason == "attempts"
        assert [lease for lease in client.leases.list() if lease.name.startswith("@op:")] == [], "it was released"


@pytest.mark.parametrize("reason", ["attempts", "locked"])
def test_a_review_that_was_opened_after_the_success_is_done(either: str, reason: str) -> None:
    with holdfast.Client(either) as client:
        client.operation("k").run(int)
        record = client.operations.get("k")
        assert record is not None
        parameters = {"key": record.key, "label": "k", "dataset": None, "operation": None, "reason": reason}
        client._engine.call("review_open", {**parameters, "detail": "too late"})
        assert [review.status for review in client.reviews.list(status=None)] == ["done"]
        assert client.reviews.list() == []
