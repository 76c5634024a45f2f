"""The calls of schedules on SQLite. All are durable: a slot that is lost in a crash would run again."""

from __future__ import annotations

import json
import random
from typing import Any

from holdfast.database.sqlite_calls import Rows, Run, call, changes


@call()
def schedule_change(run: Run, name: str, expected: int, every: str, zone: str | None) -> Rows:
    run("schedule_change.update", name=name, expected=expected, every=every, zone=zone)
    return [{"changed": bool(changes(run))}]


def _not_free(
    run: Run, name: str, expected: int, cursor: int, skips: str, slot: int | None, overlap: int, **_: Any
) -> Rows:
    rows = run(
        "schedule_advance.state", name=name, expected=expected, cursor=cursor, skips=skips or None, slot=slot,
        overlap=overlap,
    )  # fmt: skip
    return [row for row in rows if row["state"] != "free"]


@call(answer=_not_free)
def schedule_advance(
    run: Run, name: str, expected: int, cursor: int, skips: str, slot: int | None, overlap: int, owner: str
) -> Rows:
    """``skips`` is a JSON array of [first, last, count, reason]."""
    for first, last, count, reason in json.loads(skips or "[]"):
        skipped = {"name": name, "last": last, "count": count, "reason": reason}
        run("schedule_advance.extend", **skipped, expected=expected)
        if not changes(run):
            run("schedule_advance.skip", **skipped, first=first, owner=owner)
    state = "done"
    if slot is not None:
        run("schedule_advance.open", name=name, slot=slot, owner=owner)
        state = "taken" if changes(run) else "skipped"
        if random.random() < 0.02:
            run("schedule_advance.trim", name=name)
    run("schedule_advance.cursor", name=name, cursor=cursor)
    [row] = run(
        "schedule_advance.state", name=name, expected=cursor, cursor=cursor, skips=None, slot=None, overlap=overlap
    )
    return [{**row, "state": state}]


@call()
def schedule_take(run: Run, name: str, slot: int, owner: str) -> Rows:
    attempts = run("schedule_take.update", name=name, slot=slot, owner=owner)
    [row] = run("schedule_take.previous", name=name, slot=slot)
    return [{**row, "attempt": attempts[0]["attempt"] if attempts else None}]


@call()
def schedule_settle(
    run: Run, name: str, slot: int, attempt: int, status: str, reason: str | None = None, note: str | None = None
) -> Rows:
    """``status`` "open" puts a failed slot back."""
    if status == "open":
        run("schedule_settle.reopen", name=name, slot=slot, attempt=attempt)
    else:
        run(
            "schedule_settle.close", name=name, slot=slot, attempt=attempt, status=status, reason=reason, note=note
        )  # fmt: skip
    return [{"settled": bool(changes(run))}]


def _audit(run: Run, action: str, name: str, actor: str, reason: str, detail: str | None = None) -> None:
    run("schedule.audit", action=action, name=name, actor=actor, reason=reason, detail=detail)


@call()
def schedule_pause(run: Run, name: str, paused: bool, actor: str, reason: str) -> Rows:
    run("schedule_pause.update", name=name, paused=paused, actor=actor, reason=reason)
    if not changes(run):
        return [{"done": False}]
    _audit(run, "schedule_pause" if paused else "schedule_resume", name, actor, reason)
    return [{"done": True}]


@call()
def schedule_order(run: Run, name: str, slot: int | None, actor: str, reason: str) -> Rows:
    """Skip a slot, or with None open one now."""
    rows = run("schedule_order.known", name=name)
    rows = rows and run("schedule_order.insert", name=name, slot=slot, actor=actor, reason=reason)
    if not rows:
        return [{"slot": None}]
    detail = json.dumps({"slot": rows[0]["slot"]})
    _audit(run, "schedule_run" if slot is None else "schedule_skip", name, actor, reason, detail)
    return rows


@call()
def schedule_remove(run: Run, name: str, actor: str, reason: str) -> Rows:
    run("schedule_remove.slots", name=name)
    run("schedule_remove.schedule", name=name)
    if not changes(run):
        return [{"done": False}]
    _audit(run, "schedule_remove", name, actor, reason)
    return [{"done": True}]
