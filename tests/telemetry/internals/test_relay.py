"""What is told of relays and reconcilers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import telemetry
from holdfast.testing.fake_driver import FakeDriver
from tests.children import PATIENCE, eventually
from tests.lineage.recording_sink import RecordingSink
from tests.operations.logs import change
from tests.recipes.reconciler.replicas import Records, running
from tests.telemetry.conftest import Told


def test_a_relay_tells_what_it_published_parked_and_failed_to(
    either: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.lineage.relay.retry_delay", lambda *_: 0.0)
    sink = RecordingSink()
    with holdfast.Client(either) as client:
        for label in ("good", "poison"):
            client.operation(label).run(int)
        relay = client.relay("r", sink, tries=2)
        sink.before = _down
        with pytest.raises(holdfast.SinkDown):
            relay.step()
        assert told.count("relay_failures") == {("sink",): 1}
        assert not told.of("relay.published")
        sink.before = _poisoned
        assert relay.step() == 2
    assert told.count("relay_published") == {(): 2}
    assert told.count("relay_parked") == {(): 2}


def _down(events: Any) -> None:
    raise ConnectionRefusedError("down")


def _poisoned(events: Any) -> None:
    if any(each.label == "poison" for each in events):
        raise ValueError("poison")


def _age(url: str, seconds: int) -> None:
    """All that is in the log was written so long ago."""
    earlier = f"at - {seconds}" if url.startswith("sqlite") else f"at - interval '{seconds} s'"
    change(url, f"update {{wal}} set at = {earlier}")


def test_the_lag_of_a_relay_grows_while_its_sink_is_down_and_is_what_was_left_to_it(either: str, told: Told) -> None:
    sink, refused = RecordingSink(), threading.Event()

    def trouble(events: Any) -> None:
        refused.set()
        raise ConnectionRefusedError("down")

    sink.before = trouble
    with holdfast.Client(either) as client:
        client.relay("r", RecordingSink()).step()
        client.operation("a").run(int)
        _age(either, seconds=1000)
        relay = client.relay("r", sink, poll=0.01)
        assert "relay_lag_seconds" not in telemetry.readings(), "it stands by"
        runs = threading.Thread(target=relay.run)
        runs.start()
        assert refused.wait(PATIENCE)
        lag = telemetry.readings()["relay_lag_seconds"]
        assert 1000 <= lag < 1100, "what was left to it, by the database's clock"
        eventually(lambda: telemetry.readings()["relay_lag_seconds"] > lag + 0.05, "it to grow")
        assert telemetry.readings()["relay_lag_events"] == 2
        sink.before = lambda events: None
        eventually(lambda: len(sink) == 2, "all to be published")
        eventually(lambda: telemetry.readings()["relay_lag_seconds"] < 60, "it to have caught up")
        assert telemetry.readings()["relay_lag_events"] == 0
        relay.stop()
        runs.join()
        assert "relay_lag_seconds" not in telemetry.readings()


def test_what_waits_for_a_transaction_that_is_left_open_is_lag(
    postgres_url: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, lags = RecordingSink(), list[float]()
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as left_open:
        left_open.execute("select pg_current_xact_id()")
        client.operation("a").run(int)
        _age(postgres_url, seconds=1000)
        relay = client.relay("r", sink, poll=0.01)
        begin = relay._new_pass

        def noted(*arguments: Any) -> Any:
            lags.append(telemetry.readings()["relay_lag_seconds"])
            return begin(*arguments)

        monkeypatch.setattr(relay, "_new_pass", noted)
        runs = threading.Thread(target=relay.run)
        runs.start()
        try:
            eventually(lambda: len(lags) > 3, "some passes")
            assert min(lags[1:]) > 1000, "as every pass has left it"
            left_open.rollback()
            eventually(lambda: len(sink) == 2, "all to be published")
            eventually(lambda: telemetry.readings()["relay_lag_seconds"] < 60, "it to have caught up")
        finally:
            relay.stop()
            runs.join()


def test_a_relay_that_keeps_up_has_no_lag_although_there_is_always_more(
    sqlite_url: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it looks there is something new, so it never finds nothing."""
    sink, lags, clock = RecordingSink(), list[float](), [1000.0]
    monkeypatch.setattr("holdfast.lineage.relay.now", lambda: clock[0])
    with holdfast.Client(sqlite_url) as client:
        relay = client.relay("r", sink)

        def meanwhile(events: Any) -> None:
            lags.append(telemetry.readings()["relay_lag_seconds"])
            clock[0] += 10
            client.operation(f"{len(lags)}").run(int)
            if len(lags) == 5:
                relay.stop()

        sink.after = meanwhile
        client.operation("0").run(int)
        relay.run()
    assert lags[0] < 10, "what was left to it, a moment ago"
    assert len(lags) >= 5, "it may tell one more before it has heard that it is to stop"
    assert set(lags[1:]) == {10.0}, "since it last asked, and no longer"


def test_a_reconciler_tells_what_it_counts_and_when_it_swept(sqlite_url: str, tmp_path: Path, told: Told) -> None:
    yard, records, before = FakeDriver(tmp_path), Records(sqlite_url), time.monotonic()
    records.make("b-1")
    yard.put("b-1")
    with running((sqlite_url, "sync"), yard, sweep_every=0.05) as replica:
        records.becomes("b-1", "Ready")
        eventually(lambda: replica.counts.sweeps > 2, "some sweeps")
        assert 0 <= telemetry.readings()["reconciler_sweep_age_seconds"] <= time.monotonic() - before
    assert "reconciler_sweep_age_seconds" not in telemetry.readings()
    found: dict[str, int] = {}
    for each in told.of("reconciler.counted"):
        found[each["what"]] = found.get(each["what"], 0) + each["count"]
    counts = replica.counts
    assert found == {what: getattr(counts, what) for what in found}
    assert {"sweeps", "seen", "written"} <= found.keys()
