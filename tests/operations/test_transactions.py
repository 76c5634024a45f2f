"""An operation in the user's own transaction: effect, result and entries are one, whatever the driver."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.operation_stage import RESULTS, leave_half_done, running
from tests.children import eventually, query
from tests.conftest import migrated, server
from tests.subjects import ALCHEMY, ALCHEMY_SQLITE, POSTGRES, SQLITE, Subject, ask, settled, shared_postgres, subject

KINDS = [*POSTGRES, *SQLITE, *ALCHEMY, *ALCHEMY_SQLITE]
FEW = ["psycopg", "psycopg-async", "sqlite3", "session-psycopg", "connection-asyncpg-async"]


@asynccontextmanager
async def opened(kind: str, tmp_path: Path) -> AsyncIterator[Subject]:
    url = f"sqlite:///{tmp_path / 'app.db'}" if kind in SQLITE or kind in ALCHEMY_SQLITE else shared_postgres()
    async with subject(kind, url) as each:
        yield each


def key() -> str:
    return f"op-{secrets.token_hex(6)}"


def work(each: Subject, what: str, result: Any = None, error: Exception | None = None) -> Callable[[], Any]:
    """Writes one row, then returns or raises."""
    statement = each.sql(f"insert into {each.table} values ('{what}')")

    def plain() -> Any:
        each.connection.execute(statement)
        if error is not None:
            raise error
        return result

    async def awaited() -> Any:
        await settled(each.connection.execute(statement))
        if error is not None:
            raise error
        return result

    return awaited if isinstance(each.client, holdfast.AsyncClient) else plain


def logged(url: str, label: str) -> list[tuple[Any, ...]]:
    table = "holdfast_idempotency_log" if url.startswith("sqlite") else "holdfast.idempotency_log"
    return query(url, f"select status, attempt from {table} where label = %s", label)


@pytest.mark.parametrize("kind", KINDS)
async def test_effect_and_result_are_one_transaction(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        name = key()

        def run(what: str, **options: Any) -> Any:
            operation = each.client.operation(name, tx=each.connection)
            return settled(operation.run(work(each, what, **options)))

        with pytest.raises(ValueError, match="broken"):
            await run("failed", error=ValueError("broken"))
        assert each.rows() == []
        assert logged(each.url, name) == [("failure", 1)]
        outcome = await run("done", result={"rows": 1})
        assert (outcome.result, outcome.replayed, outcome.attempt, outcome.committed) == ({"rows": 1}, False, 2, True)
        assert each.rows() == ["done"]
        again = await run("again")
        assert (again.result, again.replayed) == ({"rows": 1}, True)
        assert each.rows() == ["done"]
        await each.begin()
        await each.write("mine")  # the connection is as usable as before
        await each.commit()
        assert each.rows() == ["done", "mine"]


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_open_is_joined_and_its_commit_is_the_callers(kind: str, tmp_path: Path) -> None:
    if kind == "sqlite3-autocommit-off":
        pytest.skip("one is always open there, and none of them is the caller's")
    async with opened(kind, tmp_path) as each:
        name = key()

        def run(what: str, **options: Any) -> Any:
            return settled(each.client.operation(name, tx=each.connection).run(work(each, what, **options)))

        for end in (each.rollback, each.commit):
            await each.begin()
            await each.write("mine")
            outcome = await run("done", result=7)
            assert (outcome.result, outcome.replayed, outcome.committed) == (7, False, False)
            again = await run("again")
            assert (again.result, again.replayed, again.committed) == (7, True, False), "it sees what it has written"
            assert logged(each.url, name) == []
            await end()
        assert each.rows() == ["done", "mine"]
        assert logged(each.url, name) == [("success", 1)]
        await each.begin()
        await each.write("more")
        assert (await run("again")).committed, "what was done before is committed, whatever becomes of this one"
        await each.rollback()


@pytest.mark.parametrize("kind", FEW)
async def test_of_what_fails_in_a_joined_transaction_stays_that_it_was_tried(kind: str, tmp_path: Path) -> None:
    """Nothing of its effect, or whoever goes on after the error would commit one that nobody knows of. It belongs to
    that transaction: what that takes back was never begun."""
    async with opened(kind, tmp_path) as each:
        name = key()

        def run(what: str, **options: Any) -> Any:
            operation = each.client.operation(name, tx=each.connection, max_attempts=2)
            return settled(operation.run(work(each, what, **options)))

        def told() -> list[tuple[str, int]]:
            return [(event.type, event.attempt) for event in each.other.relays.events() if event.label == name]

        for end in (each.rollback, each.commit):
            await each.begin()
            await each.write("mine")
            with pytest.raises(ValueError, match="broken"):
                await run("half", error=ValueError("broken"))
            with pytest.raises(ValueError, match="cannot be kept"):
                await run("half", result=object())
            with pytest.raises(holdfast.OperationFailed, match="was tried 2 times, the last time with ValueError"):
                await run("more")
            assert (logged(each.url, name), each.other.reviews.list(key=name), told()) == ([], [], [])
            await end()
        assert each.rows() == ["mine"]
        assert logged(each.url, name) == [("failure", 2)]
        assert told() == [("START", 1), ("FAIL", 1), ("START", 2), ("FAIL", 2)]
        assert each.other.operations.verify(name).problems == ()
        [review] = each.other.reviews.list(key=name)
        each.other.reviews.approve(review.id, actor="jane", reason="once more")
        await each.begin()
        await each.write("yours")
        assert (await run("done", result=3)).attempt == 3
        await each.commit()
        assert each.rows() == ["done", "mine", "yours"]
        assert told()[4:] == [("START", 3), ("COMPLETE", 3)]


@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_in_a_joined_transaction_it_is_tried_again_and_remembered_at_every_isolation_level(
    postgres_url: str, level: str
) -> None:
    ask(postgres_url, "create table work (what int)")
    ask(postgres_url, "insert into work values (0)")
    calls: list[int] = []
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        mine.isolation_level = psycopg.IsolationLevel[level]
        mine.execute("select * from work")

        def third() -> int:
            mine.execute("insert into work values (%s)", [len(calls)])
            calls.append(1)
            if len(calls) < 3:
                raise ValueError("not yet")
            return len(calls)

        outcome = client.operation("a", tx=mine, retries=2).run(third)
        assert (outcome.attempt, outcome.result, outcome.committed) == (3, 3, False)
        operation = client.operation("b", tx=mine, remember_errors=[ValueError])
        for error in (ValueError, holdfast.OperationFailed):
            with pytest.raises(error, match="for good"):
                operation.run(lambda: (_ for _ in ()).throw(ValueError("for good")))
        mine.commit()
        with pytest.raises(holdfast.OperationFailed, match="for good"):
            operation.run(third)

        def collide() -> None:
            mine.execute("update work set what = 9 where what = 0")

        def end() -> None:
            mine.execute("select pg_terminate_backend(pg_backend_pid())")

        if level != "READ_COMMITTED":
            mine.execute("select * from work")
            ask(postgres_url, "update work set what = what")
            with pytest.raises(psycopg.errors.SerializationFailure):
                client.operation("c", tx=mine, remember_errors=[Exception]).run(collide)
            mine.execute("insert into work values (4)")
            mine.commit()
        mine.execute("insert into work values (5)")
        with pytest.raises(psycopg.errors.AdminShutdown):
            client.operation("c", tx=mine, remember_errors=[Exception]).run(end)
        events = [(each.label, each.type) for each in client.relays.events()]
        assert events == [
            *[("a", type) for type in ("START", "FAIL", "START", "FAIL", "START", "COMPLETE")],
            ("b", "START"), ("b", "FAIL"),
        ]  # fmt: skip
        assert client.operations.verify().problems == ()


def test_a_rollback_that_fails_leaves_a_joined_transaction_usable(postgres_url: str) -> None:
    def cannot() -> None:
        mine.execute("insert into work values (1)")
        raise RuntimeError("cannot")

    ask(postgres_url, "create table work (what int)")
    leave_half_done(postgres_url, "k")
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        mine.execute("insert into work values (2)")
        with pytest.raises(RuntimeError, match="cannot") as told:
            client.operation("k", tx=mine, rollback=cannot).run(lambda: 1)
        mine.commit()
        assert told.value is not None
    assert ask(postgres_url, "select what from work") == [(2,)]


@pytest.mark.parametrize("kind", FEW)
async def test_a_result_that_cannot_be_kept_undoes_the_effect(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        for wrong in (object(), b"x" * (2 << 20)):
            with pytest.raises(ValueError, match=r"^the result"):
                await settled(each.client.operation(key(), tx=each.connection).run(work(each, "half", result=wrong)))
        assert each.rows() == []


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-async", "sqlite3", "session-psycopg"])
async def test_results_are_replayed_exactly(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        for result in RESULTS:
            name = key()
            for replayed in (False, True):
                operation = each.client.operation(name, tx=each.connection)
                outcome = await settled(operation.run(work(each, "x", result=result)))
                assert (outcome.result, type(outcome.result), outcome.replayed) == (result, type(result), replayed)


def locked_with(task: str) -> holdfast.OperationKey:
    return holdfast.OperationKey(pipeline="etl", task=task, dataset="parcels", operation="load")


@pytest.mark.parametrize("kind", ["psycopg", "sqlite3"])
async def test_it_waits_for_an_external_one_with_the_same_lock(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        name = key()
        with running(each.url, name) as finish:
            skipped = each.client.operation(name, tx=each.connection, when_locked="skip").run(work(each, "x"))
            assert skipped.status == "skipped"
            with pytest.raises(holdfast.OperationInProgress, match=r"waited 0\.1"):
                each.client.operation(name, tx=each.connection, timeout=0.1).run(work(each, "x"))
            finish().result(30)
        assert each.client.operation(name, tx=each.connection).run(work(each, "x")).result == "theirs"
        with running(each.url, locked_with("one")):
            other = each.client.operation(locked_with("other"), tx=each.connection, when_locked="skip")
            assert other.run(work(each, "x")).status == "skipped"
        assert each.rows() == []


def test_a_function_that_commits_by_itself_is_found_out(postgres_url: str) -> None:
    """Else the effect would be there, and that it is would not be known if we died in between."""
    with holdfast.Client(postgres_url) as client:
        for autocommit in (False, True):
            with psycopg.connect(postgres_url, autocommit=autocommit) as mine:
                for end in (mine.commit, mine.rollback):
                    with pytest.raises(psycopg.ProgrammingError, match="forbidden within a Transaction"):
                        client.operation(key(), tx=mine).run(end)
                for sql in (b"commit", b"rollback"):
                    with pytest.raises(psycopg.Error, match=r"the transaction in which .* began is over"):
                        client.operation(key(), tx=mine).run(lambda sql=sql, mine=mine: mine.execute(sql).close())
                assert client.operation(key(), tx=mine).run(lambda: 1).result == 1
                assert mine.info.transaction_status.name == "IDLE"


@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_the_second_one_waits_and_replays_at_every_isolation_level(postgres_url: str, level: str) -> None:
    ask(postgres_url, "create table work (what int)")
    begun, go_on = threading.Event(), threading.Event()
    with holdfast.Client(postgres_url) as client, ThreadPoolExecutor(2) as pool:

        def run(number: int) -> Any:
            with psycopg.connect(postgres_url) as mine:
                mine.isolation_level = psycopg.IsolationLevel[level]

                def effect() -> int:
                    mine.execute("insert into work values (%s)", [number])
                    begun.set()
                    assert go_on.wait(30)
                    return number

                return client.operation("the same", tx=mine, timeout=30).run(effect)

        first = pool.submit(run, 1)
        assert begun.wait(30)
        second = pool.submit(run, 2)
        asked = "select count(*) from pg_stat_activity where query ~ 'operation_begin' and state = 'idle'"
        eventually(lambda: second.running() and query(postgres_url, asked), "the second has asked")
        go_on.set()
        outcomes = first.result(30), second.result(30)
        assert [(each.result, each.replayed) for each in outcomes] == [(1, False), (1, True)]
    assert ask(postgres_url, "select what from work") == [(1,)]


def test_serialization_failures_are_tried_again_and_never_remembered(postgres_url: str) -> None:
    """Two transactions that read what the other writes: one is refused when it commits, and runs once more."""
    ask(postgres_url, "create table work (what int)")
    calls = []
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
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

        outcome = client.operation("k", tx=mine, remember_errors=[Exception]).run(effect)
    assert (len(calls), outcome.result, outcome.attempt) == (2, 1, 1)
    assert ask(postgres_url, "select what from work order by 1") == [(1,), (2,)]


async def test_whoever_waits_for_a_file_on_a_loop_keeps_it_from_nobody(sqlite_url: str) -> None:
    """SQLite's own way to wait would hold up the loop, and with it the task that has the file."""
    path, begun, asked = sqlite_url.removeprefix("sqlite:///"), asyncio.Event(), asyncio.Event()
    calls: list[int] = []
    async with holdfast.AsyncClient(sqlite_url) as client:
        await client.operations.list()
        with closing(sqlite3.connect(path)) as first, closing(sqlite3.connect(path, timeout=60)) as second:

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
            waited = await asyncio.wait_for(client.operation("k", tx=second).run(effect), 20)
            assert (waited.replayed, (await holding).replayed, len(calls)) == (True, False, 1)
            assert second.execute("pragma busy_timeout").fetchone() == (60_000,)


def test_only_what_others_got_in_the_way_of_is_run_again_by_itself(postgres_url: str) -> None:
    """A function that cannot reach something else would be called again and again, each time until it gives up."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        for error in (TimeoutError(), ConnectionRefusedError(), psycopg.OperationalError("the connection is lost")):
            calls: list[int] = []

            def effect(calls: list[int] = calls, error: Exception = error) -> None:
                calls.append(1)
                raise error

            with pytest.raises(type(error)):
                client.operation("k", tx=mine).run(effect)
            assert len(calls) == 1
        assert client.operations.get("k") is None, "and nothing of it is remembered"


async def test_a_connection_to_another_database_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """It has tables like ours, and nobody would look there for what is done; a transaction that is open there is not
    joined either."""
    other, refused = migrated(server().database()), r"the connection is to another database than the client's"
    for kind in ("psycopg", "connection-asyncpg-async"):
        async with opened(kind, tmp_path) as each, subject(kind, other) as stranger:
            name = key()
            for _ in range(2):
                with pytest.raises(ValueError, match=refused):
                    await settled(each.client.operation(name, tx=stranger.connection).run(work(stranger, name)))
                await stranger.write("before")
            await stranger.rollback()
            outcome = await settled(each.client.operation(name, tx=each.connection).run(work(each, name, 7)))
            assert (outcome.result, outcome.replayed, stranger.rows(), each.rows()) == (7, False, [], [name])
            assert logged(other, name) == []
            grant = await settled(each.client.lease(name).acquire())
            with pytest.raises(holdfast.FencedOut, match="elsewhere" if kind == "psycopg" else "has passed on"):
                await stranger.write_within(grant, "start", name)
            assert stranger.rows() == []


@pytest.mark.parametrize("kind", ["psycopg", "connection-psycopg-async"])
async def test_a_connection_whose_encoding_lacks_a_letter_will_do(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        await each.run("set client_encoding to 'LATIN1'")
        await each.commit()
        name = f"Ж-{key()}"
        for replayed in (False, True):
            outcome = await settled(each.client.operation(name, tx=each.connection).run(work(each, "x", "Ж")))
            assert (outcome.result, outcome.replayed) == ("Ж", replayed)
        assert (each.rows(), logged(each.url, name)) == (["x"], [("success", 1)])
        grant = await settled(each.client.lease(name).acquire())
        with pytest.raises(ValueError, match=r"the encoding of this connection.*lacks: SET client_encoding TO 'UTF8'"):
            await each.write_within(grant, "start", "y")
        await each.rollback()
        assert each.rows() == ["x"]


@pytest.mark.parametrize("kind", ["psycopg", "session-psycopg", "connection-asyncpg-async"])
@pytest.mark.parametrize("joins", [False, True])
async def test_a_function_that_commits_by_itself_is_told_and_not_called_again(
    kind: str, joins: bool, tmp_path: Path
) -> None:
    """What it wrote is there, although the log could not be written with it."""
    async with opened(kind, tmp_path) as each:
        name, writes = key(), work(each, "x")

        def commit() -> Any:
            return each.connection.execute("commit") if kind == "psycopg" else each.connection.commit()

        def plain() -> None:
            writes()
            commit()

        async def awaited() -> None:
            await writes()
            await commit()

        function = awaited if isinstance(each.client, holdfast.AsyncClient) else plain
        for error, told in (
            (Exception, "has ended the transaction|began is over"),
            (holdfast.OperationFailed, "half done"),
        ):
            if joins:
                await each.run("select 1")
            with pytest.raises(error, match=told):
                await settled(each.client.operation(name, tx=each.connection).run(function))
            await each.rollback()
        assert (each.rows(), logged(each.url, name)) == (["x"], [("partial", 1)])
        assert (await settled(each.client.operations.verify(name))).passed


@pytest.mark.parametrize("kind", ["psycopg-async", "sqlite3-async"])
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
        with pytest.raises(RuntimeError, match=f"in the middle of operation '{name}', which somebody else runs"):
            await each.client.operation(f"{name}-beside", tx=each.connection).run(work(each, "beside"))
        go_on.set()
        assert (await running).result == 1
        await each.client.operation(f"{name}-beside", tx=each.connection).run(work(each, "after"))
        assert each.rows() == ["after", "in"]
