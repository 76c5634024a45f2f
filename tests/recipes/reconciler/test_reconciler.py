"""The reconciler on real databases, in both flavours, with a driver that every process sees."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import holdfast
from holdfast import MatchVersion, MustCreate
from holdfast.reconciler import Backend, ReconcilerRules
from holdfast.testing.fake_driver import FakeDriver
from tests.children import Child, eventually
from tests.recipes.reconciler.replicas import Records, fail, running


def test_events_take_a_record_through_its_phases(place: tuple[str, str], yard: FakeDriver, records: Records) -> None:
    """By the watch alone: the sweep would come in a day. What is not its own it leaves as it is."""
    records.make("b-1", spec={"argv": ["true"]})
    yard.put("b-1", None)
    with running(place, yard) as replica:
        records.becomes("b-1", "Provisioning")
        eventually(lambda: replica.counts.sweeps >= 2, "it has swept, and again when it began to listen")
        yard.put("b-1", True, details={"pid": 7})
        records.becomes("b-1", "Ready")
        assert records.status("b-1") == {
            "phase": "Ready", "details": {"pid": 7},
            "conditions": [{"type": "Ready", "status": True, "reason": "Told", "message": "", "terminal": False}],
        }  # fmt: skip
        yard.put("b-1", False, terminal=True)
        records.becomes("b-1", "Error")
        yard.put("b-1", False, terminal=True, deleting=True)
        records.becomes("b-1", "Deleting")
        yard.remove("b-1")
        records.becomes("b-1", "Deleted")
        assert records.objects.get("box", "b-1").payload["spec"] == {"argv": ["true"]}  # type: ignore[union-attr]
        eventually(lambda: replica.counts.written == 5, "each phase is written once, and counted")
        counts = replica.counts
        assert (counts.events, counts.errors, counts.conflicts, counts.watching) == (4, 0, 0, True)


def test_it_sweeps_every_minute_and_an_orphan_has_five_unless_told_otherwise(sqlite_url: str, yard: FakeDriver) -> None:
    terms = holdfast.Client(sqlite_url).reconciler("box", yard)._terms
    assert (terms.sweep_every, terms.grace) == (60.0, 300.0)


def test_what_no_event_tells_a_sweep_finds(place: tuple[str, str], yard: FakeDriver, records: Records) -> None:
    records.make("b-1")
    yard.put("b-1")
    started = time.monotonic()
    with running(place, yard, sweep_every=0.05) as replica:
        records.becomes("b-1", "Ready")
        yard.put("b-1", False, terminal=True, publish=False)
        records.becomes("b-1", "Error")
        eventually(lambda: replica.counts.written == 2, "its own answer has come, too, and is counted")
        sweeps = replica.counts.sweeps
        eventually(lambda: replica.counts.sweeps > sweeps + 1, "two more sweeps")
        assert replica.counts.written == 2, "what is true is not written again"
        assert replica.counts.sweep_seconds > 0
        assert 0 <= replica.counts.swept_ago < time.monotonic() - started


def test_a_session_must_be_there_before_a_record_is_ready(
    place: tuple[str, str], yard: FakeDriver, records: Records
) -> None:
    there: set[str] = set()
    records.make("b-1")
    yard.put("b-1")
    with running(place, yard, session_present=there.__contains__):
        records.becomes("b-1", "Provisioning")
        there.add("b-1")
        yard.publish("status", "b-1")
        records.becomes("b-1", "Ready")


def test_an_orphan_goes_after_the_grace_and_one_whose_backend_comes_back_stays(
    place: tuple[str, str], yard: FakeDriver, records: Records
) -> None:
    for id in ("gone", "back"):
        records.make(id)
        yard.put(id)
    grace = 600.0
    with running(place, yard, sweep_every=0.05, grace=grace) as replica:
        records.becomes("gone", "Ready")
        records.becomes("back", "Ready")
        yard.remove("back", publish=False)
        eventually(lambda: "missing_since" in records.status("back"), "it is seen to be missing")
        yard.remove("gone")
        eventually(lambda: "missing_since" in records.status("gone"), "it is seen to be missing")
        sweeps = replica.counts.sweeps
        eventually(lambda: replica.counts.sweeps > sweeps + 1, "two more sweeps")
        assert records.phase("gone") == "Ready", "nothing else is said before the grace is over"
        yard.put("back", publish=False)
        records.objects.update("box", "gone", lambda record: missing_for(record.payload, grace))
        records.becomes("gone", None)
        eventually(lambda: replica.counts.removed == 1, "it is counted")
        eventually(lambda: "missing_since" not in records.status("back"), "it is there again")
        assert records.phase("back") == "Ready"


class JsonBytes:
    """Payloads that only its owner can read."""

    def decode(self, payload: bytes) -> Any:
        return json.loads(payload[::-1])

    def encode(self, value: Any) -> bytes:
        return json.dumps(value).encode()[::-1]


class KeepLost(ReconcilerRules):
    """Another place for the status, a phase of its own, and an orphan that is never removed."""

    def status(self, value: Any) -> Any:
        return value.get("seen", {})

    def merge(self, value: Any, status: Any) -> Any:
        return {**value, "seen": status}

    def phase(self, backend: Backend, *, before: str, session: bool) -> str:
        if backend.details.get("hot"):
            return "Hot"
        return super().phase(backend, before="Provisioning" if before in ("Hot", "Lost") else before, session=session)

    def orphan(self, *, before: str, missing: float | None, grace: float) -> str | None:
        return "Lost"


def test_records_of_bytes_follow_their_backends_by_the_rules_of_the_caller(
    place: tuple[str, str], yard: FakeDriver, records: Records
) -> None:
    codec = JsonBytes()

    def value(id: str) -> Any:
        return codec.decode(records.objects.get("box", id).payload)  # type: ignore[union-attr]

    def becomes(id: str, phase: str) -> None:
        eventually(lambda: value(id).get("seen", {}).get("phase") == phase, f"{id} becomes {phase}")

    for id, payload in (("b-1", codec.encode({"mine": 1})), ("damaged", b"{")):
        records.objects.put_if("box", id, payload, MustCreate())
        yard.put(id)
    with running(place, yard, codec=codec, rules=KeepLost(), sweep_every=0.05, grace=0.0) as replica:
        becomes("b-1", "Ready")
        yard.put("b-1", details={"hot": True})
        becomes("b-1", "Hot")
        yard.remove("b-1")
        becomes("b-1", "Lost")
        eventually(lambda: replica.counts.errors > 0, "the record that cannot be decoded is counted")
        eventually(lambda: replica.counts.written >= 3, "a write is counted after it can be read")
        sweeps = replica.counts.sweeps
        eventually(lambda: replica.counts.sweeps > sweeps + 1, "two more sweeps")
        assert replica.counts.written == 3, "what is right is not written again"
        yard.put("b-1")
        becomes("b-1", "Ready")
        assert "missing_since" not in value("b-1")["seen"]
        assert (value("b-1")["mine"], replica.counts.removed) == (1, 0)
        assert records.objects.get("box", "damaged").payload == b"{"  # type: ignore[union-attr]


def missing_for(payload: Any, seconds: float) -> Any:
    """As if it had been missing for so much longer."""
    status = payload["status"]
    return payload | {"status": status | {"missing_since": status["missing_since"] - seconds}}


def test_a_record_that_was_updated_since_the_sweep_began_is_left_alone(
    place: tuple[str, str], yard: FakeDriver, records: Records
) -> None:
    """The list of the driver is older than what the handler knew when it wrote."""
    old = records.make("b-1", by="handler")
    yard.put("b-1")
    yard.before_watch = fail
    once, looked = iter([True]), threading.Event()

    def write_during_the_sweep() -> None:
        if next(once, False):
            records.objects.put_if("box", "b-1", {"by": "a later handler"}, MatchVersion(old.version))
        else:
            looked.wait()

    yard.before_list = write_during_the_sweep
    with running(place, yard, sweep_every=0.05) as replica:
        try:
            eventually(lambda: replica.counts.sweeps == 1, "the first sweep")
            assert replica.counts.left_alone == 1
            assert records.objects.get("box", "b-1").payload == {"by": "a later handler"}  # type: ignore[union-attr]
        finally:
            looked.set()
        records.becomes("b-1", "Ready")


def test_each_record_is_asked_for_again_before_it_is_changed(
    place: tuple[str, str], yard: FakeDriver, records: Records
) -> None:
    """The list says: not ready, and: not there. By the time it is that record's turn, both are wrong."""
    yard.before_watch = fail
    for id in ("changed", "unlisted"):
        records.make(id)
    yard.put("changed", None)

    def change(id: str) -> None:
        yard.put(id, True, publish=False)

    yard.before_get = change
    with running(place, yard):
        records.becomes("changed", "Ready")
        records.becomes("unlisted", "Ready")
        versions = {id: records.objects.get("box", id).version for id in ("changed", "unlisted")}  # type: ignore[union-attr]
    assert all("missing_since" not in records.status(id) for id in versions)


def test_a_lost_race_is_read_again_and_decided_anew(place: tuple[str, str], yard: FakeDriver, records: Records) -> None:
    """A handler asks for its deletion between our reading and our writing: that stays, and is built upon."""
    created = records.make("b-1")
    with running(place, yard) as replica:
        eventually(lambda: replica.counts.sweeps >= 2, "it listens")
        once = iter([True])

        def ask_for_deletion(id: str) -> None:
            if next(once, False):
                current = records.objects.get("box", "b-1")
                payload = {"by": "handler", "status": {"phase": "Deleting"}}
                records.objects.put_if("box", "b-1", payload, MatchVersion(current.version))  # type: ignore[union-attr]

        yard.after_get = ask_for_deletion
        yard.put("b-1")
        eventually(lambda: "conditions" in (records.status("b-1") or {}), "it is written")
        assert records.phase("b-1") == "Deleting"
        assert records.objects.get("box", "b-1").payload["by"] == "handler"  # type: ignore[union-attr]
        assert replica.counts.conflicts == 1
    assert created.version


def test_handlers_watch_and_sweep_of_one_process_take_turns(
    place: tuple[str, str], yard: FakeDriver, records: Records
) -> None:
    """While a handler has a record, neither watch nor sweep touches it, and other records do not wait."""
    for id in ("mine", "other"):
        records.make(id)
    with running(place, yard, sweep_every=0.05) as replica:
        eventually(lambda: "missing_since" in (records.status("other") or {}), "it works")
        with replica.exclusive("mine"):
            asked = yard.calls.count("get mine")
            for id in ("mine", "other"):
                yard.put(id)
            records.becomes("other", "Ready")
            assert yard.calls.count("get mine") == asked
            assert records.phase("mine") != "Ready"
        records.becomes("mine", "Ready")


def test_platform_events_are_told_and_changenothing(place: tuple[str, str], yard: FakeDriver, records: Records) -> None:
    records.make("b-1")
    events: list[Any] = []
    with running(place, yard, on_event=events.append) as replica:
        eventually(lambda: replica.counts.sweeps >= 2, "it listens")
        version = records.objects.get("box", "b-1").version  # type: ignore[union-attr]
        yard.publish("platform", "b-1", "OutOfMemory")
        eventually(lambda: events, "it is told")
        assert (events[0].kind, events[0].id, events[0].reason) == ("platform", "b-1", "OutOfMemory")
        assert records.objects.get("box", "b-1").version == version  # type: ignore[union-attr]


def test_a_replica_without_the_lease_never_writes_not_even_what_was_under_way(
    place: tuple[str, str], yard: FakeDriver, records: Records
) -> None:
    """The lease goes between its asking the driver and its writing: the database refuses the write, and the removal."""
    records.make("b-1")
    records.make("b-2", status={"phase": "Deleted"})
    yard.put("b-1")
    operator = holdfast.Client(place[0])
    deposed, turn = threading.Event(), threading.Lock()

    def depose(id: str) -> None:
        with turn:  # a second caller waits for the first
            if not deposed.is_set():
                assert operator.leases.force_release("reconciler", actor="operator", reason="test")
                operator.lease("reconciler", ttl=600).acquire()
                deposed.set()

    yard.after_get, yard.before_watch = depose, fail
    with running(place, yard, elector={"ttl": 600.0, "renew_every": 0.2, "retry_every": 600.0}) as replica:
        eventually(deposed.is_set, "it is about to write")
        eventually(lambda: replica.elector.status().state == "standby", "it stands by")
        assert records.status("b-1") is None
        assert records.phase("b-2") == "Deleted"
        assert (replica.counts.written, replica.counts.removed, replica.counts.errors) == (0, 0, 0)
        calls = len(yard.calls)
        yard.put("b-1", None)
        threading.Event().wait(0.3)
        assert len(yard.calls) == calls, "a standby does not even ask"
    operator.close()


REPLICA = """
import asyncio, sys, holdfast
from pathlib import Path
from holdfast.testing.fake_driver import AsyncFakeDriver, FakeDriver

async def main(url, folder, ttl):
    async with holdfast.AsyncClient(url) as client:
        reconciler = client.reconciler("box", AsyncFakeDriver(FakeDriver(Path(folder))), sweep_every=0.1, grace=60.0)
        async def work(term):
            print("leading", flush=True)
            await reconciler.run(term)
        elector = client.elector("reconciler", ttl=ttl, renew_every=ttl / 5, retry_every=ttl / 5)
        print("ready", flush=True)
        await elector.run(work, signals=True)
        print("over", flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
"""


def test_after_the_holder_is_gone_the_standby_sweeps_on(postgres_url: str, yard: FakeDriver, tmp_path: Path) -> None:
    """Expiry, standby, sweep: nothing else tells it what has changed meanwhile."""
    records = Records(postgres_url)
    records.make("b-1")
    yard.put("b-1")
    with Child(REPLICA, postgres_url, tmp_path, 1.0) as first:
        first.expect("ready", "leading")
        records.becomes("b-1", "Ready")
        with Child(REPLICA, postgres_url, tmp_path, 1.0) as second:
            second.expect("ready")
            first.signal(signal.SIGSTOP)
            yard.put("b-1", False, terminal=True, publish=False)
            second.expect("leading")
            records.becomes("b-1", "Error")


def test_a_graceful_end_hands_the_sweep_over_at_once(either: str, yard: FakeDriver, tmp_path: Path) -> None:
    """With a TTL of ten minutes nothing but the release itself can be why."""
    records = Records(either)
    records.make("b-1")
    with Child(REPLICA, either, tmp_path, 600.0) as first:
        first.expect("ready", "leading")
        with Child(REPLICA, either, tmp_path, 600.0) as second:
            second.expect("ready")
            first.signal(signal.SIGTERM)
            first.expect("over")
            second.expect("leading")
            yard.put("b-1", publish=False)
            records.becomes("b-1", "Ready")
