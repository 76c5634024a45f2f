"""The pure rules behind the pages: tables, timelines, trees of waiters, commands to copy, explanations."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.dashboard.actions import command_line
from holdfast.dashboard.explanation import NamedRecords, explain
from holdfast.dashboard.formats import truncate
from holdfast.dashboard.tables import PAGE_ROWS, PageCell, PageColumn, listing
from holdfast.dashboard.things import build_tree
from holdfast.dashboard.timeline import HOUR, WIDTH, build_timeline

NOW = 1_800_000_000.0


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(NOW + seconds, UTC)


def grant(began: float, ended: float, outcome: str = "released", fence: int = 1) -> Any:
    return SimpleNamespace(
        name="job", holder=f"worker-{fence}", fence=fence, acquired_at=at(began), ended_at=at(ended), outcome=outcome,
        actor="jane" if outcome == "forced" else None, reason="gone" if outcome == "forced" else None,
    )  # fmt: skip


def rows(count: int, **query: str) -> Any:
    columns = (PageColumn("Name"), PageColumn("Fence", is_number=True))
    return listing(
        "Leases", columns, range(count), lambda number: [PageCell(f"job-{number}"), PageCell(number=-number)],
        "/leases", query, empty="none",
    )  # fmt: skip


def test_a_list_is_paged_filtered_and_sorted() -> None:
    first = rows(120)
    assert [row[0].text for row in first["rows"]] == [f"job-{number}" for number in range(PAGE_ROWS)]
    assert first["note"] == "120 rows"
    assert [row[0].text for row in rows(120, page="3")["rows"]] == [f"job-{number}" for number in range(100, 120)]
    assert [row[0].text for row in rows(12, sort="-name")["rows"]][:3] == ["job-11", "job-10", "job-9"]
    assert next(row[0].text for row in rows(12, sort="fence")["rows"]) == "job-11"
    assert [row[0].text for row in rows(120, q="JOB-11 -115")["rows"]] == ["job-115"]
    assert rows(120, q="none of these")["empty"] == "No row contains these words."
    assert rows(1)["note"] == "1 row"


@pytest.mark.parametrize("page", ["0", "-1", "99", "x", "\u0663", "9" * 400])
def test_a_page_that_does_not_exist_is_one_that_does(page: str) -> None:
    assert rows(120, page=page)["rows"]


def test_a_timeline_ends_now_and_draws_losses_above_the_next_grant() -> None:
    ended = [grant(-60, -30, "released", 3), grant(-1800, -60, "forced", 2), grant(-7200, -3700, "expired", 1)]
    live = SimpleNamespace(name="job", holder="worker-4", fence=4, acquired_at=at(-20))
    panel = build_timeline(["job", "unknown"], [live], ended, NOW, HOUR)
    [row] = panel["rows"]
    assert [bar["fence"] for bar in row["bars"]] == [3, 4, 2], "the oldest ended before the window"
    forced = row["bars"][-1]
    assert (forced["by"], forced["outcome"]) == ("jane: gone", "forced")
    assert 480 < forced["width"] < 490
    assert all(bar["x"] >= 0 and bar["x"] + bar["width"] <= WIDTH for bar in row["bars"])
    assert row["summary"] == "3 grants, 3 holders, last worker-4; ended as forced"
    assert build_timeline(["job"], [live], ended, NOW + 5, HOUR) == build_timeline(["job"], [live], ended, NOW, HOUR)
    assert build_timeline(["job"], [live], ended, NOW, HOUR, is_cut=True)["since"] is None
    assert build_timeline(["job"], [live], ended[:1], NOW, HOUR, is_cut=True)["since"] == NOW - 30


def lock(pid: int, *behind: int) -> Any:
    return SimpleNamespace(
        pid=pid, holder=f"host:{pid}", application_name="", granted=not behind, mode="exclusive", duration=3.0,
        blocked_by=behind,
    )  # fmt: skip


def test_a_waiter_stands_below_the_last_session_before_it() -> None:
    [root] = build_tree([lock(1), lock(2, 1), lock(3, 1, 2), lock(4, 1, 2, 3)], {1: "another"}, NOW)
    chain, node = [root["pid"]], root
    while node["children"]:
        [node] = node["children"]
        chain.append(node["pid"])
    assert chain == [1, 2, 3, 4]
    assert root["waits_for"] == "another"
    assert [root["pid"] for root in build_tree([lock(2, 9)], {}, NOW)] == [2], "its holder is not visible"
    deadlock = build_tree([lock(2, 3), lock(3, 2)], {}, NOW)
    assert [root["pid"] for root in deadlock] == [2], "a cycle ends"


def test_a_command_is_quoted_for_a_shell() -> None:
    assert command_line("lease.release", {"name": "a b"}, "it's gone") == (
        """holdfast do lease.release 'a b' --reason 'it'"'"'s gone'"""
    )
    assert command_line("lease.release", {"name": "-x"}, "gone") == "holdfast do lease.release --reason gone -- -x"
    assert command_line("leader.resign", {"name": "x", "wait": "5"}, "r") == (
        "holdfast do leader.resign x --wait 5 --reason r"
    )


def test_a_long_name_loses_its_middle() -> None:
    assert truncate("short") == "short"
    shortened = truncate(f"{'a' * 100}{'b' * 100}")
    assert (len(shortened), shortened[0], shortened[-1]) == (64, "a", "b")


def run(**more: Any) -> Any:
    return SimpleNamespace(**{
        "status": "success", "attempt": 1, "failures": 0, "updated_at": at(-5), "error": None, "rollback": None,
        "expires_at": None, **more
    })  # fmt: skip


def schedule(every: str, zone: str | None = None, slot: float = 1798761600) -> Any:
    last = SimpleNamespace(slot=datetime.fromtimestamp(slot, UTC), status="success", attempt=1)
    return SimpleNamespace(every=every, zone=zone, paused=None, running=(), next_slot=None, overdue=0.0, last=last)


def live(**info: Any) -> Any:
    return SimpleNamespace(
        name="job", holder="worker-1", host=None, pid=None, fence=1, acquired_at=at(-60), expires_at=at(20), info=info,
        waiting=0,
    )  # fmt: skip


EXPLAINED: list[tuple[dict[str, Any], str]] = [
    ({"ended": [grant(-60, -30, "expired")]}, "its holder stopped renewing it"),
    ({"ended": [grant(-60, -30, "forced")]}, "an operator took it away (jane: gone)"),
    ({"operation": run()}, "A run with this key is replayed"),
    ({"operation": run()}, "A run with this key and another payload is refused."),
    ({"operation": run(expires_at=at(1))}, "A run with this key is replayed"),
    ({"operation": run(expires_at=at(-1))}, "Its result has expired, so the next run executes the function again."),
    ({"operation": run(status="failure", error={"remembered": True, "message": "no"})}, "every run is refused with it"),
    (
        {"operation": run(status="failure", error={"reset": True, "actor": "jane"})},
        "jane reset it. The next run executes",
    ),
    ({"lease": live(ttl=30.0)}, "Each heartbeat extends it. Without one it is free in 20 s."),
    ({"lease": live(ttl=86400.0)}, "Each heartbeat extends it."),
    ({"lease": live(ttl=30.0, failover="session")}, "Each heartbeat extends it."),
    ({"lease": live(ttl=86400.0, failover="session")}, "It ends with its process."),
    ({"operation": run(status="running")}, "Another run waits for its result, or is skipped or refused"),
    ({"operation": run(status="partial", rollback="unpublish")}, "The next run undoes it with unpublish"),
    ({"operation": run(status="failure", failures=2)}, "It has failed 2 times"),
    ({"operation": run(status="undone")}, "executes the function again"),
    (
        {"operation": run(status="failure", error={"type": "KeyError", "message": "'row'"})},
        "Its error: KeyError: 'row'",
    ),
    ({"operation": run(status="failure", error={"type": "KeyError", "message": ""})}, "Its error: KeyError"),
    ({"capacity": 4}, "0 of 4 slots are held."),
    ({"pool": [SimpleNamespace(waiting=0)]}, "1 slot is held."),
    ({"schedule": schedule("86400 s")}, "It has a slot every 86400 s. The last slot, 2027-01-01 00:00:00 UTC: done"),
    ({"schedule": schedule("0 3 * * *", "UTC")}, "It has a slot at each time of '0 3 * * *' in UTC."),
    ({"schedule": schedule("once", slot=0)}, "It runs once ever. The last slot, once: done in attempt 1."),
]


@pytest.mark.parametrize(("records", "sentence"), EXPLAINED)
def test_a_state_is_explained(records: dict[str, Any], sentence: str) -> None:
    [finding] = explain(NamedRecords("job", NOW, **records))
    assert sentence in " ".join(finding.sentences)
    assert explain(NamedRecords("job", NOW)) == []
