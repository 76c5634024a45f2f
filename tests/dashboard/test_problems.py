"""What the dashboard holds to be a problem, and what it does not; and how things are said."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import commands
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


def acknowledged(snapshot: Snapshot, ago: float = 0.0, **more: Any) -> Snapshot:
    """The same, in which all problems were acknowledged ``ago`` seconds ago."""
    fingerprints = ",".join(each for problem in find_problems(snapshot) for each in problem.fingerprints)
    entry = SimpleNamespace(**{
        "id": 4, "at": at(-ago), "actor": "jane", "reason": "known", "outcome": "done",
        "detail": {"parameters": {"problem": "x", "fingerprints": fingerprints}}, **more,
    })  # fmt: skip
    return replace(snapshot, acknowledged=[entry])


def open_titles(snapshot: Snapshot) -> list[str]:
    return [problem["title"] for problem in build_panels(snapshot)["problems"]["problems"]]


@pytest.mark.parametrize(("seen", "titles"), [each for each in FOUND if each[1]])
def test_what_is_acknowledged_is_folded_away_unless_the_database_cannot_record_it(
    seen: dict[str, Any], titles: list[str]
) -> None:
    snapshot = acknowledged(Snapshot(NOW, **seen))
    folded = build_panels(snapshot)["problems"]["acknowledged"]
    if seen.keys() & {"trouble", "unmigrated"}:
        assert (open_titles(snapshot), folded) == (titles, [])
        return
    assert [problem["title"] for problem in folded] == titles
    assert open_titles(snapshot) == []
    for problem in folded:
        assert problem["acknowledged"][1:3] == ("jane", "known")


def test_it_comes_back_when_what_it_says_changes_and_not_with_its_age() -> None:
    before = acknowledged(Snapshot(NOW, ended=[ended("expired", ago=60), ended("expired", ago=80, name="other")]))
    assert open_titles(replace(before, at=NOW + 600)) == []
    assert open_titles(replace(before, ended=before.ended[:1])) == [], "one of them is over"
    third = ended("expired", ago=60, name="third")
    assert open_titles(replace(before, ended=[*before.ended, third])) == ["3 leases were lost in the last 15 minutes"]
    for other in (ended("forced", ago=60, actor="joe"), ended("expired", ago=-30)):
        assert open_titles(replace(before, ended=[other])), "it was lost otherwise, or again"
    parked = acknowledged(Snapshot(NOW, relays=[relay(parked=2)]))
    assert open_titles(parked) == []
    assert open_titles(replace(parked, relays=[relay(parked=3)])) == ["A relay has events that its sink refused"]


def test_only_an_acknowledgement_that_was_done_counts_and_the_newest_is_shown() -> None:
    before = Snapshot(NOW, unfinished=[operation("partial")])
    others: tuple[dict[str, Any], ...] = (
        {"outcome": "refused: no"},
        {"outcome": None},
        {"detail": None},
        {"detail": {"parameters": []}},
    )
    for refused in others:
        assert open_titles(acknowledged(before, **refused)), refused
    assert open_titles(acknowledged(before, ago=60)), "it was acknowledged before it began"
    first = acknowledged(before)
    newest = acknowledged(before, id=9, actor="joe").acknowledged
    [problem] = find_problems(replace(first, acknowledged=[*newest, *first.acknowledged]))
    assert problem.acknowledged is not None
    assert (problem.acknowledged.actor, problem.acknowledged.entry) == ("joe", 9)


def test_a_problem_of_many_subjects_has_one_fingerprint() -> None:
    leases = [lease(f"l{n}", left=1) for n in range(101)]
    snapshot = acknowledged(Snapshot(NOW, leases=leases))
    [problem] = find_problems(snapshot)
    assert len(problem.fingerprints) == 1
    assert open_titles(snapshot) == []
    assert open_titles(replace(snapshot, leases=[*leases, lease("l101", left=1)])) == ["102 heartbeats are late"]
    [most] = find_problems(Snapshot(NOW, leases=leases[1:]))
    assert (
        len(",".join(most.fingerprints))
        <= commands.commands()["problem.acknowledge"].parameters["fingerprints"].maximum
    )


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
