"""Relays: everything is told, in order, at least once, whatever dies; what a sink refuses is parked, and no more."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.pool import NullPool

import holdfast
from holdfast.testing import Postgres
from holdfast.testing.operation_stage import leave_half_done
from tests.children import eventually, query
from tests.conftest import MAJORS, NEWEST, migrated, server
from tests.lineage.sinks import Kept, once

FAR = datetime.now(UTC) + timedelta(days=1)


def key(dataset: str, number: object = 0, **more: Any) -> holdfast.OperationKey:
    parts = {"pipeline": "etl", "task": "load", "dataset": dataset, "operation": "upsert", "params": {"n": number}}
    return holdfast.OperationKey(**{**parts, **more})


def broken() -> None:
    raise ValueError("broken")


def emitting(*topics: str, error: Exception | None = None) -> Any:
    def work(op: Any) -> int:
        for topic in topics:
            op.emit(topic, {"topic": topic})
        op.checkpoint("far", 1)
        if error is not None:
            raise error
        return 42

    return work


def emitted(item: int, op: Any) -> None:
    op.emit("item", item)


async def async_emitting(op: Any) -> int:
    op.emit("a", {"topic": "a"})
    op.emit("b", {"topic": "b"})
    await op.checkpoint("far", 1)
    return 42


def test_a_run_is_told_from_its_start_to_its_end_and_what_failed_tells_no_data(either: str) -> None:
    sink, again = Kept(), Kept()
    with holdfast.Client(either) as client:
        good = client.operation(
            key("parcels"), inputs=["raw"], actor="jane", justification="asked for", sovereign=True,
            contract=holdfast.Contract("parcels", "2.1", lambda: True),
        )  # fmt: skip
        assert good.run(emitting("a", "b")).result == 42
        with pytest.raises(ValueError, match="no"):
            client.operation(key("parcels", 1), outputs=["x"]).run(emitting("lost", error=ValueError("no")))
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
    assert [holdfast.Event.of(each.as_dict()) for each in sink] == sink


def test_a_transaction_tells_what_it_committed_and_nothing_else(postgres_url: str) -> None:
    sink = Kept()
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        client.operation(key("a", 1), tx=mine).run(lambda op: op.emit("done", 1))
        with pytest.raises(ValueError, match="broken"):
            client.operation(key("a", 2), tx=mine).run(emitting("lost", error=ValueError("broken")))
        with mine.transaction(force_rollback=True):
            client.operation(key("a", 3), tx=mine).run(lambda op: op.emit("lost", 3))
        contract = holdfast.Contract("c", "1", lambda: False)
        with pytest.raises(holdfast.OperationFailed, match="postcondition"):
            client.operation(key("a", 4), tx=mine, contract=contract).run(lambda op: op.emit("lost", 4))
        client.relay("r", sink).step()
    assert [each.type for each in sink] == ["START", "MESSAGE", "COMPLETE", "START", "FAIL", "START", "FAIL"]
    assert [each.payload for each in sink if each.topic] == [1]
    assert sink[-1].contract == {"name": "c", "version": "1", "verdict": "failed"}


def test_what_its_commit_was_refused_for_is_told_as_failed_alone(postgres_url: str) -> None:
    """Its success was written down already, and went with the transaction."""
    sink, engine = Kept(), sqlalchemy.create_engine(postgres_url.replace("://", "+psycopg://", 1), poolclass=NullPool)
    query(postgres_url, "create table work (what int unique deferrable initially deferred)")
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine, engine.connect() as other:
        insert = "insert into work values (1), (1)"
        for connection, sql in ((mine, insert.encode()), (other, sqlalchemy.text(insert))):
            with pytest.raises(Exception, match="duplicate key"):
                client.operation("a", tx=connection).run(lambda c=connection, s=sql: c.execute(s) and None)
        client.relay("r", sink).step()
        assert client.operations.verify().problems == ()
    assert [(each.type, each.attempt) for each in sink] == [("START", 1), ("FAIL", 1), ("START", 2), ("FAIL", 2)]


def test_what_a_dead_owner_left_ends_when_it_is_mended(either: str) -> None:
    sink = Kept()
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
    told = {label: [(each.type, each.attempt) for each in sink if each.label == label] for label in "abc"}
    assert told["a"] == [("START", 1), ("FAIL", 1), ("START", 2), ("COMPLETE", 2)]
    assert told["b"] == [("START", 1), ("FAIL", 1)]
    assert told["c"] == [("START", 1), ("COMPLETE", 1), ("UNDONE", 1)]


def test_what_was_archived_is_undone_as_what_it_was(either: str) -> None:
    sink = Kept()
    with holdfast.Client(either) as client:
        client.operations.register("undo", rollback=lambda: None)
        client.operation(key("d"), rollback="undo", sovereign=True).run(int)
        client.relay("r", Kept()).step()
        assert client.operations.archive(FAR, lambda lines: None).operations == 1
        client.operations.rollback(key("d"), actor="jane", reason="wrong")
        client.relay("r", sink).step()
    assert [(each.type, each.outputs, each.sovereignty_event) for each in sink] == [("UNDONE", ("d",), True)]


def test_every_run_that_is_told_of_ends_and_none_that_failed_has_outputs(either: str) -> None:
    """Whose owner died, and which the next attempt has not rolled back, because nothing was done or nobody knows; and
    one that failed, which was rolled back before the next attempt, and then by somebody."""
    sink = Kept()
    unverified, unmarked, approved, failed = (key("d", number) for number in range(4))
    leave_half_done(either, unverified)
    leave_half_done(either, unmarked, marks_effect=True)
    leave_half_done(either, approved)
    with holdfast.Client(either) as client:
        client.operation(unverified, verify=lambda: False).run(int)
        client.operation(unmarked, marks_effect=True).run(int)
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
        told = [(event.type, event.attempt, event.error) for event in sink if event.key == each.digest]
        died = ("FAIL", 1, "its owner died")
        assert told == [("START", 1, None), died, ("START", 2, None), ("COMPLETE", 2, None)]
    undone = [(event.attempt, event.outputs, event.error) for event in sink if event.type == "UNDONE"]
    assert undone == [(1, (), "rolled back: it had failed"), (2, (), "rolled back by jane: wrong")]


def test_a_retry_tells_what_it_emitted_itself(either: str) -> None:
    sink = Kept()
    with holdfast.Client(either) as client:
        with pytest.raises(ValueError, match="no"):
            client.operation("a").run(emitting("lost", error=ValueError("no")))
        client.operation("a").run(emitting("told"))
        client.relay("r", sink).step()
    assert [(each.type, each.topic, each.attempt) for each in sink] == [
        ("START", None, 1), ("FAIL", None, 1), ("START", None, 2), ("MESSAGE", "told", 2), ("COMPLETE", None, 2)
    ]  # fmt: skip


def test_many_at_once_tell_what_they_read_wrote_and_emitted(either: str) -> None:
    sink = Kept()
    with holdfast.Client(either) as client:
        agreed = holdfast.Contract("d", "1", lambda op: op.outbox != [("item", "3")])
        outcomes = client.operations.run_many(
            [1, 2, 3], emitted, key=lambda item: key("d", item), inputs=["raw"], outputs=["d", "e"], contract=agreed
        )
        assert [each.status for each in outcomes] == ["success", "success", "failed"]
        assert client.operations.verify().passed
        client.relay("r", sink).step()
    verdicts = {each.key: (each.type, each.contract) for each in sink if each.type != "MESSAGE"}
    for number, type, verdict in ((2, "COMPLETE", "passed"), (3, "FAIL", "failed")):
        expected = {"name": "d", "version": "1", "verdict": verdict}
        assert verdicts[key("d", number).digest] == (type, expected)
    told = [(each.type, each.inputs, each.outputs, each.payload) for each in sink if each.key == key("d", 2).digest]
    assert told == [
        ("START", ("raw",), (), None), ("MESSAGE", ("raw",), (), 2), ("COMPLETE", ("raw",), ("d", "e"), None)
    ]  # fmt: skip


def test_async_sinks_and_operations(either: str, connect: Any) -> None:
    class Awaited(Kept):
        async def publish(self, events: Any) -> None:  # type: ignore[override]
            self.extend(events)

    client, sink = connect(either), Kept()
    if isinstance(client, holdfast.Client):
        client.operation("a").run(emitting("a", "b"))
    else:
        client.operation("a").run(async_emitting)
        sink = Awaited()
    assert client.relay("r", sink).step() == 4
    assert sink.told() == [("a", "START"), ("a", "MESSAGE"), ("a", "MESSAGE"), ("a", "COMPLETE")]


def test_no_contract_passes_and_nothing_is_told_that_nobody_awaits(either: str) -> None:
    """With a client that awaits nothing. Whatever a check returns that is false, False or not, is no pass."""

    async def conforms() -> bool:
        return False

    class Later(Kept):
        def publish(self, events: Any) -> Any:
            return conforms()

    with holdfast.Client(either) as client:
        with pytest.raises(TypeError, match="only begins when it is called"):
            client.operation(key("d"), contract=holdfast.Contract("c", "1", conforms)).run(int)
        for number, check in enumerate((lambda: conforms(), lambda: 0, dict)):
            with pytest.raises(holdfast.OperationFailed, match="postcondition"):
                client.operation(key("d", number), contract=holdfast.Contract("c", "1", check)).run(int)
        for number, fine in enumerate((lambda: None, lambda: 3), 3):
            client.operation(key("d", number), contract=holdfast.Contract("c", "1", fine)).run(int)
        ends = [each for each in client.relays.events() if each.type != "START"]
        assert [each.contract["verdict"] for each in ends if each.contract] == ["failed"] * 3 + ["passed"] * 2
        with pytest.raises(holdfast.SinkDown, match="nobody awaits it here: use AsyncClient"):
            client.relay("r", Later(), tries=1).step()
        assert [each.told for each in client.relays.list()] == [0]


@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_per_dataset_the_order_is_that_of_the_commits_whoever_is_older(postgres_url: str, level: str) -> None:
    """A transaction may have its number, and its snapshot, long before it has the lock: it comes after what was
    committed under that."""
    sink = Kept()
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url) as old,
        psycopg.connect(postgres_url) as slow,
        psycopg.connect(postgres_url) as quick,
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
        told = [each.key for each in sink if each.dataset == "d" and each.type == "COMPLETE"]
        assert told == [each.digest for each in keys]
        assert [each.type for each in sink if each.dataset == "other"] == ["START", "COMPLETE"]


def test_a_relay_that_dies_before_it_has_moved_tells_the_same_again(either: str, connect: Any) -> None:
    class Crash(BaseException):
        pass

    def die(events: Any) -> None:
        raise Crash

    sink = Kept()
    client, other = connect(either), connect(either)
    with holdfast.Client(either) as runs:
        for number in range(3):
            runs.operation(key("d", number)).run(lambda: 1)
    sink.after = die
    with pytest.raises(Crash):
        client.relay("r", sink).step()
    sink.after = lambda events: None
    assert other.relay("r", sink).step() == 6
    assert len(sink) == 12
    assert [each.key for each in once(sink)] == [key("d", number).digest for number in (0, 0, 1, 1, 2, 2)]


def test_one_that_was_superseded_cannot_move_the_cursor(either: str) -> None:
    """It hangs in its sink; its lease is taken away, and another goes on. When it comes back it is refused, and the
    cursor is where the other one left it."""
    slow, quick = Kept(), Kept()
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        client.operation("a").run(lambda: 1)

        def supersede(events: Any) -> None:
            assert other.leases.force_release("@relay:r", actor="jane", reason="it hangs")
            other.operation("b").run(lambda: 1)
            assert other.relay("r", quick).step() == 4

        slow.after = supersede
        with pytest.raises((holdfast.FencedOut, holdfast.LeaseLost)):
            client.relay("r", slow).step()
        assert (len(slow), len(quick)) == (2, 4)
        assert client.relay("r", quick).step() == 0
        assert [each.told for each in client.relays.list()] == [4]


def test_what_a_sink_refuses_is_parked_and_told_again_when_asked(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.core.relay.LONGEST", 0.001)
    sink, poison = Kept(), {"b"}

    def refuse(events: Any) -> None:
        if any(each.label in poison and each.type == "COMPLETE" for each in events):
            raise KeyError("no such field")

    sink.trouble = refuse
    with holdfast.Client(either) as client:
        for name in "abc":
            client.operation(name).run(lambda: 1)
        assert client.relay("r", sink, tries=3).step() == 5
        assert sink.told() == [(n, t) for n in "abc" for t in ("START", "COMPLETE") if (n, t) != ("b", "COMPLETE")]
        [record] = client.relays.list()
        assert (record.parked, record.entries, record.problem) == (1, 0, None)
        [parked] = client.relays.parked("r")
        assert (parked.event.label, parked.tries, parked.problem) == ("b", 3, "KeyError: 'no such field'")
        [finding] = [each for each in client.operations.health().findings if each.check == "lineage"]
        assert (finding.status, "relay 'r' has parked 1 events" in finding.found) == ("warn", True)
        archived = client.operations.archive(FAR, lambda lines: None)
        assert (archived.operations, list(archived.left.values())) == (2, ["its lineage is not published"])
        assert client.relays.retry("r") == 1
        assert client.relay("r", sink, tries=3).step() == 0
        assert [(each.tries, each.again) for each in client.relays.parked("r")] == [(6, False)]
        poison.clear()
        assert client.relays.retry("r", parked.id) == 1
        assert client.relay("r", sink).step() == 1
        assert client.relays.parked("r") == []
        assert sink[-1] == parked.event
        for name in ("d", "e"):
            assert client.operations.archive(FAR, lambda lines: None).operations == 1
            client.operation(name).run(lambda: 1)
            assert client.relay("r", sink).step() == 2
        assert client.operations.archive(FAR, lambda lines: None).operations == 1
        client.operation("later").run(lambda: 1)
        assert client.relay("r", sink).step() == 2, "what is archived leaves no gap that something falls into"


def test_whatever_a_sink_says_can_be_written_down(either: str) -> None:
    """It may repeat what it was given, and no database keeps all of that."""
    sink, kinds = Kept(), [holdfast.SinkDown, ValueError]

    def refuse(events: Any) -> None:
        if any(each.label == "b" for each in events):
            raise kinds[0]("at \0 and \ud800")

    sink.trouble = refuse
    with holdfast.Client(either) as client:
        for name in "abc":
            client.operation(name).run(lambda: 1)
        with pytest.raises(holdfast.SinkDown):
            client.relay("r", sink).step()
        assert [each.problem for each in client.relays.list()] == ["SinkDown: at ? and ?"]
        kinds.pop(0)
        assert client.relay("r", sink, tries=1).step() == 4
        assert [each.problem for each in client.relays.parked("r")] == ["ValueError: at ? and ?"] * 2


def test_what_kills_whoever_tells_it_is_tried_no_more_often_and_parked(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each life is a client of its own, and knows of those before only what they wrote down."""
    monkeypatch.setattr("holdfast.core.relay.LONGEST", 0.001)

    class Death(BaseException):
        pass

    sink, deaths, refusals = Kept(), list[int](), list[int]()

    def poison(events: Any) -> None:
        if any(each.label == "b" and each.type == "COMPLETE" for each in events):
            if len(events) == 1 and not refusals:
                refusals.append(1)
                raise KeyError("refused")
            deaths.append(len(events))
            raise Death

    sink.trouble = poison
    with holdfast.Client(either) as client:
        for name in "abc":
            client.operation(name).run(lambda: 1)

    def live() -> None:
        with holdfast.Client(either) as client, suppress(Death):
            client.relay("r", sink, tries=3).step()

    while "c" not in {each.label for each in sink}:
        live()
        assert len(deaths) <= 3, "in a batch, and twice by itself, where it was refused once"
    assert deaths == [6, 1, 1]
    assert [label for label, type in sink.told() if type == "START"] == ["a", "b", "c"], "as far as it came is kept"
    with holdfast.Client(either) as client:
        [parked] = client.relays.parked("r")
        assert (parked.event.label, parked.event.type, parked.tries) == ("b", "COMPLETE", 3)
        assert parked.problem == "it was begun 3 times, and whoever told it died"
        assert client.relays.retry("r") == 1
        for _ in range(3):
            live()
        live()
        assert [(each.tries, each.again) for each in client.relays.parked("r")] == [(6, False)]
        assert deaths == [6, 1, 1, 1, 1, 1]
        sink.trouble = lambda events: None
        client.relays.retry("r")
        assert client.relay("r", sink).step() == 1
        assert client.relays.verify([json.dumps(each.as_dict()) for each in once(sink)]).problems == ()


def test_what_cannot_be_read_in_the_log_is_parked_and_stops_nobody_else(either: str) -> None:
    sink = Kept()
    table = "holdfast_wal" if either.startswith("sqlite") else "holdfast.wal"
    with holdfast.Client(either) as client:
        for name in "abc":
            client.operation(key(name)).run(lambda: 1)
        for text, subject in (("nonsense", "a"), ("[[1,2,3]]", "b")):
            query(either, f"update {table} set entries = '{text}' where idem_key = '{key(subject).digest}'")
        assert client.relay("r", sink).step() == 2
        assert sink.told() == [(key("c").label, "START"), (key("c").label, "COMPLETE")]
        parked = client.relays.parked("r")
        assert {(each.event.type, each.event.dataset) for each in parked} == {("UNREADABLE", "a"), ("UNREADABLE", "b")}
        assert all("none of its own" in each.problem for each in parked)
        assert client.relays.retry("r") == len(parked)
        assert client.relay("r", sink).step() == 0
        assert [each.again for each in client.relays.parked("r")] == [False] * len(parked), "there is nothing to tell"
        found = client.relays.verify([json.dumps(each.as_dict()) for each in sink])
        assert {(each.what, each.operation) for each in found.problems} == {
            ("tampered", key("a").digest), ("tampered", key("b").digest)
        }  # fmt: skip


@pytest.mark.parametrize("error", [holdfast.SinkDown("x"), ConnectionRefusedError("x"), TimeoutError("x")])
def test_a_sink_that_is_down_delays_and_parks_nothing(either: str, error: Exception) -> None:
    sink = Kept()

    def down(events: Any) -> None:
        raise error

    sink.trouble = down
    with holdfast.Client(either) as client:
        for name in "abcdef":
            client.operation(name).run(lambda: 1)
        for _ in range(3):
            with pytest.raises(holdfast.SinkDown, match=type(error).__name__):
                client.relay("r", sink).step()
        [record] = client.relays.list()
        assert (record.parked, record.told, record.entries) == (0, 0, 12)
        assert (record.problem, record.since is not None) == (f"{type(error).__name__}: x", True)
        sink.trouble = lambda events: None
        assert client.relay("r", sink).step() == 12
        assert [(each.problem, each.since, each.entries) for each in client.relays.list()] == [(None, None, 0)]


def test_a_sink_that_fails_in_the_middle_of_many_is_given_fewer(either: str) -> None:
    sink, most = Kept(), 4

    def down(events: Any) -> None:
        if len(events) > most:
            raise TimeoutError("too many")

    sink.trouble = down
    with holdfast.Client(either) as client:
        for number in range(8):
            client.operation(str(number)).run(lambda: 1)
        relay = client.relay("r", sink, batch=16)
        for _ in range(2):
            with pytest.raises(holdfast.SinkDown):
                relay.step()
        with pytest.raises(holdfast.SinkDown):
            relay.step()  # it took four, and then was given eight
        assert len(sink) == 4
        most = 100
        assert relay.step() == 12
        assert once(sink) == sink


def test_a_sink_that_refuses_everything_is_taken_for_down(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.core.relay.LONGEST", 0.001)
    sink = Kept()
    sink.trouble = lambda events: broken()
    with holdfast.Client(either) as client:
        for name in "abcdef":
            client.operation(name).run(lambda: 1)
        relay = client.relay("r", sink)
        for _ in range(2):
            with pytest.raises(holdfast.SinkDown, match=r"refused . events in a row: ValueError: broken"):
                relay.step()
        assert [each.parked for each in client.relays.list()] == [3]
        sink.trouble = lambda events: None
        client.relays.retry("r")
        assert relay.step() == 12
        assert len(once(sink)) == 12


def test_it_runs_under_a_lease_and_another_goes_on(either: str, connect: Any) -> None:
    sink = Kept()
    with holdfast.Client(either) as client:
        relays = [connect(either).relay("r", sink, poll=0.01) for _ in range(2)]
        threads = [threading.Thread(target=each.run) for each in relays]
        for thread in threads:
            thread.start()
        client.operation("a").run(lambda: 1)
        eventually(lambda: len(sink) == 2, "it is told")
        [record] = client.relays.list()
        assert record.holder in {each.status().replica for each in relays}
        with pytest.raises(holdfast.NotAcquired):
            client.relay("r", sink).step()
        first = next(each for each in relays if each.status().leading)
        first.stop()
        client.operation("b").run(lambda: 1)
        eventually(lambda: len(sink) == 4, "the other one goes on")
        relays[1 - relays.index(first)].stop()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert [each.holder for each in client.relays.list()] == [None]


def test_after_a_failover_and_after_a_restore_the_cursor_is_right() -> None:
    sink = Kept()
    with Postgres.create() as primary:
        url = migrated(primary.database("app"))
        standby = primary.standby(synchronous=True)
        with holdfast.Client(url) as client:
            client.operation("a").run(lambda: 1)
            client.relay("r", sink).step()
            client.operation("b").run(lambda: 1)
        primary.kill()
        standby.promote()
        with holdfast.Client(f"postgresql://postgres@127.0.0.1:{standby.port}/app") as client:
            client.operation("c").run(lambda: 1)
            client.relay("r", sink).step()
    assert sink.told() == [(name, type) for name in "abc" for type in ("START", "COMPLETE")]


def test_after_a_restore_what_was_not_told_is_told_and_nothing_else() -> None:
    """Numbers of transactions begin anew there, and of two that commit at once, what comes first may have the higher
    place."""
    source, target, sink = server(MAJORS[0]), server(NEWEST), Kept()
    if not (target.binaries.folder / "pg_dump").exists():
        pytest.skip("no pg_dump beside the server")
    url = migrated(source.database())
    with holdfast.Client(url) as client, psycopg.connect(url) as mine:
        client.operation("early", tx=mine).run(lambda: 1)
        query(url, "update holdfast.wal set place = 1000")
        client.relay("r", sink).step()
        assert sink.told() == [("early", "START"), ("early", "COMPLETE")]
        client.operation("late", tx=mine).run(lambda: 1)
        client.operation("c").run(lambda: 1)
    dump = target.folder / "relay.sql"
    target.binaries.run("pg_dump", "--dbname", url, "--file", str(dump))
    restored = target.database()
    target.binaries.run(
        "psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--dbname={restored}", f"--file={dump}"
    )
    dump.unlink()
    before = list(sink)
    with holdfast.Client(restored) as client:
        client.operation("d").run(lambda: 1)
        client.relay("r", sink).step()
        assert list(client.relays.events()) == sink, "the order is the same, too"
    assert [(each.label, each.type) for each in sink[len(before) :]] == [
        (name, type) for name in ("late", "c", "d") for type in ("START", "COMPLETE")
    ]


def test_a_relay_is_removed_for_the_record(either: str) -> None:
    with holdfast.Client(either) as client:
        client.relay("r", Kept()).step()
        assert client.relays.remove("r", actor="jane", reason="no longer run")
        assert not client.relays.remove("r", actor="jane", reason="no longer run")
        assert client.relays.list() == []
        assert [(each.action, each.outcome) for each in client.audit.list()] == [
            ("relay.remove", "there is none"), ("relay.remove", "removed")
        ]  # fmt: skip


def test_bad_input_is_refused_before_anything_is_written(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        wrongs: list[dict[str, Any]] = [{"batch": 0}, {"tries": True}, {"poll": 0.0}, {"ttl": 0.0}]
        for wrong in wrongs:
            with pytest.raises(ValueError, match=next(iter(wrong))):
                client.relay("r", Kept(), **wrong)
        with pytest.raises(TypeError, match=r"sink\.publish must be a function"):
            client.relay("r", object())  # type: ignore[arg-type]
        lineages: list[dict[str, Any]] = [{"inputs": "raw"}, {"outputs": [1]}, {"contract": ("c", "1")}]
        for lineage in lineages:
            with pytest.raises(TypeError, match=next(iter(lineage))):
                client.operation("a", **lineage)
        with pytest.raises(ValueError, match="version of a contract"):
            holdfast.Contract("c", "")
        assert client.relays.list() == []
