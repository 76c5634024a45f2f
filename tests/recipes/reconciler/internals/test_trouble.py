"""Records that fail, drivers that fail, hooks that take their time, events that pile up: they delay nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast import MustCreate
from holdfast.testing.fake_driver import FakeDriver
from tests.children import PATIENCE, eventually, pass_time, query, until
from tests.recipes.reconciler.replicas import Records, fail, nothing, running

Place = tuple[str, str]
HANGS = 600.0
"""Seconds: longer than any test waits for an event."""
WATCH_ENDED = "the watch on the driver ended"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver and the hooks may take ten minutes."""
    for flavour in ("", "_async"):
        monkeypatch.setattr(f"holdfast.recipes.reconciler{flavour}.DRIVER_TIMEOUT", HANGS)


def make(records: Records, yard: FakeDriver, *ids: str) -> None:
    for id in ids:
        records.make(id)
        yard.put(id, publish=False)


def numbered(letter: str, count: int) -> list[str]:
    return [f"{letter}-{number:02}" for number in range(count)]


@pytest.mark.usefixtures("pauses")
def test_records_that_fail_do_not_stop_the_sweep(
    place: Place, yard: FakeDriver, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    """Far more of them in a row than are under way at a time, and the driver is well: the others get their turn."""
    broken, well = numbered("b", 40), numbered("w", 5)
    make(records, yard, *broken, *well)
    records.objects.put_if("box", "a-raw", b"not a dict", MustCreate())
    yard.before_get = lambda id: fail() if id in broken else None
    yard.before_watch = fail
    with running(place, yard, concurrency=2) as replica:
        for id in well:
            records.becomes(id, "Ready")
        eventually(lambda: replica.counts.sweeps == 1, "the sweep is complete")
        assert replica.counts.sweeps_abandoned == 0
        assert replica.counts.errors == 41
        eventually(lambda: replica.counts.driver_failures - yard.calls.count("watch") == 40, "all are counted")
        messages = [message for message in caplog.messages if "could not be handled" in message]
        assert [sum(f"'{id}'" in message for message in messages) for id in broken] == [1] * 40
        assert replica.counts.last_error.split(":")[0] in {
            *(message.split(": ")[1] for message in messages),
            WATCH_ENDED,
        }
        assert {records.phase(id) for id in broken} == {None}
        assert yard.calls.count("list") < 6, "whose fault it is, is not asked each time"
        yard.before_get = yard.before_watch = nothing
        for id in broken:
            records.becomes(id, "Ready")


def test_an_answer_for_another_record_is_none_for_this_one(place: Place, yard: FakeDriver, records: Records) -> None:
    make(records, yard, "a", "b")
    (yard.folder / "a").write_text((yard.folder / "b").read_text())
    with running(place, yard) as replica:
        records.becomes("b", "Ready")
        eventually(lambda: replica.counts.errors, "it is told")
        assert records.phase("a") is None


def test_a_failing_driver_is_left_alone_for_a_while_and_asked_again(
    place: Place, yard: FakeDriver, records: Records, pauses: list[int]
) -> None:
    make(records, yard, "b-1")
    yard.before_list = yard.before_watch = fail
    with running(place, yard) as replica:
        eventually(lambda: replica.counts.sweeps_abandoned >= 3, "it has tried, and tried again")
        eventually(lambda: pauses.count(3) >= 2, "for the third time, in both ways")
        asked = len(yard.calls)
        assert asked <= len(pauses) + 2, "not in a busy loop: each time it is left alone first"
        assert {pauses.count(number) for number in (1, 2)} == {2}, "for longer and longer"
        assert records.status("b-1") is None, "a driver that does not answer is not one that has nothing"
        assert "the driver is away" in replica.counts.last_error
        yard.before_list = yard.before_watch = nothing
        records.becomes("b-1", "Ready")


@pytest.mark.usefixtures("pauses")
def test_a_driver_that_goes_away_in_the_middle_of_a_sweep_is_waited_for(
    place: Place, yard: FakeDriver, records: Records
) -> None:
    """The sweep does not ask it for one record after the other meanwhile, and goes on when it is back."""
    ids = numbered("b", 40)
    make(records, yard, *ids)
    yard.before_watch = fail

    def go_away(id: str) -> None:
        yard.before_list = fail
        fail()

    yard.before_get = go_away
    with running(place, yard, concurrency=2) as replica:
        eventually(lambda: yard.calls.count("list") >= 3, "it asks, and asks again")
        assert sum(call.startswith("get") for call in yard.calls) < 20
        assert (replica.counts.written, replica.counts.sweeps_abandoned) == (0, 0)
        yard.before_get = yard.before_list = nothing
        records.becomes(ids[-1], "Ready")
        eventually(lambda: replica.counts.sweeps == 1, "the sweep is complete")
        assert replica.counts.sweeps_abandoned == 0


def wait_for_others(yard: FakeDriver, limit: int) -> Callable[[str], None]:
    """A hook in which each waits until as many are inside as there may be; and the first of them for one too many."""
    first = iter(range(limit))

    def wait(_: str) -> None:
        eventually(lambda: yard.most_inside >= limit, "the others come, too")
        if next(first, None) is not None:
            pass_time(0.1)

    return wait


@pytest.mark.usefixtures("patient")
def test_no_more_records_are_under_way_than_allowed(place: Place, yard: FakeDriver, records: Records) -> None:
    ids = numbered("b", 15)
    make(records, yard, *ids)
    yard.before_watch, yard.took = fail, 0.005
    yard.before_get = wait_for_others(yard, 3)
    with running(place, yard, concurrency=3):
        for id in ids:
            records.becomes(id, "Ready")
    assert yard.most_inside == 3


@pytest.mark.usefixtures("patient")
def test_of_many_events_no_more_are_worked_on_than_allowed(place: Place, yard: FakeDriver, records: Records) -> None:
    ids = numbered("b", 15)
    make(records, yard, *ids)
    with running(place, yard, concurrency=3) as replica:
        eventually(lambda: replica.counts.sweeps >= 2, "it listens")
        yard.most_inside, yard.took = 0, 0.005
        yard.before_get = wait_for_others(yard, 3)
        for id in ids:
            yard.put(id, False, terminal=True)
        for id in ids:
            records.becomes(id, "Error")
    assert yard.most_inside == 3


class Sessions:
    """A hook that waits until ``most`` are in it, in either flavour, and counts them."""

    def __init__(self, limit: int) -> None:
        self._mutex, self._limit, self._inside, self.most_inside = threading.Lock(), limit, 0, 0

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._mutex:
            self._inside += 1
            self.most_inside = max(self.most_inside, self._inside)
        try:
            yield
        finally:
            with self._mutex:
                self._inside -= 1

    def blocking(self, id: str) -> bool:
        with self._counted():
            eventually(lambda: self.most_inside >= self._limit, "the others come")
            time.sleep(0.005)
            return True

    async def on_a_loop(self, id: str) -> bool:
        with self._counted():
            await until(lambda: self.most_inside >= self._limit, "the others come")
            await asyncio.sleep(0.005)
            return True


@pytest.mark.usefixtures("patient")
def test_sessions_are_asked_for_side_by_side_within_the_bound(place: Place, yard: FakeDriver, records: Records) -> None:
    ids, sessions = numbered("b", 15), Sessions(4)
    make(records, yard, *ids)
    yard.before_watch = fail
    hook: Callable[[str], Any] = sessions.on_a_loop if place[1] == "async" else sessions.blocking
    with running(place, yard, concurrency=4, session_present=hook):
        for id in ids:
            records.becomes(id, "Ready")
    assert sessions.most_inside == 4


def test_a_hook_for_events_that_hangs_holds_up_no_record_and_piles_up_no_more_than_so_much(
    place: Place, yard: FakeDriver, records: Records, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.runtime.concurrency.MAX_NOTICES", 3)
    make(records, yard, "b-1")
    reasons, over = [], threading.Event()

    def blocking(event: Any) -> None:
        reasons.append(event.reason)
        over.wait(HANGS)

    async def on_a_loop(event: Any) -> None:
        reasons.append(event.reason)
        await asyncio.to_thread(over.wait, HANGS)

    hook: Callable[[Any], Any] = on_a_loop if place[1] == "async" else blocking
    with running(place, yard, on_event=hook) as replica:
        eventually(lambda: replica.counts.sweeps >= 2, "it listens")
        yard.publish("platform", "b-1", "first")
        eventually(lambda: reasons, "it is told")
        for number in range(5):
            yard.publish("platform", "b-1", f"then {number}")
        yard.put("b-1", False, terminal=True)
        records.becomes("b-1", "Error")
        assert replica.counts.untold == 2
        assert len([message for message in caplog.messages if "the last 3 of its calls are kept" in message]) == 1
        over.set()
        eventually(lambda: len(reasons) == 4, "it is told what was kept")
        assert reasons == ["first", "then 2", "then 3", "then 4"]


def test_what_never_returns_holds_up_nobody_else(
    place: Place, yard: FakeDriver, records: Records, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first list, one record of the driver's and one of the hook's, where one at a time is under way. Then each of
    them returns after all."""
    for flavour in ("", "_async"):
        monkeypatch.setattr(f"holdfast.recipes.reconciler{flavour}.DRIVER_TIMEOUT", 0.4)
    make(records, yard, "a", "get", "hook", "z")
    before = {*threading.enumerate()}
    yard.before_watch, hangs, over = fail, {"list", "get", "hook"}, threading.Event()

    def hang(what: str) -> bool:
        return what not in hangs or over.wait(HANGS)

    async def on_a_loop(id: str) -> bool:
        if id == "hook" and not over.is_set():
            await asyncio.Event().wait()
        return True

    yard.before_list, yard.before_get = lambda: hang("list"), lambda id: id == "hook" or hang(id)
    hook: Callable[[str], Any] = on_a_loop if place[1] == "async" else hang
    with running(place, yard, sweep_every=0.05, concurrency=1, session_present=hook) as replica:
        try:
            eventually(lambda: replica.counts.sweeps_abandoned, "the list is not waited for any longer")
            late = "driver.list() has not returned within 0.4 s, and may still be running"
            eventually(lambda: late in caplog.text, "it is logged after it was counted")
            hangs.discard("list")
            records.becomes("z", "Ready")
            records.becomes("a", "Ready")
            eventually(lambda: replica.counts.sweeps >= 2, "it sweeps on")
            assert (records.phase("get"), records.phase("hook")) == (None, None)
            assert replica.counts.errors >= 4, "each time it is one error a record"
            if place[1] == "sync":
                left = [each for each in {*threading.enumerate()} - before if each.name == "holdfast-caller"]
                assert len(left) < 12, "not one for each time that it is asked"
            with replica.exclusive("get"):
                over.set()
            records.becomes("get", "Ready")
            records.becomes("hook", "Ready")
        finally:
            over.set()


def test_what_never_returns_does_not_hold_up_the_end(
    sqlite_url: str, yard: FakeDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has ten minutes here for an answer: whoever is to stop does not, and it is nobody's failure. A task is
    cancelled, a thread has to look."""
    monkeypatch.setattr("holdfast.recipes.reconciler.DRIVER_TIMEOUT", HANGS)
    make(Records(sqlite_url), yard, "a")
    asked, over = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        over.wait(HANGS)

    yard.before_list = hang
    try:
        with running((sqlite_url, "sync"), yard) as replica:
            assert asked.wait(PATIENCE)
        assert (replica.counts.sweeps_abandoned, replica.counts.driver_failures) == (0, 0)
        assert "abandoned" not in caplog.text
    finally:
        over.set()


def test_a_session_hook_that_fails_for_one_record_fails_for_that_one(
    place: Place, yard: FakeDriver, records: Records
) -> None:
    make(records, yard, "a", "b", "c")

    def present(id: str) -> bool:
        return id != "b" or fail()  # type: ignore[func-returns-value, return-value]

    with running(place, yard, session_present=present) as replica:
        records.becomes("a", "Ready")
        records.becomes("c", "Ready")
        eventually(lambda: replica.counts.sweeps >= 1, "the sweep is complete")
        assert records.phase("b") is None
        assert replica.counts.errors >= 1


def test_events_of_one_record_that_pile_up_hold_up_no_other(place: Place, yard: FakeDriver, records: Records) -> None:
    """As many as may be under way, and more, all of one record at which a handler is: what they say is one thing."""
    make(records, yard, "busy", "other")
    with running(place, yard, concurrency=2) as replica:
        records.becomes("busy", "Ready")
        records.becomes("other", "Ready")
        eventually(lambda: replica.counts.sweeps >= 2, "it listens")
        with replica.exclusive("busy"):
            for _ in range(20):
                yard.put("busy", False, terminal=True)
            yard.put("other", False, terminal=True)
            records.becomes("other", "Error")
            assert records.phase("busy") == "Ready"
            assert replica.counts.events == 21
        records.becomes("busy", "Error")


def test_a_clock_that_went_back_does_not_make_a_sweep_leave_records_alone(
    place: Place, yard: FakeDriver, records: Records
) -> None:
    """They were updated an hour from now, by the clock as it was then: what counts is the version."""
    make(records, yard, "b-1")
    url = place[0]
    if url.startswith("sqlite"):
        [(trigger,)] = query(url, "select sql from sqlite_master where name = 'holdfast_object_updated'")
        query(url, "drop trigger holdfast_object_updated")
        query(url, "update holdfast_object set updated_at = updated_at + 3600")
        query(url, trigger)
    else:
        query(url, "update holdfast.object set updated_at = updated_at + interval '1 h'")
    yard.before_watch = fail
    with running(place, yard) as replica:
        records.becomes("b-1", "Ready")
        assert replica.counts.left_alone == 0


def test_a_record_that_cannot_be_written_spoils_no_other_that_is_written_with_it(
    place: Place, yard: FakeDriver, records: Records
) -> None:
    """One whose driver says more than a record can hold, and one that a handler has just changed."""
    ids = numbered("b", 12)
    make(records, yard, *ids)
    yard.put("b-05", publish=False, details={"log": "x" * (1 << 20)})
    yard.before_watch = fail
    once = iter([True])

    def change(id: str) -> None:
        if id == "b-07" and next(once, False):
            records.objects.update("box", "b-07", lambda record: {"by": "a handler"})

    yard.after_get = change
    with running(place, yard, concurrency=4) as replica:
        for id in {*ids} - {"b-05", "b-07"}:
            records.becomes(id, "Ready")
        eventually(lambda: replica.counts.sweeps == 1, "the sweep is complete")
        assert records.objects.get("box", "b-07").payload == {"by": "a handler"}  # type: ignore[union-attr]
        assert records.status("b-05") is None
        assert (replica.counts.errors, replica.counts.conflicts, replica.counts.left_alone) == (1, 1, 1)
        assert "b-05" in replica.counts.last_error or "watch" in replica.counts.last_error
