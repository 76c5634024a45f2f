"""Schedules on real databases: one run a slot however many replicas there are, and what becomes of every other slot."""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

import holdfast
from holdfast import telemetry
from holdfast.schedules.timetable import parse_timetable
from tests.children import PATIENCE, Child, eventually, query
from tests.pairs import EACH_ONCE

Connect = Callable[..., Any]
DAY = 86400
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What operators order, and what other processes leave, is seen sooner than after two seconds."""
    for flavour in ("", "_async"):
        monkeypatch.setattr(f"holdfast.schedules.runner{flavour}.LOOK_EVERY", 0.3)


@contextmanager
def running(*schedules: Any, run: Callable[..., Any] | None = None) -> Iterator[None]:
    """Run them, each with its work or all with ``run``, in a thread each; stop them at the end."""
    threads = [
        threading.Thread(target=each, daemon=True)
        for each in ([run] if run else [schedule.run for schedule in schedules])
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for schedule in schedules:
            schedule.stop()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def fates(client: Any, name: str) -> dict[datetime, str]:
    """What became of each slot. Fails when one has two fates."""
    found: dict[datetime, str] = {}
    for run in client.schedules.runs(name, limit=1000):
        step = (run.until - run.slot) / max(1, run.count - 1)
        for number in range(run.count):
            assert found.setdefault(run.slot + number * step, run.reason or run.status) is (run.reason or run.status)
    return found


def ended(client: Any, name: str) -> dict[datetime, str]:
    """The same without a slot that is open: a replica that stops between a slot and its run leaves it to others."""
    found = fates(client, name)
    left = {slot for slot, fate in found.items() if fate == "open"}
    assert left <= {max(found)}
    return {slot: fate for slot, fate in found.items() if slot not in left}


def connections(url: str) -> Callable[[], Any]:
    if url.startswith("sqlite"):
        return lambda: sqlite3.connect(urlsplit(url).path, timeout=PATIENCE, check_same_thread=False)
    return lambda: psycopg.connect(url)


@pytest.mark.parametrize("with_tx", [True, False], ids=["tx", "lease"])
def test_each_slot_runs_once_in_all_replicas_together(either: str, with_tx: bool) -> None:
    query(either, "create table effect (slot text)")
    clients = [holdfast.Client(either) for _ in range(3)]
    calls: list[tuple[datetime, bool]] = []

    def work(slot: Any) -> None:
        if with_tx:
            slot.tx.cursor().execute("insert into effect values ('" + slot.time.isoformat() + "')")
        else:
            query(either, "insert into effect values (%s)", slot.time.isoformat())
        calls.append((slot.time, slot.grant is None))

    tx = connections(either) if with_tx else None
    schedules = [client.schedule("tick", 0.1, tx=tx, misfire="all")._with(work) for client in clients]
    with running(*schedules):
        eventually(lambda: len(calls) >= 8, "eight slots have run")
    outcomes = ended(clients[0], "tick")
    assert set(outcomes.values()) == {"success"}
    slots = sorted(outcomes)
    assert slots == [slots[0] + number * timedelta(seconds=0.1) for number in range(len(slots))], "none is missing"
    effects = sorted(datetime.fromisoformat(slot) for (slot,) in query(either, "select slot from effect"))
    assert effects == slots
    assert {no_grant for _, no_grant in calls} == {with_tx}
    for client in clients:
        client.close()


@EACH_ONCE
def test_a_slot_knows_its_time_and_the_run_before_and_a_failure_is_on_record(connect: Connect, either: str) -> None:
    client = connect(either)
    client.migrate()
    seen: list[Any] = []

    def work(slot: Any) -> None:
        seen.append((slot.time, slot.attempt, slot.previous, slot.lost, slot.name))
        slot.check()
        slot.note(f"note {len(seen)}")
        if len(seen) == 1:
            raise LookupError("no file")

    schedule = client.schedule("report", 0.1)
    events: list[tuple[str, dict[str, Any]]] = []
    stop = telemetry.listen(lambda event, fields: events.append((event, fields)))
    with running(schedule, run=lambda: schedule.run(work)):
        eventually(lambda: len(seen) >= 2, "two slots have run")
    stop()
    by_slot = {run.slot: run for run in client.schedules.runs("report")}
    first, second = by_slot[seen[0][0]], by_slot[seen[1][0]]
    assert (first.status, first.reason, first.note, first.attempt) == ("failure", "LookupError: no file", "note 1", 1)
    assert (second.status, second.reason, second.note) == ("success", None, "note 2")
    assert first.lateness is not None
    assert first.lateness >= 0
    assert seen[0][1:] == (1, None, False, "report")
    assert (seen[1][2].slot, seen[1][2].status, seen[1][2].note) == (first.slot, "failure", "note 1")
    ended = [fields["outcome"] for event, fields in events if event == "schedule.ended"]
    assert {"failure", "success"} <= set(ended)
    assert [fields["lateness"] >= 0 for event, fields in events if event == "schedule.started"]
    [record] = client.schedules.list()
    assert (record.name, record.every, record.zone, record.paused) == ("report", "0.1 s", None, None)
    assert record.next_slot > first.slot
    assert record.running == ()


@EACH_ONCE
def test_many_schedules_share_one_wait(connect: Connect, either: str) -> None:
    client = connect(either)
    client.migrate()
    calls: dict[str, list[datetime]] = {"a": [], "b": [], "c": []}

    def make(name: str) -> Any:
        return client.every(0.2, name=name)(lambda slot: calls[slot.name].append(slot.time))

    jobs = [make(name) for name in calls]
    with running(jobs[0], run=lambda: client.schedules.run(jobs, concurrency=2)):
        eventually(lambda: all(len(times) >= 2 for times in calls.values()), "each has run twice")
    for times in calls.values():
        assert len(set(times)) == len(times)
    jobs[0](type("FakeSlot", (), {"name": "a", "time": datetime.now(UTC)})())  # it is still the function
    with pytest.raises(ValueError, match="two schedules are called 'a'"):
        client.schedules.run([jobs[0], jobs[0]])
    with pytest.raises(ValueError, match="there is no schedule"):
        client.schedules.run([])
    with pytest.raises(TypeError, match="has no work"):
        client.schedule("idle", 1).run()
    with pytest.raises(ValueError, match="runs once ever"):
        client.schedule("deploy", None).run(lambda slot: None)


def test_runs_do_not_overlap_and_what_is_skipped_says_why(either: str) -> None:
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        at_work, most = 0, 0
        go, begun = threading.Event(), threading.Semaphore(0)

        def work(slot: Any) -> None:
            nonlocal at_work, most
            at_work += 1
            most = max(most, at_work)
            begun.release()
            go.wait(PATIENCE)
            at_work -= 1

        schedules = [each.schedule("slow", 0.2)._with(work) for each in (client, other)]
        with running(*schedules):
            assert begun.acquire(timeout=PATIENCE)
            eventually(lambda: "overlap" in fates(client, "slow").values(), "a slot was skipped")
            go.set()
            assert begun.acquire(timeout=PATIENCE), "it goes on"
        assert most == 1


CRASHER = """
    import sys, threading, holdfast
    client = holdfast.Client(sys.argv[1])
    def work(slot):
        print("works", slot.attempt, flush=True)
        threading.Event().wait()
    {run}
"""


@pytest.mark.parametrize("on_crash", ["retry", "skip"])
def test_a_slot_whose_process_is_killed_is_run_again_or_skipped(either: str, on_crash: Any) -> None:
    run = f"client.schedule('nightly', {DAY}, on_crash='{on_crash}').run_due(work)"
    with Child(CRASHER.format(run=run), either) as child, holdfast.Client(either) as client:
        child.expect("works 1")
        schedule, attempts = client.schedule("nightly", DAY, on_crash=on_crash), []

        def work(slot: Any) -> None:
            attempts.append((slot.attempt, slot.time))

        assert schedule.run_due(work) is None, "another process runs it"
        with running(schedule, run=lambda: schedule.run(work)):  # a replica that was there before
            child.kill()
            eventually(lambda: fates(client, "nightly").values() and not client.schedules.list()[0].running, "settled")
        [run_] = client.schedules.runs("nightly")
        if on_crash == "retry":
            assert attempts == [(2, run_.slot)]
            assert (run_.status, run_.attempt) == ("success", 2)
        else:
            assert attempts == []
            assert (run_.status, run_.reason) == ("skipped", "crash")


@EACH_ONCE
def test_what_is_due_runs_once_for_cron_and_a_failure_may_be_retried(connect: Connect, either: str) -> None:
    client, other = connect(either), connect(either)
    client.migrate()
    calls: list[int] = []

    def fail(slot: Any) -> None:
        calls.append(slot.attempt)
        raise OSError("disk full")

    for every, name in ((None, "deploy"), (DAY, "nightly")):
        calls.clear()
        assert client.schedule(name, every).run_due(fail).reason == "OSError: disk full"
        assert other.schedule(name, every).run_due(fail).status == "failure", "not tried again"
        assert calls == [1]
        done = other.schedule(name, every).run_due(lambda slot: calls.append(slot.attempt), retry_within=2 * DAY)
        assert (done.status, done.reason, done.attempt) == ("success", None, 2)
        assert (done.lateness is None) == (every is None)
        assert client.schedule(name, every).run_due(fail, retry_within=2 * DAY) == done
        assert calls == [1, 2]


@EACH_ONCE
def test_another_timetable_takes_over_and_loses_no_slot(connect: Connect, either: str) -> None:
    client = connect(either)
    client.migrate()
    first, second = client.schedule("tick", 0.2, misfire="all"), client.schedule("tick", 0.3, misfire="all")
    times: list[datetime] = []
    with running(first, run=lambda: first.run(lambda slot: times.append(slot.time))):
        eventually(lambda: len(times) >= 4, "the first timetable runs")
        with running(second, run=lambda: second.run(lambda slot: times.append(slot.time))):
            eventually(lambda: client.schedules.list()[0].every == "0.3 s", "it is stored")
            until = client.schedules.list()[0].next_slot + timedelta(seconds=0.6)
            eventually(lambda: max(times) > until, "the second timetable runs")
    assert len(set(times)) == len(times)
    outcomes = ended(client, "tick")
    assert set(outcomes.values()) == {"success"}
    assert set(times) == outcomes.keys()
    slots = [(slot - EPOCH) // timedelta(microseconds=1) for slot in sorted(outcomes)]
    by_first, by_second = ([parse_timetable(every).next_after(slot) for slot in slots[:-1]] for every in (0.2, 0.3))
    assert any(
        slots[1:change] == by_first[: change - 1] and slots[change + 1 :] == by_second[change:]
        for change in range(1, len(slots))
    ), "none is missing before the change, and none after it"


@EACH_ONCE
def test_a_zone_that_a_reader_does_not_know_hides_no_schedule(connect: Connect, either: str) -> None:
    client = connect(either)
    client.migrate()
    for name in ("far", "near"):
        client.schedule(name, "0 3 * * *", zone="Europe/Berlin").run_due(lambda slot: None)
    dot = "_" if either.startswith("sqlite") else "."
    query(either, f"update holdfast{dot}schedule set zone = 'Mars/Base' where name = 'far'")
    far, near = client.schedules.list()
    assert (far.next_slot, near.next_slot is None) == (None, False)


@EACH_ONCE
def test_operators_pause_resume_order_and_skip(connect: Connect, either: str) -> None:
    client = connect(either)
    client.migrate()
    said: dict[str, Any] = {"actor": "jane", "reason": "a test"}
    ran: list[datetime] = []
    held: list[datetime] = []
    go = threading.Event()
    go.set()

    def work(slot: Any) -> None:
        ran.append(slot.time)
        if not go.is_set():
            held.append(slot.time)
            go.wait(PATIENCE)

    schedule = client.schedule("tick", 0.2, misfire="all")
    with pytest.raises(LookupError, match="there is no schedule 'tick'"):
        client.schedules.pause("tick", **said)
    with running(schedule, run=lambda: schedule.run(work)), holdfast.Client(either) as other:
        eventually(lambda: ran, "it runs")
        client.schedules.pause("tick", **said)
        assert client.schedules.list()[0].paused == "by jane: a test"
        eventually(lambda: "paused" in fates(client, "tick").values(), "slots are skipped")
        paused_at, ordered = len(ran), client.schedules.run_now("tick", **said)
        eventually(lambda: ordered in ran, "the ordered run begins, also in a pause")
        assert set(ran[paused_at:]) == {ordered}
        client.schedules.resume("tick", **said)
        go.clear()
        eventually(lambda: held, "a run goes on, and the next slot waits for its end")
        later = held[0] + timedelta(seconds=0.2)
        assert other.schedules.skip("tick", later, **said) is True  # the run may block the loop of the client
        assert other.schedules.skip("tick", later, **said) is False
        go.set()
        eventually(lambda: ran[-1] > later, "it goes on")
    assert later not in ran
    assert fates(client, "tick")[later] == "by jane: a test"
    assert fates(client, "tick")[ordered] == "ordered by jane: a test"
    with pytest.raises(ValueError, match="has no slot at"):
        client.schedules.skip("tick", later + timedelta(milliseconds=1), **said)
    client.schedules.remove("tick", **said)
    assert client.schedules.list() == []
    actions = [(entry.action, entry.subject, entry.outcome, entry.actor) for entry in client.audit.list()]
    assert [action for action, *_ in actions] == [
        "schedule_remove", "schedule_skip", "schedule_resume", "schedule_run", "schedule_pause",
    ]  # fmt: skip
    assert {(subject, actor) for _, subject, _, actor in actions} == {("tick", "jane")}


def test_a_failed_run_with_tx_leaves_nothing(either: str) -> None:
    query(either, "create table effect (slot text)")
    with holdfast.Client(either) as client:
        client.migrate()

        def fail(slot: Any) -> None:
            slot.tx.cursor().execute("insert into effect values ('x')")
            raise OSError("disk full")

        run = client.schedule("nightly", DAY, tx=connections(either)).run_due(fail)
        assert run is not None
        assert (run.status, run.reason) == ("failure", "OSError: disk full")
        assert query(either, "select * from effect") == []
        with pytest.raises(TypeError, match="cannot use the transaction of a"):
            client.schedule("x", 1, tx=5)
        connection = connections(either)()
        with pytest.raises(ValueError, match="overlap= of more than 1 needs a connection for each run"):
            client.schedule("x", 1, tx=connection, overlap=2)
        connection.close()


def test_sigterm_lets_the_run_end_and_begins_no_other(either: str) -> None:
    program = """
        import sys, holdfast
        client = holdfast.Client(sys.argv[1])
        def work(slot):
            print("works", flush=True)
            slot.stopping.wait()
            print("ends", flush=True)
        client.schedule("tick", 0.2).run(work, signals=True)
        print("over", flush=True)
    """
    with Child(program, either) as child, holdfast.Client(either) as client:
        child.expect("works")
        child.signal(signal.SIGTERM)
        child.expect("ends", "over", "<end>")
        assert [run.status for run in client.schedules.runs("tick") if run.started_at] == ["success"]
