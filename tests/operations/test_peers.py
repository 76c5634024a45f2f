"""What was found wrong with other libraries for idempotent calls, each as a test of this one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import URLError

import httpx
import psycopg
import pytest
import requests

import holdfast
from tests.children import eventually

Connect = Callable[..., Any]
MANY = 60


def test_functions_that_share_a_store_never_get_each_others_results_nested_or_at_once(either: str) -> None:
    """Where the last function decorated won, or the key was kept in the store object between two calls."""
    with holdfast.Client(either) as client:

        @client.operation(key=lambda number: f"inner-{number}")
        def inner(number: int) -> str:
            return f"inner {number}"

        @client.operation(key=lambda number: f"outer-{number}")
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


async def test_tasks_at_once_get_the_results_of_their_own_keys(either: str) -> None:
    called: list[int] = []
    async with holdfast.AsyncClient(either) as client:

        async def work(number: int) -> int:
            called.append(number)
            await asyncio.sleep(0)
            return number

        outcomes = await asyncio.gather(
            *(client.operation(f"n{number % 20}").run(work, number % 20) for number in range(MANY))
        )
    assert [each.result for each in outcomes] == [number % 20 for number in range(MANY)]
    assert sorted(called) == list(range(20))


async def test_an_async_function_is_awaited_and_its_value_is_kept_not_its_coroutine(either: str) -> None:
    async with holdfast.AsyncClient(either) as client:
        called = 0

        async def work() -> dict[str, int]:
            nonlocal called
            await asyncio.sleep(0)
            called += 1
            return {"rows": called}

        for _ in range(3):
            assert (await client.operation("a").run(work)).result == {"rows": 1}
    with holdfast.Client(either) as blocking, pytest.raises((TypeError, ValueError)):
        blocking.operation("b").run(work)  # nobody would await it


@pytest.mark.parametrize("result", [None, 0, False, "", {}, [], b"", 0.0], ids=repr)
def test_a_result_that_is_false_is_a_result(connect: Connect, either: str, result: Any) -> None:
    """Where ``if stored:`` decided whether there was one."""
    client, called = connect(either), []

    def work() -> Any:
        called.append(1)
        return result

    for replayed in (False, True, True):
        outcome = client.operation("a").run(work)
        assert (outcome.result, type(outcome.result), outcome.replayed) == (result, type(result), replayed)
    assert called == [1]


def test_another_payload_under_the_same_key_is_told_and_not_answered_with_the_old_result(
    connect: Connect, either: str
) -> None:
    client, charged = connect(either), []
    client.operation("charge", payload={"amount": 1}).run(lambda: charged.append(1))
    with pytest.raises(holdfast.KeyReused):
        client.operation("charge", payload={"amount": 1000}).run(lambda: charged.append(1000))

    @client.operation(key="bill")  # type: ignore[untyped-decorator]
    def bill(amount: int) -> int:
        charged.append(amount)
        return amount

    assert bill(2).result == 2
    with pytest.raises(holdfast.KeyReused):
        bill(3)
    assert charged == [1, 2]


def test_nobody_takes_over_an_owner_who_is_alive_however_long_it_takes(either: str) -> None:
    """Where "in progress" ended by a clock, while the owner was still at it: then both did it, and the first one's
    record was written over. Here the lease is renewed while the owner lives."""
    begun, go_on, effects = threading.Event(), threading.Event(), []

    def slow() -> str:
        begun.set()
        effects.append("slow")
        assert go_on.wait(60)
        return "slow"

    with holdfast.Client(either) as owner, holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: owner.operation("a", ttl=3).run(slow))
        assert begun.wait(60)
        expires = other.leases.list()[0].expires_at
        eventually(lambda: other.leases.list()[0].expires_at > expires, "its lease is renewed")
        for _ in range(3):
            with pytest.raises(holdfast.OperationInProgress):
                other.operation("a", ttl=3, when_locked="fail").run(lambda: effects.append("fast"))
            assert other.operations.get("a").status == "running"  # type: ignore[union-attr]
        go_on.set()
        assert first.result().result == "slow"
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
                client.operation(f"n{number}", remember_errors=[Exception]).run(work)
            assert client.operation(f"n{number}").run(lambda: "well").result == "well"
        with pytest.raises(ValueError, match="for good"):
            client.operation("kept", remember_errors=[ValueError]).run(lambda: int("for good"))
        with pytest.raises(holdfast.OperationFailed, match="for good"):
            client.operation("kept").run(lambda: "well")


def test_a_key_is_not_stuck_when_its_owner_dies(either: str) -> None:
    """Where the record said pending for days: here it is partial as soon as the owner's lease is gone."""

    def die() -> None:
        raise KeyboardInterrupt

    with holdfast.Client(either) as owner, pytest.raises(KeyboardInterrupt):
        owner.operation("a").run(die)
    with holdfast.Client(either) as client:
        assert client.operations.get("a").status == "partial"  # type: ignore[union-attr]
        undone: list[int] = []
        assert client.operation("a", rollback=lambda: undone.append(1)).run(lambda: "well").result == "well"
        assert undone == [1]


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
