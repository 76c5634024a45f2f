"""What is exported is the table, and its numbers are those of what happened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import holdfast
from holdfast import telemetry
from holdfast.integrations.opentelemetry import instrument
from holdfast.integrations.prometheus import export
from holdfast.runtime.telemetry import emit


def happen(url: str) -> None:
    """Two leases granted, one refused, one held while the numbers are read by the caller."""
    with holdfast.Client(url) as client:
        with client.lease("a"):
            assert client.lease("a", holder="other").try_acquire() is None
        client.lease("b").acquire().release()


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    data: Any = reader.get_metrics_data()
    return {
        metric.name: {tuple(sorted(point.attributes.items())): point for point in metric.data.data_points}
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


@pytest.mark.parametrize("prefix", ["holdfast.", "kfm."])
def test_opentelemetry_is_told_under_the_prefix_that_was_asked_for(sqlite_url: str, prefix: str) -> None:
    reader = InMemoryMetricReader()
    stop = instrument(prefix=prefix, meter_provider=MeterProvider([reader]))
    happen(sqlite_url)
    held = collected(reader)[f"{prefix}leases_held"][()].value
    assert held == telemetry.readings().get("leases_held", 0.0)
    stop()
    happen(sqlite_url)  # nobody listens any more
    found = collected(reader)
    kind = (("kind", "lease"),)
    assert found[f"{prefix}lease_acquisitions"][kind].value == 2
    assert found[f"{prefix}lease_refusals"][kind].value == 1
    assert found[f"{prefix}lease_hold_seconds"][kind].count == 2


def test_without_an_sdk_nobody_listens() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'opentelemetry.sdk' else real(name, *a)\n"
        "from holdfast.integrations.opentelemetry import instrument\n"
        "from holdfast.runtime import telemetry\n"
        "stop = instrument(); print(len(telemetry.listeners)); stop()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"


def test_prometheus_shows_every_metric_of_the_table_and_stops(sqlite_url: str) -> None:
    registry = CollectorRegistry()
    stop = export(registry)
    happen(sqlite_url)
    families = {each.name: each for each in text_string_to_metric_families(generate_latest(registry).decode())}
    shown = {name.removeprefix("holdfast_") for name in families if not name.endswith("_created")}
    assert shown == {each.name for each in telemetry.METRICS}
    values = {(each.name, *each.labels.values()): each.value for family in families.values() for each in family.samples}
    assert values["holdfast_lease_acquisitions_total", "lease"] == 2
    assert values["holdfast_lease_refusals_total", "lease"] == 1
    assert values["holdfast_lease_hold_seconds_count", "lease"] == 2
    for _ in range(2):
        stop()
    assert generate_latest(registry) == b""
    export(registry)()  # once more, in the same registry


def test_what_nobody_has_has_no_age(sqlite_url: str) -> None:
    """Where no relay runs, a lag of 0 s would be a lie: it is absent, and that can be alerted on."""
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    stops = [export(registry), instrument(meter_provider=MeterProvider([reader]))]
    with holdfast.Client(sqlite_url) as client, client.lease("a"):
        shown, told = generate_latest(registry).decode(), collected(reader)
    for name, there in (("relay_lag_seconds", False), ("relay_lag_events", True), ("heartbeat_age_seconds", True)):
        assert (f"\nholdfast_{name} " in shown) is there, name
        assert bool(told.get(f"holdfast.{name}")) is there, name
    for stop in stops:
        stop()


def test_slots_carry_their_pool_and_single_metrics_can_be_renamed(sqlite_url: str) -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    names = {"slots_in_use": "xg2g_tuners_in_use", "lease_losses": "xg2g_losses"}
    stops = [export(registry, names=names), instrument(names=names, meter_provider=MeterProvider([reader]))]
    with holdfast.Client(sqlite_url) as client, holdfast.Client(sqlite_url) as other:
        for pool, owners in (("tuner", ["a", "b"]), ("gpu", ["c"])):
            slots = client.slots(pool, 4)
            grants = [slots.claim(owner=owner) for owner in owners]
            slots.reconcile([{"id": each.owner, "slot": each.slot, "terminal": False} for each in grants])
        other.slots("tuner", 4).reconcile([])
        shown, observed = generate_latest(registry).decode(), collected(reader)
        assert 'xg2g_tuners_in_use{pool="tuner"} 2.0' in shown
        assert 'xg2g_tuners_in_use{pool="gpu"} 1.0' in shown
        assert "xg2g_losses_total" in shown
        assert "holdfast_slots_in_use" not in shown
        by_pool = {point.attributes["pool"]: point.value for point in observed["xg2g_tuners_in_use"].values()}
        assert by_pool == {"tuner": 2, "gpu": 1}
        assert "holdfast.slots_in_use" not in observed
        assert telemetry.readings()["slots_in_use"] == 3
        client.slots("gpu", 4).forget()
        assert "gpu" not in generate_latest(registry).decode()
    assert telemetry.readings()["slots_in_use"] == 0
    for stop in stops:
        stop()


@pytest.mark.parametrize("exporter", [export, instrument])
def test_a_metric_that_does_not_exist_cannot_be_renamed(exporter: Any) -> None:
    with pytest.raises(ValueError, match="there is no metric 'slot_in_use'"):
        exporter(names={"slot_in_use": "x"})


def test_nothing_is_exported_twice_and_no_gauge_after_the_end(sqlite_url: str) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    stop = instrument(meter_provider=provider)
    with pytest.raises(ValueError, match="already"):
        instrument(meter_provider=provider)
    happen(sqlite_url)
    assert collected(reader)["holdfast.lease_acquisitions"][("kind", "lease"),].value == 2
    stop()
    assert not collected(reader).get("holdfast.leases_held")
    instrument(meter_provider=provider)()  # once more


@pytest.mark.parametrize("name", ["leases_held", "relay_failures"])
def test_a_name_that_is_taken_leaves_the_registry_as_it_was(name: str) -> None:
    registry = CollectorRegistry()
    Gauge(f"holdfast_{name}", "mine", registry=registry)
    before = generate_latest(registry)
    with pytest.raises(ValueError, match=name):
        export(registry)
    assert generate_latest(registry) == before


def test_a_listener_that_is_given_twice_is_ended_one_by_one() -> None:
    told: list[str] = []

    def hear(event: str, _: dict[str, Any]) -> None:
        told.append(event)

    first, second = telemetry.listen(hear), telemetry.listen(hear)
    emit("a")
    first()
    first()
    emit("b")
    second()
    emit("c")
    assert told == ["a", "a", "b"]


FORKED = """
import os, sys, holdfast
from holdfast import telemetry
client = holdfast.Client(sys.argv[1])
elector, slots = client.elector("x"), client.slots("pool", capacity=2)
client.lease("warm").acquire().release()
if os.fork() == 0:
    slots.reconcile([{"id": "s", "slot": slots.claim(owner="s").slot, "terminal": False}])
    def work(term):
        found = telemetry.readings()
        print(found["electors_leading"], found["slots_in_use"], flush=True)
    elector.run(work)
    os._exit(0)
os.wait()
print(telemetry.readings()["electors_leading"])
"""


def test_in_a_fork_what_was_made_before_it_has_its_gauges(sqlite_url: str) -> None:
    given = [sys.executable, "-c", FORKED, sqlite_url]
    done = subprocess.run(given, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1.0 1.0\n0.0\n", done.stderr


def test_names_and_keys_are_never_labels() -> None:
    assert {label for each in telemetry.METRICS for label in each.labels}.isdisjoint(
        {"name", "key", "lease", "holder", "token", "url", "database"}
    )
    assert len({each.name for each in telemetry.METRICS}) == len(telemetry.METRICS)


def test_however_many_datasets_are_made_up_there_are_no_more_series_than_asked_for() -> None:
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    stops = [export(registry, limit=3), instrument(meter_provider=MeterProvider([reader]), limit=3)]
    for number in (0, 1, 0, 2, 3, 4, 5, 1):
        labels = {"pipeline": "etl", "task": "load", "dataset_id": f"of-user-{number}", "operation_type": "upsert"}
        emit("operation.replayed", **labels, sovereignty_event=True)
    shown = generate_latest(registry).decode()
    for stop in stops:
        stop()
    assert shown.count("\nholdfast_idempotent_replays_total{") == 4
    told = {
        dict(each)["dataset_id"]: (dict(each), point.value)
        for each, point in collected(reader)["holdfast.idempotent_replays"].items()
    }
    assert {name: count for name, (_, count) in told.items()} == {
        "of-user-0": 2,
        "of-user-1": 2,
        "of-user-2": 1,
        "(other)": 3,
    }
    assert told["(other)"][0] == {
        **dict.fromkeys(("pipeline", "task", "dataset_id", "operation_type"), "(other)"),
        "env": "",
        "sovereignty_event": "true",
    }
    for wrong in (0, True, "many"):
        with pytest.raises(ValueError, match="limit must be"):
            export(CollectorRegistry(), limit=wrong)  # type: ignore[arg-type]


def test_the_page_lists_every_metric_as_it_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "telemetry.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.about} |" for each in telemetry.METRICS
    ]
