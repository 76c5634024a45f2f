"""What the dashboard holds to be a problem, and what it does not; and how things are said."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.dashboard import formats
from holdfast.dashboard.panels import build_panels
from holdfast.dashboard.problems import find_problems
from holdfast.dashboard.snapshot import Snapshot

NOW = 1_800_000_000.0


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(NOW + seconds, UTC)


def lease(name: str = "job", left: float = 20.0, **info: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, holder="worker-1", fence=7, host="h", pid=1, acquired_at=at(-60), expires_at=at(left),
        info={"ttl": 30.0} | info, kind="plain",
    )  # fmt: skip


def ended(outcome: str, ago: float = 10.0, name: str = "job", actor: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        holder="worker-1",
        outcome=outcome,
        ended_at=at(-ago),
        actor=actor,
        reason="why" if actor else None,
        acquired_at=at(-ago - 60),
        fence=3,
    )


def lock(waited: float, *, granted: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        label="(agent, 7)", namespace="agent", entity_id=7, name=None, pid=8, holder="host:8", application_name="app",
        granted=granted, duration=waited, waiting=1,
        blocked_by=(9,),
    )  # fmt: skip


def relay(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{
        "name": "catalogue", "holder": "w", "entries": 0, "lag": 0.0, "parked": 0, "problem": None, **more
    })  # fmt: skip


def operation(status: str) -> SimpleNamespace:
    return SimpleNamespace(key="k", label="load", status=status, attempt=1, dataset=None, error=None, updated_at=at(-5))


def sandbox(payload: Any) -> SimpleNamespace:
    return SimpleNamespace(id="sb-1", name=None, payload=payload, updated_at=at(-5))


def review() -> SimpleNamespace:
    return SimpleNamespace(id=3, label="load", reason="attempts", detail="tried 3 times", opened_at=at(-5))


FAILED = {"status": {"phase": "Error", "conditions": [{"type": "Ready", "status": False, "message": "exited with 1"}]}}
FOUND: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"trouble": "no route"}, ["The database does not answer"]),
    ({"unmigrated": "at 0"}, ["The tables are missing, or not those of this version"]),
    ({"elector": "gateway:reconciler"}, ["There is no leader"]),
    ({"elector": "gateway:reconciler", "leases": [lease("gateway:reconciler")]}, []),
    ({"elector": "gateway:reconciler", "trouble": "no route"}, ["The database does not answer"]),
    ({"leases": [lease(left=9.3)]}, []),
    ({"leases": [lease(left=8.9)]}, ["A heartbeat is late"]),
    ({"leases": [lease(left=8.9), lease("other", left=1)]}, ["2 heartbeats are late"]),
    ({"leases": [lease("@gate:x", left=1, **{"for": 60})]}, []),
    ({"leases": [lease(left=1)], "trouble": "no route"}, ["The database does not answer"]),
    ({"ended": [ended("released"), ended("reentered"), ended("expired", ago=901)]}, []),
    ({"ended": [ended("expired", name="@gate:x")]}, []),
    ({"ended": [ended("expired", name="@slot:default:1")]}, []),
    ({"ended": [ended("expired", ago=899)]}, ["A lease was lost in the last 15 minutes"]),
    ({"ended": [ended("forced", actor="jane"), ended("session_lost")]}, ["2 leases were lost in the last 15 minutes"]),
    ({"locks": [lock(4.9), lock(60, granted=True)]}, []),
    ({"locks": [lock(5.1)]}, ["A session has waited too long for a lock"]),
    ({"relays": [relay(lag=59, entries=3)]}, []),
    ({"relays": [relay(lag=61, holder=None)]}, ["A relay is behind"]),
    ({"relays": [relay(problem="down")]}, ["A relay is behind"]),
    ({"relays": [relay(parked=2)]}, ["A relay has events that its sink refused"]),
    ({"unfinished": [operation("running")]}, []),
    ({"unfinished": [operation("partial")]}, ["An operation was interrupted"]),
    ({"reviews": [review()]}, ["A review is open"]),
    ({"violations": {("default", "wrong_owner"): (2, NOW - 901)}}, []),
    ({"violations": {("default", "wrong_owner"): (2, NOW - 5)}}, ["Slots and sessions of a pool disagree"]),
    ({"sandboxes": [sandbox({"status": {"phase": "Ready"}}), sandbox("odd"), sandbox(None)]}, []),
    ({"sandboxes": [sandbox(FAILED)]}, ["A sandbox has failed"]),
]


@pytest.mark.parametrize(("seen", "titles"), FOUND)
def test_what_is_wrong_is_found_and_nothing_else(seen: dict[str, Any], titles: list[str]) -> None:
    snapshot = Snapshot(NOW, **seen)
    assert [each.title for each in find_problems(snapshot)] == titles
    assert build_panels(snapshot)["problems"]["count"] == len(titles)
    later = build_panels(Snapshot(NOW + 0.2, **seen))
    assert later == build_panels(snapshot), "while nothing happens, nothing is told anew"


def test_the_worst_comes_first_and_the_rest_is_counted() -> None:
    snapshot = Snapshot(NOW, leases=[lease(f"l{n}", left=1) for n in range(9)], unfinished=[operation("partial")])
    worst, late = find_problems(snapshot)
    assert (worst.level, late.level) == ("critical", "warning")
    assert (len(late.subjects), late.more) == (5, 4)
    assert all(each.remedy for each in (worst, late))


def test_spans_are_said_as_the_script_says_them() -> None:
    said = {0.9: "0 s", -3: "0 s", 59.9: "59 s", 61: "1 m 01 s", 3661: "1 h 01 m", 90000: "1 d 1 h", None: "?"}
    assert {seconds: formats.format_span(seconds) for seconds in said} == said
    assert formats.format_number(12345) == "12\u202f345"


@pytest.mark.parametrize("payload", [None, "text", 7, [], {"status": "odd"}, {"status": {"conditions": "odd"}}, b"raw"])
def test_a_record_may_be_anything(payload: Any) -> None:
    found = build_panels(
        Snapshot(NOW, sandboxes=[sandbox(payload)], agents=[sandbox(payload)], sessions=[sandbox(payload)])
    )
    assert found["sandboxes"]["rows"][0]["state"] == "Provisioning"
    assert found["agents"]["rows"][0]["state"] == "unknown"
