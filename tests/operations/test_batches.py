"""Many operations at once: each as safe as one alone, whatever is raised, killed, interrupted or late."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.operation_contract import LONG, gives_up, name, running
from tests.children import eventually, pass_time, query, until
from tests.pairs import EACH_ONCE
from tests.user_connections import ask

Connect = Callable[..., Any]


@pytest.fixture
def client(either: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(either) as made:
        yield made


def keys_of(dataset: str, count: int, **options: Any) -> list[holdfast.OperationKey]:
    return [
        holdfast.OperationKey(pipeline="etl", task=str(n), dataset=dataset, operation="load", **options)
        for n in range(count)
    ]


@EACH_ONCE
def test_what_cannot_be_kept_or_passes_by_itself_is_no_different_in_a_batch(connect: Connect, either: str) -> None:
    """A result that cannot be kept is an effect all the same, and must not be had twice; an error that passes is never
    the answer for good."""
    client, called = connect(either), []
    prefix = name()

    def work(number: int) -> object:
        called.append(number)
        if number == 1:
            raise ConnectionResetError("gone")
        if number == 2:
            raise KeyError("for good")
        return object() if number == 0 else number

    def many() -> Any:
        options: Any = {"key": lambda number: f"{prefix}-{number}", "retry": holdfast.Retry(remember=[Exception])}
        return client.operations.run_many(range(4), work, **options)

    found = many()
    assert [type(each.error) for each in found] == [ValueError, ConnectionResetError, KeyError, type(None)]
    assert [client.operations.get(f"{prefix}-{n}").status for n in range(4)] == [
        "partial", "failure", "failure", "success",
    ]  # fmt: skip
    again = many()
    assert called == [0, 1, 2, 3, 1], "only what passes by itself is tried again"
    assert [type(each.error) for each in again[:3]] == [
        holdfast.OperationFailed, ConnectionResetError, holdfast.OperationFailed,
    ]  # fmt: skip
    reviews = [each.label for each in client.reviews.list()]
    assert f"{prefix}-0" in reviews, "what is refused waits for somebody to look at it"
    assert client.operations.verify().broken == ()


def test_what_failed_in_a_batch_is_no_result_that_could_expire(client: holdfast.Client) -> None:
    """It would be run as if nobody had begun it: not undone before, and whatever error is remembered."""
    done = []

    def work(item: str) -> None:
        done.append(item)
        raise ValueError("half way")

    for _ in range(2):
        client.operations.run_many(["a"], work, rollback=lambda: done.append("undone"), keep=0.001)
        record = client.operations.get("a")
        assert record is not None
        assert (record.status, record.expires_at) == ("failure", None)
    assert done == ["a", "undone", "a"]


def test_what_is_noted_and_told_in_a_batch_is_kept(client: holdfast.Client, either: str) -> None:
    prefix = name()

    def work(item: str, *, op: Any) -> str:
        op.emit("lineage", {"item": item})
        op.checkpoint("draft", item)
        with holdfast.Client(either) as other:
            [half] = other.operations.replay(item)
            assert half.checkpoints == {"draft": item}, "at once, not when the batch is over"
        if item.endswith("b"):
            raise ValueError("broken")
        return item

    found = client.operations.run_many([f"{prefix}-a", f"{prefix}-b"], work)
    assert [each.status for each in found] == ["success", "failed"]
    outbox = "holdfast_outbox" if either.startswith("sqlite") else "holdfast.outbox"
    assert query(either, f"select topic, payload from {outbox}") == [("lineage", json.dumps({"item": f"{prefix}-a"}))]
    kinds = [each.kind for each in client.operations.history(f"{prefix}-a")]
    assert kinds == ["lock_acquired", "claimed", "effect_started", "checkpoint", "success", "lock_released"]
    assert client.operations.verify().problems == ()


def test_a_batch_that_is_interrupted_leaves_only_what_it_was_at(client: holdfast.Client) -> None:
    called: list[str] = []
    prefix = name()
    keys = [f"{prefix}-{n}" for n in range(4)]

    def work(key: str) -> str:
        called.append(key)
        if called == keys[:2]:
            raise KeyboardInterrupt
        return key

    with pytest.raises(KeyboardInterrupt):
        client.operations.run_many(keys, work)
    records = [client.operations.get(each) for each in keys]
    assert [each and each.status for each in records] == ["success", "partial", "undone", "undone"]
    undone: list[int] = []
    found = client.operations.run_many(keys, work, rollback=lambda: undone.append(1), retry=holdfast.Retry(attempts=2))
    assert [each.result for each in found] == keys
    assert called == [keys[0], keys[1], keys[1], *keys[2:]]
    assert undone == [1], "nothing is undone that was never called"
    assert client.operations.verify().broken == ()


async def test_a_batch_that_is_cancelled_leaves_only_what_it_was_at(either: str) -> None:
    prefix, begun = name(), asyncio.Event()
    keys = [f"{prefix}-{n}" for n in range(3)]

    async def work(key: str) -> str:
        if key == keys[1]:
            begun.set()
            await asyncio.Event().wait()
        return key

    async with holdfast.AsyncClient(either) as client:
        task = asyncio.create_task(client.operations.run_many(keys, work))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        records = [await client.operations.get(each) for each in keys]
        assert [each and each.status for each in records] == ["success", "partial", "undone"]
        assert (await client.operations.verify()).broken == ()
        with holdfast.Client(either) as other:
            await until(lambda: not other.leases.list(), "its lease is not kept")


def test_a_late_batch_is_refused_by_its_fence(either: str) -> None:
    begun, go_on = threading.Event(), threading.Event()
    keys = keys_of(name(), 2)

    def late(_: Any) -> str:
        begun.set()
        assert go_on.wait(LONG)
        return "late"

    with holdfast.Client(either) as client, holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(client.operations.run_many, keys, late)
        assert begun.wait(LONG)
        [lease] = other.leases.list()
        other.leases.force_release(lease.name, actor="test", reason="it stands still")
        assert other.operation(keys[0], rollback=int).run(lambda: "in time").attempt == 2
        go_on.set()
        with pytest.raises(holdfast.FencedOut, match="a batch of 2 operations has passed on to another owner"):
            zombie.result(LONG)
        assert other.operation(keys[0]).run(str).result == "in time"
        assert other.operations.get(keys[1]).status == "partial"  # type: ignore[union-attr]
        assert other.operations.verify().broken == ()


def test_a_batch_is_two_statements_however_many_are_in_it(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, asked = keys_of(name(), 50), list[str]()
    with holdfast.Client(either) as client:
        call = client._engine.call

        def noted(statement: str, *given: Any, **more: Any) -> Any:
            asked.append(statement)
            return call(statement, *given, **more)

        monkeypatch.setattr(client._engine, "call", noted)
        client.operations.run_many(keys, str)
        begin, end = ["operation_acquire", "operation_get", "operation_claim_many"], ["lease_release"]
        assert asked == [*begin, "operation_finish_many", *end], "the lease, what time it is, the claim, the end"
        asked.clear()
        assert all(each.replayed for each in client.operations.run_many(keys, str))
        assert asked == [*begin, *end], "the claim has told the result of each"


def test_a_batch_whose_lease_is_gone_claims_no_more(either: str) -> None:
    """It would call functions that somebody else may be calling."""
    keys, called = keys_of(name(), 2), list[Any]()
    with holdfast.Client(either) as client, holdfast.Client(either) as other:

        def supersede(done: int, total: int) -> None:
            [lease] = other.leases.list()
            other.leases.force_release(lease.name, actor="test", reason="it stands still")

        with pytest.raises(holdfast.FencedOut):
            client.operations.run_many(keys, called.append, batch=1, progress=supersede)
        assert called == keys[:1]
        assert other.operations.get(keys[1]) is None


@pytest.mark.usefixtures("frequent_heartbeats")
def test_a_batch_whose_lease_is_lost_calls_no_more(either: str) -> None:
    """Whoever has it now may be at the very ones that are left."""
    keys, called = keys_of(name(), 3), list[Any]()
    beats = "holdfast_beat" if either.startswith("sqlite") else "holdfast.beat"
    with holdfast.Client(either) as client:

        def work(key: Any, op: Any) -> None:
            called.append(key)
            ask(either, f"update {beats} set dead = true")
            eventually(lambda: op.lost, "the heartbeat has learned of it")

        with pytest.raises((holdfast.LeaseLost, holdfast.FencedOut)):
            client.operations.run_many(keys, work, ttl=600)
    assert called == keys[:1]


@EACH_ONCE
def test_a_batch_that_finds_its_lock_taken_does_what_it_was_told_to(connect: Connect, either: str) -> None:
    client, keys = connect(either), keys_of(name(), 3)
    client.operation(keys[0]).run(lambda: "done before")
    many = client.operations.run_many
    with running(either, keys[2]) as finish:
        skipped = many(keys, lambda _: 1, when_locked="skip")
        assert [each.status for each in skipped] == ["success", "skipped", "skipped"]
        assert skipped[0].result == "done before"
        for patient in ("wait", "backoff"):
            gives_up(partial(many, keys, lambda _: 1, when_locked=patient, timeout=0.1), after=0.1)
        with pytest.raises(holdfast.OperationInProgress, match="up for review as number"):
            many(keys, lambda _: 1, when_locked="escalate")
        finish().result(LONG)
    assert [each.result for each in many(keys, lambda _: 1)] == ["done before", 1, "theirs"]


def test_a_batch_and_a_transaction_exclude_each_other(postgres_url: str) -> None:
    keys, begun, go_on = keys_of("parcels", 3), threading.Event(), threading.Event()

    def effect() -> str:
        begun.set()
        assert go_on.wait(LONG)
        return "in a transaction"

    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url, autocommit=True) as mine,
        psycopg.connect(postgres_url, autocommit=True) as theirs,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(lambda: client.operation(keys[0], tx=mine).run(effect))
        assert begun.wait(LONG)
        with pytest.raises(holdfast.OperationInProgress):
            client.operations.run_many(keys[1:], lambda _: 1, when_locked="fail")
        go_on.set()
        first.result(LONG)

        def within(_: Any) -> str:
            return client.operation(keys[0], tx=theirs, when_locked="skip").run(int).status

        found = client.operations.run_many(keys, within)
        assert [each.result for each in found] == ["in a transaction", "success", "success"]

        def another(_: Any) -> str:
            with ThreadPoolExecutor(1) as other:  # who knows nothing of the batch
                key = keys_of("parcels", 5)[4]
                return other.submit(
                    lambda: client.operation(key, tx=theirs, when_locked="skip").run(int).status
                ).result()

        assert client.operations.run_many(keys_of("parcels", 4)[3:], another)[0].result == "skipped"


def test_who_has_asked_in_vain_does_not_stop_a_batch_that_goes_on(postgres_url: str) -> None:
    """A transaction that found the lease taken keeps the lock until it ends, and does nothing with it."""
    keys = keys_of("parcels", 4)
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:

        def progress(done: int, _: int) -> None:
            if done == 1:
                mine.execute("select 1")
                assert client.operation(keys[3], tx=mine, when_locked="skip").run(int).status == "skipped"

        found = client.operations.run_many(keys[:3], lambda _: 1, batch=1, progress=progress, when_locked="fail")
        assert [(each.status, each.replayed) for each in found] == [("success", False)] * 3


@EACH_ONCE
def test_conditions_after_are_checked_in_a_batch(connect: Connect, either: str) -> None:
    client, prefix = connect(either), name()

    def is_even(op: Any) -> bool:
        return int(op.key.label.rpartition("-")[2]) % 2 == 0

    outcomes = client.operations.run_many(
        range(3),
        lambda number: number,
        key=lambda number: f"{prefix}-{number}",
        checks=holdfast.Checks(after=[is_even]),
    )
    assert [each.status for each in outcomes] == ["success", "failed", "success"]
    assert "postcondition 'is_even' does not hold" in str(outcomes[1].error)
    assert client.operations.get(f"{prefix}-1").status == "failure"


@EACH_ONCE
def test_a_key_that_is_not_used_again_has_expired_in_a_batch(connect: Connect, either: str) -> None:
    client, keys, options = connect(either), [name(), name()], holdfast.OperationOptions(reuse=False)
    client.operations.run_many(keys[:1], len, keep=0.001, options=options)
    pass_time(0.01)
    outcomes = client.operations.run_many(keys, len, keep=3600, options=options)
    assert [(each.status, each.replayed) for each in outcomes] == [("expired", True), ("success", False)]
    again = client.operations.run_many(keys[:1], len)
    assert [(each.status, each.replayed) for each in again] == [("success", False)], "unless that is asked for"


@EACH_ONCE
def test_a_batch_of_a_sovereign_dataset_is_marked_and_locked_whole(connect: Connect, either: str) -> None:
    client, dataset = connect(either), name()
    with pytest.raises(ValueError, match="is sovereign and is locked as a whole"):
        client.operations.run_many(
            keys_of(dataset, 1, shards=4), int, options=holdfast.OperationOptions(sovereign=True)
        )
    keys = keys_of(dataset, 2)
    client.operations.run_many(
        keys,
        lambda _: 1,
        options=holdfast.OperationOptions(sovereign=True),
        actor="jane",
        justification="the council agreed",
    )
    for key in keys:
        said = {each.kind: json.loads(each.detail) for each in client.operations.history(key)}
        assert said["sovereignty"] == {"dataset": dataset, "sovereignty_event": True}
        assert said["claimed"] == {"actor": "jane", "justification": "the council agreed"}


def test_a_batch_goes_by_the_keys_although_the_log_was_empty_when_it_was_planned(postgres_url: str) -> None:
    """Or each would read all that there is of the log, until the server has statistics."""
    with holdfast.Client(postgres_url) as client:
        for _ in range(3):
            client.operations.run_many([name() for _ in range(40)], len, batch=20)
    tables = "pg_stat_user_tables where relname in ('idempotency_log', 'wal_more')"
    read = f"select sum(n_tup_ins)::int, sum(seq_tup_read)::int from {tables}"
    eventually(lambda: query(postgres_url, read)[0][0] == 240, "the server has counted")
    assert query(postgres_url, read) == [(240, 0)]
