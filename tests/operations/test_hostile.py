"""What callers do that nobody has in mind: operations inside of operations, transactions that are old, and what
functions take as ``op``."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.operation_contract import LONG, name, running
from tests.children import pass_time, query
from tests.operations.policies import connected, every_way
from tests.user_connections import ask


def key_of(task: str, dataset: str = "parcels") -> holdfast.OperationKey:
    return holdfast.OperationKey(pipeline="etl", task=task, dataset=dataset, operation="load")


@pytest.mark.parametrize("patient", ["wait", "backoff"])
def test_one_inside_of_another_with_the_same_lock_is_told_at_once(either: str, patient: Any) -> None:
    """It would wait for itself until its time is over."""
    with holdfast.Client(either) as client:

        def inner() -> Any:
            return client.operation(key_of("inner"), when_locked=patient, timeout=LONG).run(int)

        with pytest.raises(holdfast.OperationInProgress, match="and would never get it"):
            client.operation(key_of("outer")).run(inner)
        with (
            pytest.raises(holdfast.OperationInProgress, match="and would never get it"),
            client.operation(key_of("block")),
        ):
            inner()
        skipped = client.operation(key_of("again")).run(
            lambda: client.operation(key_of("inner"), when_locked="skip").run(int).status
        )
        assert skipped.result == "skipped"
        assert inner().replayed is False, "outside of it, nothing is in its way"


async def test_a_task_that_outlives_the_operation_it_was_begun_in_waits_as_any_other(either: str) -> None:
    begun: list[asyncio.Task[Any]] = []
    go_on, waits = asyncio.Event(), asyncio.Event()

    def rule(context: holdfast.governance.PolicyContext) -> holdfast.governance.Allow:
        if context.lock == "busy":
            waits.set()
        return holdfast.governance.Allow()

    async with holdfast.AsyncClient(either, policy=rule) as client:

        async def later() -> Any:
            await go_on.wait()
            return await client.operation(key_of("later"), timeout=LONG).run(int)

        async def work() -> None:
            begun.append(asyncio.create_task(later()))

        await client.operation(key_of("first")).run(work)
        with running(either, key_of("theirs")) as finish:
            go_on.set()
            await asyncio.wait_for(waits.wait(), LONG)
            finish()
        assert (await begun[0]).status == "success"


@pytest.mark.parametrize("engine", ["postgres", "sqlite"])
def test_one_inside_of_itself_in_the_same_transaction_is_told_so(request: pytest.FixtureRequest, engine: str) -> None:
    url = request.getfixturevalue(f"{engine}_url")
    calls: list[int] = []
    with holdfast.Client(url) as client:
        client.operations.list()
        with closing(sqlite3.connect(url[10:]) if engine == "sqlite" else psycopg.connect(url)) as mine:

            def work() -> int:
                calls.append(1)
                return int(client.operation("a", tx=mine).run(work).result)

            with pytest.raises(holdfast.OperationInProgress, match="inside of itself"):
                client.operation("a", tx=mine).run(work)
            assert calls == [1]
            assert client.operation("a", tx=mine).run(lambda: 7).result == 7


@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_a_transaction_that_is_older_than_what_was_done_never_does_it_again(postgres_url: str, level: str) -> None:
    """Joined: it may not see that it was done, and then it is refused when it says so."""
    ask(postgres_url, "create table work (what text)")
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url) as old,
        psycopg.connect(postgres_url, autocommit=True) as quick,
    ):
        old.isolation_level = psycopg.IsolationLevel[level]
        old.execute("select count(*) from work")  # what it sees is fixed now, at the higher levels

        def effect(connection: Any, what: str) -> str:
            connection.execute("insert into work values (%s)", [what])
            return what

        assert client.operation("a", tx=quick).run(effect, quick, "quick").result == "quick"
        if level == "READ_COMMITTED":
            outcome = client.operation("a", tx=old).run(effect, old, "old")
            assert (outcome.result, outcome.replayed) == ("quick", True)
        else:
            with pytest.raises(psycopg.errors.SerializationFailure):
                client.operation("a", tx=old).run(effect, old, "old")
            old.rollback()
            assert client.operation("a", tx=old).run(effect, old, "old").replayed
        old.commit()
    assert ask(postgres_url, "select what from work") == [("quick",)]


@pytest.mark.parametrize("engine", ["postgres", "sqlite"])
def test_what_is_escalated_in_a_joined_transaction_waits_for_nobody(
    request: pytest.FixtureRequest, engine: str
) -> None:
    """On SQLite the file has one writer, and that is the caller: the review is part of its transaction there."""
    url = request.getfixturevalue(f"{engine}_url")
    with holdfast.Client(url) as client, running(url, "a"):
        with pytest.raises(ValueError, match="broken"):
            client.operation("b").run(_broken)
        with closing(sqlite3.connect(url[10:], timeout=LONG) if engine == "sqlite" else psycopg.connect(url)) as mine:
            mine.execute("create table work (what int)")
            if engine == "sqlite":
                mine.execute("begin immediate")
            with pytest.raises(holdfast.OperationInProgress, match="up for review as number 1"):
                client.operation("a", tx=mine, when_locked="escalate").run(int)
            with pytest.raises(holdfast.OperationFailed, match="up for review"):
                client.operation("b", tx=mine, retry=holdfast.Retry(attempts=1)).run(int)
            mine.commit()
        assert [(each.label, each.reason) for each in client.reviews.list()] == [
            ("a", "locked"), ("b", "attempts"),
        ]  # fmt: skip


def test_what_is_emitted_is_told_with_a_success_and_never_before(either: str) -> None:
    with holdfast.Client(either) as client:

        def work(op: Any, fails: bool) -> None:
            op.emit("lineage", 1)
            op.checkpoint("half way")
            if fails:
                raise ValueError("broken")

        outbox = "holdfast_outbox" if either.startswith("sqlite") else "holdfast.outbox"
        for fails, told in ((True, []), (False, [(2,)])):
            try:
                client.operation("a").run(work, fails)
            except ValueError:
                assert fails
            assert query(either, f"select attempt from {outbox}") == told


def test_op_is_given_wherever_it_is_asked_for(sqlite_url: str) -> None:
    def first(op: Any, a: int) -> list[Any]:
        return [op.attempt, a]

    def last(a: int, op: Any) -> list[Any]:
        return [op.attempt, a]

    def named(a: int, *, op: Any) -> list[Any]:
        return [op.attempt, a]

    @functools.wraps(last)
    def wrapped(*args: Any, **kwargs: Any) -> list[Any]:
        return last(*args, **kwargs)

    class Called:
        def __call__(self, a: int, *, op: Any) -> list[Any]:
            return [op.attempt, a]

        def method(self, op: Any, a: int) -> list[Any]:
            return [op.attempt, a]

    functions: list[Callable[..., Any]] = [
        first, last, named, wrapped, Called(), Called().method, functools.partial(last), lambda a: [1, a],
    ]  # fmt: skip
    with holdfast.Client(sqlite_url) as client:
        for function in functions:
            assert client.operation(name()).run(function, 7).result == [1, 7], function


def _broken() -> None:
    raise ValueError("broken")


@every_way
def test_a_key_that_is_used_anew_has_all_its_attempts(attempt: Any, either: str) -> None:
    key = name()
    with holdfast.Client(either) as client:
        for rounds in range(2):
            with pytest.raises(ZeroDivisionError):
                attempt(client, key, lambda: 1 // 0, retry=holdfast.Retry(attempts=2))
            assert (
                attempt(client, key, lambda rounds=rounds: rounds, retry=holdfast.Retry(attempts=2), keep=0.001).result
                == rounds
            )
            pass_time(0.01)


def test_a_reset_that_a_transaction_has_overtaken_says_so(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the lease, which those who have the lock do not ask for."""
    key = name()
    with holdfast.Client(either) as client, connected(either) as mine:
        with pytest.raises(ZeroDivisionError):
            client.operation(key, tx=mine).run(lambda: 1 // 0)
        call = client._engine.call

        def overtaken(statement: str, *given: Any, **more: Any) -> Any:
            if statement == "operation_correct":
                monkeypatch.undo()
                assert client.operation(key, tx=mine).run(lambda: 7).attempt == 2
            return call(statement, *given, **more)

        monkeypatch.setattr(client._engine, "call", overtaken)
        with pytest.raises(holdfast.OperationInProgress, match="another process has run it meanwhile"):
            client.operations.reset(key, actor="jane", reason="impatient")
        assert client.operation(key).run(int).result == 7
        assert client.operations.verify(key).problems == ()
