"""An operation as a block, as a decorator, with functions that are awaited; and what it takes to run one."""

from __future__ import annotations

import asyncio
import operator
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.operation_contract import leave_half_done, name
from holdfast.testing.proxy import Proxy
from tests.children import eventually, query
from tests.user_connections import ask

Connect = Callable[..., Any]


def test_a_block_is_an_operation(either: str) -> None:
    key = name()
    with holdfast.Client(either) as client:
        for replayed in (False, True):
            with client.operation(key) as op:
                assert (op.replayed, op.result) == (replayed, "done" if replayed else None)
                if not op.replayed:
                    op.checkpoint("half way", 1)
                    op.result = "done"
        with pytest.raises(ValueError, match="broken"), client.operation(other := name()) as op:
            raise ValueError("broken")
        with pytest.raises(RuntimeError, match=f"{other}.* has ended"):
            op.checkpoint("too late")
        record = client.operations.get(other)
        assert record is not None
        assert (record.status, record.attempt) == ("failure", 1)
        with client.operation(other) as op:
            op.result = object()
            with pytest.raises(ValueError, match="cannot be kept"):
                client.operation(name()).run(object)
            op.result = 2
        assert client.operation(other).run(int).result == 2


def test_an_error_that_cannot_say_what_it_is_is_recorded_as_any_other(sqlite_url: str) -> None:
    """And is the caller's. Else it would be under way for as long as the process lives."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def fail(error: type[Exception] = Mute) -> None:
        raise error

    with holdfast.Client(sqlite_url) as client:
        with pytest.raises(Mute):
            client.operation("a").run(fail)
        with pytest.raises(holdfast.OperationFailed, match="precondition 'fail' does not hold: Mute"):
            client.operation("b", checks=holdfast.Checks(before=[fail])).run(int)
        assert [each.status for each in client.operations.list()] == ["failure", "failure"]
        eventually(lambda: client.leases.list() == [], "no lease is held")


@pytest.mark.parametrize("joins", [False, True])
def test_an_error_that_is_its_own_cause_or_has_an_origin_of_its_own_is_recorded_as_any_other(
    joins: bool, tmp_path: Path
) -> None:
    """``raise error from error`` is easily written, and whoever follows causes to their end would never come back."""

    class Strange(Exception):
        orig = "nowhere"  # which SQLAlchemy's errors have, too, and there it is another error

    def fail(error: Exception) -> None:
        try:
            raise error
        except Exception as found:
            raise found from found

    path = tmp_path / "app.db"
    with holdfast.Client(f"sqlite:///{path}") as client, closing(sqlite3.connect(path)) as mine:
        for number, error in enumerate((ValueError("x"), Strange("y"))):
            for tx in (None, mine):
                key = f"{number} {tx}"
                if joins:
                    mine.execute("begin")
                with pytest.raises(type(error)):
                    client.operation(key, retry=holdfast.Retry(remember=[Exception]), tx=tx).run(fail, error)
                mine.commit()
                with pytest.raises(holdfast.OperationFailed, match="remembered"):
                    client.operation(key).run(int)
        assert not mine.in_transaction
        eventually(lambda: client.leases.list() == [], "no lease is held")


async def test_a_block_is_an_operation_async(either: str) -> None:
    key = name()
    async with holdfast.AsyncClient(either) as client:
        for replayed in (False, True):
            async with client.operation(key) as op:
                assert op.replayed is replayed
                op.result = "done"
        with pytest.raises(ValueError, match="broken"):
            async with client.operation(name()):
                raise ValueError("broken")


def test_a_block_in_a_transaction(postgres_url: str) -> None:
    ask(postgres_url, "create table work (what int)")
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        for _ in range(2):
            with client.operation("k", tx=mine) as op:
                if not op.replayed:
                    mine.execute("insert into work values (1)")
        with pytest.raises(psycopg.Error, match="no_such_table"), client.operation("l", tx=mine):
            mine.execute("with a as (insert into work values (2)) select * from no_such_table")
    assert ask(postgres_url, "select what from work") == [(1,)]


async def test_functions_that_are_awaited_run_side_by_side_and_do_not_mix(either: str) -> None:
    async with holdfast.AsyncClient(either) as client:
        calls: list[int] = []

        async def work(number: int) -> int:
            calls.append(number)
            await asyncio.sleep(0.01)
            return number

        prefix = name()
        runs = [client.operation(f"{prefix}-{n % 5}", timeout=60).run(work, n % 5) for n in range(20)]
        assert [each.result for each in await asyncio.gather(*runs)] == [n % 5 for n in range(20)]
        assert sorted(calls) == [0, 1, 2, 3, 4]


def test_as_few_round_trips_as_there_can_be(postgres_url: str) -> None:
    ask(postgres_url, "create table work (what int)")
    with (
        Proxy(postgres_url) as proxy,
        holdfast.Client(proxy.url) as client,
        psycopg.connect(proxy.url, autocommit=True) as mine,
    ):

        def trips(run: Callable[[], object]) -> int:
            before = proxy.messages
            run()
            return int(proxy.messages - before)

        def effect() -> None:
            mine.execute("insert into work values (1)")

        client.operation("warm", tx=mine).run(effect)
        assert trips(lambda: client.operation("k", tx=mine).run(effect)) == 3, (
            "BEGIN with the claim, the effect, the end with COMMIT"
        )
        assert trips(lambda: client.operation("k", tx=mine).run(effect)) == 2, "BEGIN with the claim, ROLLBACK"
        rows = "select (select count(*) from holdfast.idempotency_log), (select count(*) from holdfast.wal_more)"
        assert ask(postgres_url, rows) == [(2, 0)], "one row an operation, with its entries"
        client.operation("k").run(int)
        assert trips(lambda: client.operation("k").run(int)) == 1


def test_what_is_emitted_is_kept_with_the_effect(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:

        def work(op: Any, fail: bool) -> None:
            op.emit("lineage", {"fail": fail})
            if fail:
                raise ValueError("broken")

        for fail in (True, False):
            for tx in (None, mine):
                try:
                    client.operation(f"{tx is None}", tx=tx).run(work, fail)
                except ValueError:
                    assert fail
    told = query(postgres_url, "select idem_key, attempt, topic, payload from holdfast.outbox")
    assert [each[1:] for each in told] == [(2, "lineage", '{"fail": false}')] * 2
    assert len({each[0] for each in told}) == 2


async def test_tasks_and_threads_of_one_operation_may_note_at_the_same_time(either: str) -> None:
    def threads(op: Any) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(op.checkpoint, "abcd"))

    async def tasks(op: Any) -> None:
        await asyncio.gather(*map(op.checkpoint, "abcd"))

    async def progress(*counted: int) -> None:
        told.append(counted)

    key, told = name(), list[Any]()
    async with holdfast.AsyncClient(either) as client:
        await client.operation(key).run(tasks)
        await client.operations.run_many([f"{key}-many"], lambda _, op: tasks(op), progress=progress)
        with holdfast.Client(either) as other:
            other.operation(f"{key}-threads").run(threads)
        for each in (key, f"{key}-many", f"{key}-threads"):
            [state] = await client.operations.replay(each)
            assert (state.status, sorted(state.checkpoints)) == ("success", ["a", "b", "c", "d"])
            assert (await client.operations.verify(each)).problems == ()
    assert told == [(1, 1)], "progress may be awaited, too"


def test_usage_and_execute_are_enough(postgres_url: str) -> None:
    role = f"role_{postgres_url.rpartition('_')[2]}"
    for sql in (
        f"create role {role} login", f"grant usage on schema holdfast to {role}",
        f"grant execute on all functions in schema holdfast to {role}", f"grant create on schema public to {role}",
    ):  # fmt: skip
        query(postgres_url, sql)
    url = postgres_url.replace("//postgres@", f"//{role}@")
    with holdfast.Client(url) as client, psycopg.connect(url, autocommit=True) as mine:
        assert client.operation("a", tx=mine).run(lambda: 1).result == 1
        assert client.operation("b").run(lambda: 2).result == 2
        leave_half_done(url, "c")
        client.operations.register("undo", rollback=int)
        client.operations.reset("c", actor="jane", reason="known")
        assert [each.result for each in client.operations.run_many("abcd", lambda key: key)] == [1, 2, "c", "d"]
        assert client.operations.recover() == []
        assert client.operations.verify().broken == ()


def test_a_function_that_is_not_written_in_python_is_decorated_as_any_other(sqlite_url: str) -> None:
    """Some of them do not say what they take."""
    with holdfast.Client(sqlite_url) as client:
        largest: Any = client.operation(key=lambda *values: f"largest-{values[0]}")(max)
        assert (largest(1, 2).result, largest(1, 2).replayed) == (2, True)
        with pytest.raises(holdfast.KeyReused):
            largest(1, 3)


def test_what_is_left_to_its_default_is_what_was_sent(sqlite_url: str) -> None:
    """Else a retry that says it would be another operation. What has no single meaning is a default all the same."""
    with holdfast.Client(sqlite_url) as client:

        @client.operation(key="a")
        def load(path: str, srid: int = 4326, *, mode: str = "full", unset: object = object()) -> str:
            return path

        assert load("x").replayed is False
        for same in (load("x", 4326), load(path="x", mode="full"), load("x", srid=4326)):
            assert same.replayed
        others: list[dict[str, Any]] = [{"srid": 4327}, {"srid": 4326.0}, {"mode": "none"}]
        for other in others:
            with pytest.raises(holdfast.KeyReused):
                load("x", **other)


def test_a_method_is_decorated_as_any_other(sqlite_url: str) -> None:
    """The object that it is called on is none of its arguments."""
    with holdfast.Client(sqlite_url) as client:

        class Shop:
            @client.operation(key=lambda self, number, price: f"order-{number}")
            def order(self, number: int, price: int) -> list[int]:
                return [number, price]

            @classmethod
            @client.operation(key=lambda cls, number: f"offer-{number}")
            def offer(cls, number: int) -> int:
                return number

        assert Shop().order(1, price=5).result == [1, 5]
        assert Shop().order(1, 5).replayed
        with pytest.raises(holdfast.KeyReused):
            Shop().order(1, 6)
        assert (Shop.offer(1).result, Shop.offer(1).replayed) == (1, True)
        half: Any = client.operation(key=lambda b: f"half-{b}")(partial(operator.mul, 7))
        assert (half(2).result, half(2).replayed) == (14, True)
        with pytest.raises(TypeError, match="what is decorated must be a function, not 5"):
            client.operation(key="x")(5)  # type: ignore[arg-type]
