"""What was found wrong with other libraries for idempotent calls, each as a test of this one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import URLError

import httpx
import psycopg
import pytest
import requests

import holdfast
from holdfast.testing.operation_contract import LONG
from tests.children import eventually
from tests.operations.policies import every_way

MANY = 60


def test_functions_that_share_a_store_never_get_each_others_results_nested_or_at_once(either: str) -> None:
    """Where the last function decorated won, or the key was kept in the store object between two calls."""
    with holdfast.Client(either) as client:

        @client.operation(key=lambda number: f"inner-{number}", timeout=LONG)
        def inner(number: int) -> str:
            return f"inner {number}"

        @client.operation(key=lambda number: f"outer-{number}", timeout=LONG)
        def outer(number: int) -> list[str]:
            return [f"outer {number}", inner(number).result, inner(number + 1000).result]

        def both(number: int) -> tuple[Any, Any]:
            first = outer(number % 20)
            return first.result, inner(number % 20).result

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(both, range(MANY)))
        for number, (outside, inside) in enumerate(found):
            n = number % 20
            assert outside == [f"outer {n}", f"inner {n}", f"inner {n + 1000}"]
            assert inside == f"inner {n}"


@pytest.mark.usefixtures("frequent_heartbeats")
def test_nobody_takes_over_an_owner_who_is_alive_however_long_it_takes(either: str) -> None:
    """Where "in progress" ended by a clock, while the owner was still at it: then both did it, and the first one's
    record was written over. Here the lease is renewed while the owner lives."""
    begun, go_on, effects = threading.Event(), threading.Event(), []

    def slow() -> str:
        begun.set()
        effects.append("slow")
        assert go_on.wait(LONG)
        return "slow"

    with holdfast.Client(either) as owner, holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: owner.operation("a", ttl=600).run(slow))
        assert begun.wait(LONG)
        [lease] = other.leases.list()

        def expires() -> Any:
            return next(each.expires_at for each in other.leases.list() if each.name == lease.name)

        eventually(lambda: expires() > lease.expires_at, "its lease is renewed")
        for _ in range(3):
            with pytest.raises(holdfast.OperationInProgress):
                other.operation("a", ttl=600, when_locked="fail").run(lambda: effects.append("fast"))
            assert other.operations.get("a").status == "running"  # type: ignore[union-attr]
        go_on.set()
        assert first.result(LONG).result == "slow"
        assert other.operation("a").run(lambda: effects.append("fast")).result == "slow"
    assert effects == ["slow"]


def test_an_error_that_passes_is_never_kept_as_the_answer(postgres_url: str) -> None:
    """Where a serialization failure was stored, and every retry got it back for a day."""
    errors = [
        psycopg.errors.SerializationFailure("40001"),
        psycopg.errors.DeadlockDetected("40P01"),
        ConnectionError("x"),
        ExceptionGroup("of tasks", [ValueError("x"), psycopg.errors.SerializationFailure("40001")]),
        httpx.ConnectError("x"),
        requests.exceptions.ReadTimeout("x"),
        URLError(ConnectionRefusedError("x")),
        ExceptionGroup("of tasks", [httpx.PoolTimeout("x")]),
    ]
    with holdfast.Client(postgres_url) as client:
        for number, error in enumerate(errors):

            def work(error: Exception = error) -> None:
                raise error

            with pytest.raises(type(error)):
                client.operation(f"n{number}", retry=holdfast.Retry(remember=[Exception])).run(work)
            assert client.operation(f"n{number}").run(lambda: "well").result == "well"
        with pytest.raises(ValueError, match="for good"):
            client.operation("kept", retry=holdfast.Retry(remember=[ValueError])).run(lambda: int("for good"))
        with pytest.raises(holdfast.OperationFailed, match="for good"):
            client.operation("kept").run(lambda: "well")


@every_way
def test_a_call_that_nobody_answered_in_time_is_asked_about_before_it_is_made_again(attempt: Any, either: str) -> None:
    """Its error says nothing of whether it has arrived: whoever can be asked is."""
    charges: list[int] = []

    def charge() -> None:
        charges.append(7)
        raise TimeoutError("no answer")

    def is_charged(op: Any) -> Any:
        return op.done({"id": charges[0]})

    with holdfast.Client(either) as client:
        with pytest.raises(TimeoutError):
            client.operation("a").run(charge)
        outcome = attempt(client, "a", charge, verify=is_charged)
        assert (outcome.result, outcome.attempt, charges) == ({"id": 7}, 1, [7])
        assert client.operations.verify().problems == ()
