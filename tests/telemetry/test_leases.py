"""What is told of leases, and that gauges are what is so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast import telemetry
from tests.children import PATIENCE, eventually
from tests.telemetry.conftest import pairs

Connect = Callable[..., Any]


def held() -> float:
    return telemetry.readings().get("leases_held", 0.0)


def names(told: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [event for event, _ in told if event.startswith("lease.")]


@pairs
def test_coming_and_going_are_told_once_each(connect: Connect, either: str, told: Any) -> None:
    client, before = connect(either), held()
    with client.lease("a"):
        assert held() == before + 1
        assert client.lease("a", holder="other").try_acquire() is None
    grant = client.lease("b").acquire()
    grant.release()
    grant.release()
    assert held() == before
    assert names(told) == [
        "lease.acquired", "lease.refused", "lease.ended", "lease.acquired", "lease.ended",
    ]  # fmt: skip
    assert {fields["kind"] for event, fields in told if event.startswith("lease.")} == {"lease"}
    assert all(fields["held"] >= 0 for event, fields in told if event == "lease.ended")


@pairs
def test_a_loss_is_told_once_with_its_reason_and_leaves_the_gauge(connect: Connect, either: str, told: Any) -> None:
    client, before = connect(either), held()
    grant = client.lease("a", ttl=600, renew_every=0.1).acquire()
    client.leases.force_release("a", actor="op", reason="test")
    eventually(lambda: grant.lost, "the loss to be learned")
    assert held() == before
    grant.release()
    lost = [fields for event, fields in told if event == "lease.lost"]
    assert lost == [{"kind": "lease", "reason": "LeaseLost"}]
    assert names(told).count("lease.ended") == 1


@pairs
def test_a_takeover_is_told_to_whoever_took_it(connect: Connect, either: str, told: Any) -> None:
    client = connect(either)
    client.lease("a", ttl=0.05, auto_renew=False).acquire()
    client.lease("a", holder="heir", timeout=PATIENCE).acquire()
    assert [fields for event, fields in told if event == "lease.taken_over"] == [{"kind": "lease"}]
    [_, waited] = [fields["waited"] for event, fields in told if event == "lease.acquired"]
    assert waited > 0


@pairs
def test_slots_are_a_kind_of_their_own_and_violations_are_counted(connect: Connect, either: str, told: Any) -> None:
    client = connect(either)
    slots = client.slots("pool", capacity=2)
    grant = slots.claim(owner="s1")
    assert slots.reconcile([{"id": "s1", "slot": grant.slot, "terminal": False}]) == 1
    assert telemetry.readings()["slots_in_use"] >= 1
    slots.reconcile([{"id": "s2", "slot": grant.slot, "terminal": False}])
    assert {fields["kind"] for event, fields in told if event == "lease.acquired"} == {"slot"}
    counted = {kind: number for kind, number in slots.invariant_violation_total.items() if number}
    kinds = [fields["kind"] for event, fields in told if event == "slots.violation"]
    assert {kind: kinds.count(kind) for kind in kinds} == counted != {}


@pairs
def test_the_heartbeat_is_told_and_its_age_read(connect: Connect, either: str, told: Any) -> None:
    client, before = connect(either), time.monotonic()
    client.lease("a", ttl=600, renew_every=0.05).acquire()
    eventually(lambda: [f for e, f in told if e == "keeper.beat"], "a heartbeat")
    [first, *_] = [fields for event, fields in told if event == "keeper.beat"]
    assert first["outcome"] == "renewed"
    assert 0 <= telemetry.readings()["heartbeat_age_seconds"] <= time.monotonic() - before


@pairs
def test_who_waits_is_counted(connect: Connect, either: str) -> None:
    client, before = connect(either), telemetry.readings().get("lease_waiters", 0.0)
    grant = client.lease("a").acquire()
    waiter = threading.Thread(target=lambda: client.lease("a", holder="other", timeout=600).acquire())
    waiter.start()
    eventually(lambda: telemetry.readings()["lease_waiters"] == before + 1, "somebody to wait")
    grant.release()
    waiter.join()
    assert telemetry.readings()["lease_waiters"] == before


def test_an_elector_tells_what_becomes_of_it(sqlite_url: str, told: Any) -> None:
    with holdfast.Client(sqlite_url) as client:
        elector = client.elector("x")
        before = telemetry.readings().get("electors_leading", 0.0)

        def work(term: Any) -> None:
            assert telemetry.readings()["electors_leading"] == before + 1

        elector.run(work)
        assert telemetry.readings()["electors_leading"] == before
    assert [fields["to"] for event, fields in told if event == "elector.changed"] == ["leading", "released"]


def test_a_listener_that_fails_harms_nobody(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: str, fields: dict[str, Any]) -> None:
        raise RuntimeError("broken")

    stop = telemetry.listen(fail)
    try:
        with holdfast.Client(sqlite_url) as client, client.lease("a") as grant:
            grant.check()
    finally:
        stop()
    assert "a listener failed on lease.acquired" in caplog.text


def test_a_fork_has_nothing_of_what_its_parent_holds(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client, client.lease("a"):
        assert held() >= 1
        child = os.fork()
        if child == 0:
            os._exit(int(held()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
