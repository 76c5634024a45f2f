"""An operation as a block, with functions that are awaited, with answers that get lost; and what is refused at once."""

from __future__ import annotations

import asyncio
import math
import operator
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.operation_stage import leave_half_done, name
from holdfast.testing.proxy import Proxy
from tests.children import query
from tests.subjects import ask

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
        with pytest.raises(RuntimeError, match=f"{other}.* is over"):
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
            client.operation("b", preconditions=[fail]).run(int)
        assert [each.status for each in client.operations.list()] == ["failure", "failure"]
        assert client.leases.list() == []


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


@pytest.mark.parametrize("many", [False, True])
async def test_what_a_function_leaves_behind_does_not_stand_in_the_way_of_its_end(either: str, many: bool) -> None:
    """A note that is being written when it returns comes before its end, and a later one is refused."""
    left: list[Any] = []

    async def work(key: Any = None, *, op: Any) -> int:
        left[:] = [op, asyncio.create_task(op.checkpoint("under way"))]
        await asyncio.sleep(0)
        return 1

    async with holdfast.AsyncClient(either) as client:
        if many:
            [outcome] = await client.operations.run_many(["a"], work)
        else:
            outcome = await client.operation("a").run(work)
        assert (outcome.result, await left[1]) == (1, None)
        with pytest.raises(RuntimeError, match="operation 'a' is over"):
            await left[0].checkpoint("too late")
        kinds = [each.kind for each in await client.operations.history("a")]
        assert kinds == ["lock_acquired", "claimed", "effect_started", "checkpoint", "success", "lock_released"]


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


async def test_what_is_cancelled_is_left_half_done(either: str) -> None:
    """Nobody knows what it has done: it is not a failure that may be tried again."""
    key, begun = name(), asyncio.Event()
    async with holdfast.AsyncClient(either) as client:

        async def work() -> None:
            begun.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(client.operation(key).run(work))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        record = await client.operations.get(key)
        assert record is not None
        assert record.status == "partial"


def test_a_late_owner_is_refused_by_its_fence(either: str) -> None:
    """It had the lease, and has done it; but somebody else has it now, and its result is the one that counts."""
    key, begun, go_on = name(), threading.Event(), threading.Event()

    def late() -> str:
        begun.set()
        assert go_on.wait(30)
        return "late"

    with holdfast.Client(either) as client, holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(lambda: client.operation(key).run(late))
        assert begun.wait(30)
        [lease] = other.leases.list()
        other.leases.force_release(lease.name, actor="test", reason="it stands still")
        assert other.operation(key, rollback=int).run(lambda: "in time").attempt == 2
        go_on.set()
        with pytest.raises(holdfast.FencedOut):
            zombie.result(30)
        assert other.operation(key).run(int).result == "in time"
        assert other.operations.verify(key).broken == ()


def test_a_checkpoint_of_a_late_owner_is_refused_too(either: str) -> None:
    with holdfast.Client(either) as client, holdfast.Client(either) as other:

        def work(op: Any) -> None:
            [lease] = other.leases.list()
            other.leases.force_release(lease.name, actor="test", reason="it stands still")
            op.checkpoint("half way")

        with pytest.raises(holdfast.FencedOut, match=r"'op-.*' has passed on to somebody else"):
            client.operation(key := name()).run(work)
        record = other.operations.get(key)
        assert record is not None
        assert record.status == "partial"


@pytest.mark.parametrize("moment", ["to_server", "to_client"])
def test_an_end_whose_answer_was_lost_is_written_once(postgres_url: str, moment: Any) -> None:
    with Proxy(postgres_url) as proxy, holdfast.Client(proxy.url) as client:

        def work() -> str:
            proxy.stall(moment)
            threading.Timer(0.3, heal).start()
            return "done"

        def heal() -> None:
            proxy.cut()
            proxy.heal()

        outcome = client.operation("k", ttl=60).run(work)
        assert (outcome.result, outcome.attempt) == ("done", 1)
        assert client.operation("k").run(int).result == "done"
    assert query(postgres_url, "select count(*) from holdfast.wal") == [(2,)], "the claim and the end"


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


@pytest.fixture
def untouched(connect: Connect, tmp_path: Path) -> Iterator[Any]:
    """A client of a file that must not even be made."""
    yield connect(f"sqlite:///{tmp_path / 'app.db'}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"when_locked": "hope"}, ValueError, "when_locked must be one of wait, backoff, skip, fail, escalate"),
        ({"on_partial": "rollback"}, ValueError, "on_partial='rollback' needs rollback="),
        ({"on_partial": "verify"}, ValueError, "on_partial='verify' needs verify="),
        ({"on_partial": "hope"}, ValueError, "on_partial must be"),
        ({"timeout": -1}, ValueError, "timeout must be between"),
        ({"ttl": 0}, ValueError, "ttl must be between"),
        ({"ttl": math.nan}, ValueError, "ttl must be between"),
        ({"keep": 0}, ValueError, "keep must be between"),
        ({"max_attempts": 0}, ValueError, "max_attempts must be 1 or more, not 0"),
        ({"max_attempts": True}, TypeError, "max_attempts must be an int"),
        ({"retries": -1}, ValueError, "retries must be 0 or more"),
        ({"remember_errors": ["ValueError"]}, TypeError, "remember_errors must be a list of exception classes"),
        ({"remember_errors": ValueError}, TypeError, "remember_errors must be a list of exception classes"),
        ({"rollback": 7}, TypeError, "rollback must be a function"),
        ({"rollback": "unknown"}, ValueError, "no rollback is registered as 'unknown'; there are: none"),
        ({"verify": "x"}, TypeError, "verify must be a function"),
        ({"preconditions": [1]}, TypeError, "a condition must be a function"),
        ({"payload": open}, TypeError, "payload is a builtin_function_or_method, which has no canonical form"),
        ({"actor": ""}, ValueError, "actor must have"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_at_once(untouched: Any, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        untouched.operation("k", **options)


def test_wrong_keys_and_functions_are_refused_at_once(untouched: Any) -> None:
    for key in ("", "x" * 201, "a\nb"):
        with pytest.raises(ValueError, match=r"^key must"):
            untouched.operation(key)
    for wrong in (7, b"x", None):
        with pytest.raises(TypeError, match="key must be a str or an OperationKey"):
            untouched.operation(wrong)
    with pytest.raises(TypeError, match="function must be a function"):
        untouched.operation("k").run(7)
    with pytest.raises(TypeError, match=r"cannot use the transaction of a builtins\.str"):
        untouched.operation("k", tx="conn").run(int)
    with pytest.raises(TypeError, match="this operation is a decorator"):
        untouched.operation(lambda: "k").run(int)
    with pytest.raises(ValueError, match="status must be one of"):
        untouched.operations.list(status="done")
    with pytest.raises(ValueError, match="nothing to register"):
        untouched.operations.register("x")
    for option, given in (("batch", 0), ("batch", 1.5), ("batch", True), ("progress", 7), ("key", 7), ("payload", 7)):
        with pytest.raises((ValueError, TypeError), match=f"^{option} must be"):
            untouched.operations.run_many(["a"], len, **{option: given})


def test_a_function_that_only_begins_when_it_is_called_is_refused(tmp_path: Path) -> None:
    """Its result would be a coroutine, and nothing would have been done."""

    async def later() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    client = holdfast.Client(f"sqlite:///{tmp_path / 'app.db'}")
    for function in (later, generator):
        with pytest.raises(TypeError, match="only begins when it is called"):
            client.operation("k").run(function)
        with pytest.raises(TypeError, match="only begins when it is called"):
            client.operation("k")(function)
    assert list(tmp_path.iterdir()) == []


def test_usage_and_execute_are_enough(postgres_url: str) -> None:
    role = f"role_{postgres_url.rpartition('_')[2]}"
    for sql in (
        f"create role {role} login", f"grant usage on schema holdfast to {role}",
        f"grant execute on all functions in schema holdfast to {role}", f"grant create on schema public to {role}",
    ):  # fmt: skip
        query(postgres_url, sql)
    url = postgres_url.replace("//postgres@", f"//{role}@")
    with holdfast.Client(url) as client, psycopg.connect(url) as mine:
        assert client.operation("a", tx=mine).run(lambda: 1).result == 1
        assert client.operation("b").run(lambda: 2).result == 2
        leave_half_done(url, "c")
        client.operations.register("undo", rollback=int)
        client.operations.reset("c", actor="jane", reason="known")
        assert [each.result for each in client.operations.run_many("abcd", lambda key: key)] == [1, 2, "c", "d"]
        assert client.operations.recover() == {}
        assert client.operations.verify().broken == ()


def test_a_function_that_is_not_written_in_python_is_decorated_as_any_other(sqlite_url: str) -> None:
    """Some of them do not say what they take."""
    with holdfast.Client(sqlite_url) as client:
        largest: Any = client.operation(key=lambda *values: f"largest-{values[0]}")(max)
        assert (largest(1, 2).result, largest(1, 2).replayed) == (2, True)
        with pytest.raises(holdfast.KeyReused):
            largest(1, 3)


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
