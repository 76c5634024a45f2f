"""Operations in transactions that others get in the way of, or that get in each other's."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.operation_contract import LONG, gives_up, running
from tests.children import eventually
from tests.operations.user_connections import key, opened, work
from tests.user_connections import ask


def locked_with(task: str) -> holdfast.OperationKey:
    return holdfast.OperationKey(pipeline="etl", task=task, dataset="parcels", operation="load")


@pytest.mark.parametrize("kind", ["psycopg", "sqlite3"])
async def test_it_waits_for_an_external_one_with_the_same_lock(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        name = key()
        with running(each.url, name) as finish:
            skipped = each.client.operation(name, tx=each.connection, when_locked="skip").run(work(each, "x"))
            assert skipped.status == "skipped"
            waiter = each.client.operation(name, tx=each.connection, timeout=0.1)
            gives_up(lambda: waiter.run(work(each, "x")), after=0.1)
            finish().result(LONG)
        assert each.client.operation(name, tx=each.connection).run(work(each, "x")).result == "theirs"
        with running(each.url, locked_with("one")):
            other = each.client.operation(locked_with("other"), tx=each.connection, when_locked="skip")
            assert other.run(work(each, "x")).status == "skipped"
        assert each.rows() == []


@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_the_second_one_waits_and_replays_at_every_isolation_level(postgres_url: str, level: str, own: int) -> None:
    """``own``: which of the two begins a transaction of its own. The other is the first statement of the caller's."""
    ask(postgres_url, "create table work (what int)")
    begun, go_on, waits = threading.Event(), threading.Event(), threading.Event()

    def rule(context: holdfast.governance.PolicyContext) -> holdfast.governance.Allow:
        if context.lock == "busy":
            waits.set()
        return holdfast.governance.Allow()

    with holdfast.Client(postgres_url, policy=rule) as client, ThreadPoolExecutor(2) as pool:

        def run(number: int) -> Any:
            with psycopg.connect(postgres_url, autocommit=number == own) as mine:
                mine.isolation_level = psycopg.IsolationLevel[level]

                def effect() -> int:
                    mine.execute("insert into work values (%s)", [number])
                    begun.set()
                    assert go_on.wait(LONG)
                    return number

                return client.operation("the same", tx=mine, timeout=LONG).run(effect)

        first = pool.submit(run, 1)
        assert begun.wait(LONG)
        second = pool.submit(run, 2)
        assert waits.wait(LONG), "the second has asked"
        go_on.set()
        outcomes = first.result(LONG), second.result(LONG)
        assert [(each.result, each.replayed) for each in outcomes] == [(1, False), (1, True)]
    assert ask(postgres_url, "select what from work") == [(1,)]


def test_serialization_failures_are_tried_again_and_never_remembered(postgres_url: str) -> None:
    """Two transactions that read what the other writes: one is refused when it commits, and runs once more."""
    ask(postgres_url, "create table work (what int)")
    calls = []
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:
        mine.isolation_level = psycopg.IsolationLevel.SERIALIZABLE

        def effect() -> int:
            calls.append(1)
            found = mine.execute("select count(*) from work").fetchone()
            mine.execute("insert into work values (1)")
            if len(calls) == 1:
                with psycopg.connect(postgres_url) as other:
                    other.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
                    other.execute("select count(*) from work")
                    other.execute("insert into work values (2)")
            assert found is not None
            count: int = found[0]
            return count

        outcome = client.operation("k", tx=mine, retry=holdfast.Retry(remember=[Exception])).run(effect)
    assert (len(calls), outcome.result, outcome.attempt) == (2, 1, 1)
    assert ask(postgres_url, "select what from work order by 1") == [(1,), (2,)]


@pytest.mark.parametrize("mode", [None, "DEFERRED"])
async def test_whoever_waits_for_a_file_on_a_loop_keeps_it_from_nobody(sqlite_url: str, mode: Any) -> None:
    """SQLite's own way to wait would hold up the loop, and with it the task that has the file."""
    path, begun, asked = sqlite_url.removeprefix("sqlite:///"), asyncio.Event(), asyncio.Event()
    calls: list[int] = []
    async with holdfast.AsyncClient(sqlite_url) as client:
        await client.operations.list()
        with (
            closing(sqlite3.connect(path, isolation_level=None)) as first,
            closing(sqlite3.connect(path, isolation_level=mode, timeout=60)) as second,
        ):

            async def effect() -> int:
                calls.append(1)
                begun.set()
                await asked.wait()
                return 1

            def hear(sql: str) -> None:
                if sql == "begin immediate":
                    asked.set()

            second.set_trace_callback(hear)
            holding = asyncio.create_task(client.operation("k", tx=first).run(effect))
            await begun.wait()
            waited = await asyncio.wait_for(client.operation("k", tx=second).run(effect), LONG)
            assert (waited.replayed, (await holding).replayed, len(calls)) == (True, False, 1)
            assert second.execute("pragma busy_timeout").fetchone() == (60_000,)


def test_only_what_others_got_in_the_way_of_is_run_again_by_itself(postgres_url: str) -> None:
    """A function that cannot reach something else would be called again and again, each time until it gives up."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:
        for error in (TimeoutError(), ConnectionRefusedError(), psycopg.OperationalError("the connection is lost")):
            calls: list[int] = []

            def effect(calls: list[int] = calls, error: Exception = error) -> None:
                calls.append(1)
                raise error

            with pytest.raises(type(error)):
                client.operation("k", tx=mine).run(effect)
            assert len(calls) == 1
        assert client.operations.get("k") is None, "and nothing of it is remembered"


@pytest.mark.parametrize("kind", ["psycopg-autocommit-async", "sqlite3-manual-async", "psycopg-async", "sqlite3-async"])
async def test_a_connection_is_one_operations_at_a_time(kind: str, tmp_path: Path) -> None:
    """What others write on it would be committed with that one, and their log be missing; unless they are inside."""
    async with opened(kind, tmp_path) as each:
        name, begun, go_on = key(), asyncio.Event(), asyncio.Event()

        async def outer() -> Any:
            begun.set()
            await go_on.wait()
            inner = asyncio.create_task(
                each.client.operation(f"{name}-in", tx=each.connection).run(work(each, "in", 1))
            )
            return (await inner).result

        running = asyncio.create_task(each.client.operation(name, tx=each.connection).run(outer))
        await begun.wait()
        with pytest.raises(RuntimeError, match=f"in use by operation '{name}' of another thread or task"):
            await each.client.operation(f"{name}-beside", tx=each.connection).run(work(each, "beside"))
        go_on.set()
        assert (await running).result == 1
        await each.client.operation(f"{name}-beside", tx=each.connection).run(work(each, "after"))
        if kind in ("psycopg-async", "sqlite3-async"):
            assert each.rows() == []
            await each.commit()
        assert each.rows() == ["after", "in"]


def test_an_owner_that_ends_during_a_look_is_not_taken_for_dead(postgres_url: str) -> None:
    """The look at its row is over and the look at its lease waits, when both change."""
    name = key()
    with (
        holdfast.Client(postgres_url) as client,
        running(postgres_url, name),
        psycopg.connect(postgres_url) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        digest = client.operations.find(name).key
        other.execute("lock table holdfast.lease in access exclusive mode")
        look = pool.submit(ask, postgres_url, "select status, alive from holdfast.operation_get(%s)", digest)
        waits = "select 1 from pg_locks where relation = 'holdfast.lease'::regclass and not granted"
        eventually(lambda: ask(postgres_url, waits), "it waits for the lease")
        other.execute("update holdfast.idempotency_log set status = 'success'")
        other.execute("delete from holdfast.lease where name like '@op%'")
        other.commit()
        assert look.result(LONG) == [("partial", True)]


@pytest.mark.parametrize("patient", ["wait", "backoff"])
def test_whoever_waits_gets_a_turn_behind_one_who_asks_again_at_once(either: str, patient: Any) -> None:
    """Also with pauses of hours: both wait in one line."""
    begun, waits, done = threading.Event(), threading.Event(), threading.Event()
    retry = holdfast.Retry(first=86400.0, longest=86400.0)

    def rule(context: holdfast.governance.PolicyContext) -> holdfast.governance.Allow:
        if context.lock == "busy":
            waits.set()
        return holdfast.governance.Allow()

    def work() -> None:
        begun.set()
        assert waits.wait(LONG)
        done.wait(0.01)

    with (
        holdfast.Client(either) as busy,
        holdfast.Client(either, policy=rule) as client,
        ThreadPoolExecutor(1) as pool,
    ):

        def loop() -> None:
            for number in itertools.count():
                busy.operation(locked_with(f"busy {number}"), timeout=LONG).run(work)
                if done.is_set():
                    return

        looping = pool.submit(loop)
        try:
            assert begun.wait(LONG), looping.result()
            waiter = client.operation(locked_with("patient"), when_locked=patient, timeout=LONG, retry=retry)
            assert waiter.run(lambda: 7).result == 7
        finally:
            waits.set()
            done.set()
        looping.result(LONG)
