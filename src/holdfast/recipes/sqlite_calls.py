"""The calls of recipes on SQLite. What they take are leases, so they are volatile, and end in the calls of leases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.database.sqlite_calls import Rows, Run, call
from holdfast.lease.sqlite_calls import lease_abandon, lease_release, lease_take, lease_take_away, refuse_take, refuses
from holdfast.names import GATE, SLOT


@call(volatile=True, answer=refuses("guard"))
def guard_acquire(run: Run, **terms: Any) -> Rows:
    return lease_take(run, "guard", **terms)


@call(volatile=True, answer=refuses("elector"))
def elector_acquire(run: Run, **terms: Any) -> Rows:
    return lease_take(run, "elector", **terms)


@call(volatile=True, answer=refuses("gate"))
def gate_acquire(run: Run, **terms: Any) -> Rows:
    return lease_take(run, "gate", **terms)


@call()
def gate_open(
    run: Run, name: str, seconds: float, actor: str, reason: str, token: str, process: Mapping[str, Any] | None = None
) -> Rows:
    """``gate_acquire`` for a time, by a lease that is not renewed. The audit has an entry for a gate that is opened,
    and for one that is held already."""
    entry = {"name": name, "actor": actor, "reason": reason, "detail": json.dumps({"for": seconds})}
    process = {**(process or {}), "info": {"for": seconds, "reason": reason[:500]}}
    lease: dict[str, Any] = {"name": f"{GATE}{name}", "holder": actor, "token": token, "process": process}
    if rows := refuse_take(run, "gate", **lease):
        if rows[0]["status"] == "held":
            why = f"it is held by {rows[0]['held_by'][:180]}"
            run("gate.refused", action="gate_open", why=why, fence=None, **entry)
        return rows
    [granted] = lease_take(run, "gate", **lease, ttl=seconds, at_least=0.0, solo=True)
    run("gate_open.audit", fence=granted["fence"], **entry)
    return [granted]


@call()
def gate_close(run: Run, name: str, actor: str, reason: str) -> Rows:
    """Answers closed, not_open or window: only the block that opened a window closes it. The audit has an entry for
    each."""
    entry, lease = {"name": name, "actor": actor, "reason": reason}, f"{GATE}{name}"
    opened = next(iter(run("gate_close.opened", lease=lease)), None)
    if opened is None or opened["is_window"]:
        why = "it is not open" if opened is None else f"a window of {opened['holder'][:180]}"
        fence = None if opened is None else opened["fence"]
        run("gate.refused", action="gate_close", why=why, fence=fence, detail=None, **entry)
        return [{"answer": "not_open" if opened is None else "window"}]
    run("gate_close.audit", lease=lease, **entry)
    lease_take_away(run, lease, actor, reason)
    return [{"answer": "closed"}]


def _refuse_claim(run: Run, pool: str, capacity: int, token: str, **_: Any) -> Rows:
    prefix = f"{SLOT}{pool}"
    rows = run("slot_claim.granted_before", pool=prefix, token=token)
    return rows or run("slot_claim.full", pool=prefix, capacity=capacity)


@call(volatile=True, answer=_refuse_claim)
def slot_claim(run: Run, pool: str, capacity: int, **terms: Any) -> Rows:
    """Acquire the lease of the lowest free slot. ``terms`` are those of ``lease_take``, in which the name is the
    pool's."""
    [slot] = run("slot_claim.lowest_free", pool=f"{SLOT}{pool}", capacity=capacity)
    terms["name"] = slot["name"]
    if refusal := refuse_take(run, "slot", **terms):
        return refusal
    lease_take(run, "slot", **terms)
    return run("slot_claim.granted", name=slot["name"])


def _not_held(run: Run, name: str, token: str) -> Rows:
    return [] if run("slot.held", pool=name, token=token) else [{"done": 0}]


@call(volatile=True, answer=_not_held)
def slot_abandon(run: Run, name: str, token: str) -> Rows:
    """``name`` is the pool's."""
    slots = run("slot.held", pool=name, token=token)
    if not slots:  # it has just expired
        return [{"done": 0}]
    return lease_abandon(run, slots[0]["name"])


@call(volatile=True, answer=_not_held)
def slot_release(run: Run, name: str, token: str) -> Rows:
    """``name`` is the pool's."""
    slots = run("slot.held", pool=name, token=token)
    if not slots:  # it has just expired
        return [{"done": 0}]
    return lease_release(run, slots[0]["name"])
