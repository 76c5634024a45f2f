"""The events of operations, in every outcome: from the start of every run to its end, and in order."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.pool import NullPool

import holdfast
from holdfast.lineage import Contract, Lineage
from holdfast.testing.operation_contract import leave_half_done
from tests.children import query
from tests.lineage.recording_sink import RecordingSink
from tests.lineage.sample_operations import FAR, async_emitting, broken, emitted, emitting, key
from tests.pairs import EACH_ONCE


def test_a_run_is_told_from_its_start_to_its_end_and_what_failed_tells_no_data(either: str) -> None:
    sink, again = RecordingSink(), RecordingSink()
    with holdfast.Client(either) as client:
        good = client.operation(
            key("parcels"), actor="jane", justification="asked for",
            lineage=Lineage(inputs=["raw"], contract=Contract("parcels", "2.1", lambda: True)),
            options=holdfast.OperationOptions(sovereign=True),
        )  # fmt: skip
        assert good.run(emitting("a", "b")).result == 42
        with pytest.raises(ValueError, match="no"):
            client.operation(key("parcels", 1), lineage=Lineage(outputs=["x"])).run(
                emitting("lost", error=ValueError("no"))
            )
        assert client.operation(key("parcels")).run(broken).replayed
        assert client.relay("one", sink).step() == 6
        assert client.relay("one", sink).step() == 0
        assert client.relay("two", again, batch=1).step() == 6
        assert list(client.relays.events()) == sink == again
    assert [each.type for each in sink] == ["START", "MESSAGE", "MESSAGE", "COMPLETE", "START", "FAIL"]
    start, first, second, complete, other, fail = sink
    assert len({each.run for each in (start, first, second, complete)}) == 1 != len({each.run for each in sink})
    assert [(each.topic, each.payload) for each in (first, second)] == [("a", {"topic": "a"}), ("b", {"topic": "b"})]
    assert (start.inputs, start.outputs, start.actor, start.justification) == (("raw",), (), "jane", "asked for")
    assert (start.sovereignty_event, complete.sovereignty_event, other.sovereignty_event) == (True, True, False)
    assert start.contract == {"name": "parcels", "version": "2.1"}
    assert complete.contract == {"name": "parcels", "version": "2.1", "verdict": "passed"}
    assert (complete.outputs, complete.dataset, complete.result_hash is not None) == (("parcels",), "parcels", True)
    assert (fail.outputs, fail.error) == ((), "ValueError: no")
    assert complete.held is not None
    assert complete.held > 0
    assert [holdfast.lineage.Event.of(each.as_dict()) for each in sink] == sink


def test_a_transaction_tells_what_it_committed_and_nothing_else(postgres_url: str) -> None:
    sink = RecordingSink()
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:
        client.operation(key("a", 1), tx=mine).run(lambda op: op.emit("done", 1))
        with pytest.raises(ValueError, match="broken"):
            client.operation(key("a", 2), tx=mine).run(emitting("lost", error=ValueError("broken")))
        with mine.transaction(force_rollback=True):
            client.operation(key("a", 3), tx=mine).run(lambda op: op.emit("lost", 3))
        contract = Contract("c", "1", lambda: False)
        with pytest.raises(holdfast.OperationFailed, match="postcondition"):
            client.operation(key("a", 4), tx=mine, lineage=Lineage(contract=contract)).run(
                lambda op: op.emit("lost", 4)
            )
        client.relay("r", sink).step()
    assert [each.type for each in sink] == ["START", "MESSAGE", "COMPLETE", "START", "FAIL", "START", "FAIL"]
    assert [each.payload for each in sink if each.topic] == [1]
    assert sink[-1].contract == {"name": "c", "version": "1", "verdict": "failed"}


def test_what_its_commit_was_refused_for_is_told_as_failed_alone(postgres_url: str) -> None:
    """Its success was written down already, and went with the transaction."""
    sink, engine = (
        RecordingSink(),
        sqlalchemy.create_engine(postgres_url.replace("://", "+psycopg://", 1), poolclass=NullPool),
    )
    query(postgres_url, "create table work (what int unique deferrable initially deferred)")
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url, autocommit=True) as mine,
        orm.Session(engine, autobegin=False) as other,
    ):
        insert = "insert into work values (1), (1)"
        for connection, sql in ((mine, insert.encode()), (other, sqlalchemy.text(insert))):
            with pytest.raises(Exception, match="duplicate key"):
                client.operation("a", tx=connection).run(lambda c=connection, s=sql: c.execute(s) and None)
        client.relay("r", sink).step()
        assert client.operations.verify().problems == ()
    assert [(each.type, each.attempt) for each in sink] == [("START", 1), ("FAIL", 1), ("START", 2), ("FAIL", 2)]


def test_what_a_dead_owner_left_ends_when_it_is_mended(either: str) -> None:
    sink = RecordingSink()
    leave_half_done(either, "a")
    leave_half_done(either, "b")
    with holdfast.Client(either) as client:
        client.operation("a", rollback=lambda: None).run(lambda: 1)
        client.operations.reset("b", actor="jane", reason="gone")
        client.operations.register("undo", rollback=lambda: None)
        client.operation("c", rollback="undo").run(lambda: 1)
        client.operations.rollback("c", actor="jane", reason="wrong")
        client.operations.reset("c", actor="jane", reason="anew")
        client.relay("r", sink).step()
    events = {label: [(each.type, each.attempt) for each in sink if each.label == label] for label in "abc"}
    assert events["a"] == [("START", 1), ("FAIL", 1), ("START", 2), ("COMPLETE", 2)]
    assert events["b"] == [("START", 1), ("FAIL", 1)]
    assert events["c"] == [("START", 1), ("COMPLETE", 1), ("UNDONE", 1)]


def test_a_completed_operation_is_published_like_any_success(either: str) -> None:
    sink, by_jane = RecordingSink(), {"actor": "jane", "reason": "the bank has booked it"}
    lineage = Lineage(inputs=["raw"], outputs=["x"])
    leave_half_done(either, key("d"), actor="joe", lineage=lineage)
    with holdfast.Client(either) as client:
        client.operations.complete(key("d"), 7, **by_jane)
        with pytest.raises(ValueError, match="broken"):
            client.operation("failed").run(broken)
        client.operations.complete("failed", **by_jane)
        client.relay("r", sink).step()
        record = client.operations.find(key("d"))
        assert client.relays.verify(relay="r").passed
    complete = sink[1]
    assert (complete.type, complete.attempt, complete.inputs, complete.outputs) == ("COMPLETE", 1, ("raw",), ("x",))
    assert (complete.actor, complete.result_hash, complete.run) == ("joe", record.result_hash, sink[0].run)
    assert [(each.type, each.attempt) for each in sink[2:]] == [("START", 1), ("FAIL", 1), ("COMPLETE", 1)]


def test_what_was_archived_is_undone_as_what_it_was(either: str) -> None:
    sink = RecordingSink()
    with holdfast.Client(either) as client:
        client.operations.register("undo", rollback=lambda: None)
        client.relay("r", RecordingSink()).step()
        lineage = Lineage(
            inputs=["raw"], outputs=["x", "y"], contract=Contract("prices", "2", check=lambda: True)
        )  # fmt: skip
        client.operation(
            key("d"), rollback="undo", actor="joe", justification="new prices", lineage=lineage,
            options=holdfast.OperationOptions(sovereign=True),
        ).run(int)  # fmt: skip
        left = client.operations.archive(FAR, lambda lines: None).left
        assert list(left.values()) == ["its lineage is not published"], "the relay has not come to it yet"
        client.relay("r", RecordingSink()).step()
        assert client.operations.archive(FAR, lambda lines: None).operations == 1
        client.operations.rollback(key("d"), actor="jane", reason="wrong")
        client.relay("r", sink).step()
    [undone] = sink
    assert (undone.type, undone.sovereignty_event) == ("UNDONE", True)
    assert (undone.inputs, undone.outputs) == (("raw",), ("x", "y"))
    assert (undone.actor, undone.justification) == ("joe", "new prices")
    assert undone.contract == {"name": "prices", "version": "2", "verdict": "passed"}


def test_every_run_that_is_told_of_ends_and_none_that_failed_has_outputs(either: str) -> None:
    """Whose owner died, and which the next attempt has not rolled back, because nothing was done or nobody knows; and
    one that failed, which was rolled back before the next attempt, and then by somebody."""
    sink = RecordingSink()
    unverified, unmarked, approved, failed = (key("d", number) for number in range(4))
    leave_half_done(either, unverified)
    leave_half_done(either, unmarked, options=holdfast.OperationOptions(marks_effect=True))
    leave_half_done(either, approved)
    with holdfast.Client(either) as client:
        client.operation(unverified, verify=lambda: False).run(int)
        client.operation(unmarked, options=holdfast.OperationOptions(marks_effect=True)).run(int)
        with pytest.raises(holdfast.OperationFailed):
            client.operation(approved).run(int)
        [review] = client.reviews.list(key=approved)
        client.reviews.approve(review.id, actor="jane", reason="looked")
        client.operation(approved).run(int)
        client.operations.register("undo", rollback=lambda: None)
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                client.operation(failed, rollback="undo").run(broken)
        client.operations.rollback(failed, actor="jane", reason="wrong")
        assert client.operations.verify().passed
        client.relay("r", sink).step()
    for each in (unverified, unmarked, approved):
        published = [(event.type, event.attempt, event.error) for event in sink if event.key == each.digest]
        died = ("FAIL", 1, "its owner died")
        assert published == [("START", 1, None), died, ("START", 2, None), ("COMPLETE", 2, None)]
    undone = [(event.attempt, event.outputs, event.error) for event in sink if event.type == "UNDONE"]
    assert undone == [(1, (), "rolled back: it had failed"), (2, (), "rolled back by jane: wrong")]


def test_a_retry_tells_what_it_emitted_itself(either: str) -> None:
    sink = RecordingSink()
    with holdfast.Client(either) as client:
        with pytest.raises(ValueError, match="no"):
            client.operation("a").run(emitting("lost", error=ValueError("no")))
        client.operation("a").run(emitting("told"))
        client.relay("r", sink).step()
    assert [(each.type, each.topic, each.attempt) for each in sink] == [
        ("START", None, 1), ("FAIL", None, 1), ("START", None, 2), ("MESSAGE", "told", 2), ("COMPLETE", None, 2)
    ]  # fmt: skip


def test_what_was_said_before_is_read_again_only_where_something_ends(either: str) -> None:
    """With every row, an operation of many checkpoints would be read as often as it has of them."""
    with holdfast.Client(either) as client:
        client.operation("a").run(lambda op: [op.checkpoint(f"{number}", number) for number in range(5)] and None)
        rows = client._engine.call("relay_read", {"after_horizon": "0", "after_place": 0, "limit": 100})
    assert [row["before"] is not None for row in rows] == [False] * 6 + [True]


def test_many_at_once_tell_what_they_read_wrote_and_emitted(either: str) -> None:
    sink = RecordingSink()
    with holdfast.Client(either) as client:
        agreed = Contract("d", "1", lambda op: op._outbox != [("item", "3")])
        outcomes = client.operations.run_many(
            [1, 2, 3],
            emitted,
            key=lambda item: key("d", item),
            lineage=Lineage(inputs=["raw"], outputs=["d", "e"], contract=agreed),
        )
        assert [each.status for each in outcomes] == ["success", "success", "failed"]
        assert client.operations.verify().passed
        client.relay("r", sink).step()
    ends = [each.key for each in sink if each.type in ("COMPLETE", "FAIL")]
    assert ends == [key("d", number).digest for number in (1, 2, 3)], "in the order in which it was done"
    verdicts = {each.key: (each.type, each.contract) for each in sink if each.type != "MESSAGE"}
    for number, type, verdict in ((2, "COMPLETE", "passed"), (3, "FAIL", "failed")):
        expected = {"name": "d", "version": "1", "verdict": verdict}
        assert verdicts[key("d", number).digest] == (type, expected)
    published = [
        (each.type, each.inputs, each.outputs, each.payload) for each in sink if each.key == key("d", 2).digest
    ]
    assert published == [
        ("START", ("raw",), (), None), ("MESSAGE", ("raw",), (), 2), ("COMPLETE", ("raw",), ("d", "e"), None)
    ]  # fmt: skip


@EACH_ONCE
def test_async_sinks_and_operations(either: str, connect: Any) -> None:
    class Awaited(RecordingSink):
        async def publish(self, events: Any) -> None:  # type: ignore[override]
            self.extend(events)

    client, sink = connect(either), RecordingSink()
    if isinstance(client, holdfast.Client):
        client.operation("a").run(emitting("a", "b"))
    else:
        client.operation("a").run(async_emitting)
        sink = Awaited()
    assert client.relay("r", sink).step() == 4
    assert sink.received() == [("a", "START"), ("a", "MESSAGE"), ("a", "MESSAGE"), ("a", "COMPLETE")]


def test_no_contract_passes_and_nothing_is_told_that_nobody_awaits(either: str) -> None:
    """A blocking client awaits nothing. Any false value that a check returns, not only False, is a failure."""

    async def conforms() -> bool:
        return False

    class Later(RecordingSink):
        def publish(self, events: Any) -> Any:
            return conforms()

    with holdfast.Client(either) as client:
        with pytest.raises(TypeError, match="must be a plain function"):
            client.operation(key("d"), lineage=Lineage(contract=Contract("c", "1", conforms))).run(int)
        for number, check in enumerate((lambda: conforms(), lambda: 0, dict)):
            with pytest.raises(holdfast.OperationFailed, match="postcondition"):
                client.operation(key("d", number), lineage=Lineage(contract=Contract("c", "1", check))).run(int)
        for number, fine in enumerate((lambda: None, lambda: 3), 3):
            client.operation(key("d", number), lineage=Lineage(contract=Contract("c", "1", fine))).run(int)
        ends = [each for each in client.relays.events() if each.type != "START"]
        assert [each.contract["verdict"] for each in ends if each.contract] == ["failed"] * 3 + ["passed"] * 2
        with pytest.raises(holdfast.SinkDown, match="has to be awaited: use AsyncClient"):
            client.relay("r", Later(), tries=1).step()
        assert [each.told for each in client.relays.list()] == [0]


@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_per_dataset_the_order_is_that_of_the_commits_whoever_is_older(postgres_url: str, level: str) -> None:
    """A transaction may have its number, and its snapshot, long before it has the lock: it comes after what was
    committed under that."""
    sink = RecordingSink()
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url) as old,
        psycopg.connect(postgres_url) as slow,
        psycopg.connect(postgres_url, autocommit=True) as quick,
    ):
        old.isolation_level = psycopg.IsolationLevel[level]
        old.execute("select pg_current_xact_id()")
        for number in range(3):
            client.operation(key("d", number), tx=quick).run(lambda: 1)
        client.operation(key("d", "old"), tx=old).run(lambda: 1)
        slow.execute("select pg_current_xact_id()")
        client.operation(key("other"), tx=slow).run(lambda: 1)
        old.commit()
        client.operation(key("d", 3), tx=quick).run(lambda: 1)
        relay = client.relay("r", sink, batch=1)
        relay.step()
        [record] = client.relays.list()
        assert (record.entries > 0, record.lag > 0) == (True, True), "what a slow one may come before waits"
        slow.commit()
        relay.step()
        assert [each.entries for each in client.relays.list()] == [0]
        keys = [key("d", 0), key("d", 1), key("d", 2), key("d", "old"), key("d", 3)]
        published = [each.key for each in sink if each.dataset == "d" and each.type == "COMPLETE"]
        assert published == [each.digest for each in keys]
        assert [each.type for each in sink if each.dataset == "other"] == ["START", "COMPLETE"]
