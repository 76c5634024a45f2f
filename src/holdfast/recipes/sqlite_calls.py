"""The calls of recipes on SQLite. What they take are leases, so they are volatile, and end in the calls of leases."""

from __future__ import annotations

from typing import Any

from holdfast.database.sqlite_calls import Rows, Run, call
from holdfast.lease.sqlite_calls import lease_abandon, lease_release, lease_take, refuse_take, refuses
from holdfast.names import SLOT


@call(volatile=True, answer=refuses("guard"))
def guard_acquire(run: Run, **terms: Any) -> Rows:
    return lease_take(run, "guard", **terms)


@call(volatile=True, answer=refuses("elector"))
def elector_acquire(run: Run, **terms: Any) -> Rows:
    return lease_take(run, "elector", **terms)


@call(volatile=True, answer=refuses("gate"))
def gate_acquire(run: Run, **terms: Any) -> Rows:
    return lease_take(run, "gate", **terms)


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
    return lease_abandon(run, slots[0]["name"], token)


@call(volatile=True, answer=_not_held)
def slot_release(run: Run, name: str, token: str) -> Rows:
    """``name`` is the pool's."""
    slots = run("slot.held", pool=name, token=token)
    if not slots:  # it has just expired
        return [{"done": 0}]
    return lease_release(run, slots[0]["name"], token)
