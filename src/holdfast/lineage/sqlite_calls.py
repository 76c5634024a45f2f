"""The calls of relays on SQLite. All but that of the lease are durable: an event that was published twice would be the
cost of a loss.

``horizon`` is for PostgreSQL alone: there transactions do not commit in the order of their rows.
"""

from __future__ import annotations

from typing import Any

from holdfast.database.sqlite_calls import Rows, Run, call, changes
from holdfast.lease.sqlite_calls import lease_take, refuses


@call(volatile=True, answer=refuses("relay"))
def relay_acquire(run: Run, **terms: Any) -> Rows:
    return lease_take(run, "relay", **terms)


def _fenced(run: Run, name: str, lease: str, token: str, **_: Any) -> Rows:
    return [] if run("relay.lease", name=name, lease=lease, token=token) else [{"state": "fenced"}]


@call(answer=_fenced)
def relay_open(run: Run, name: str, **_: Any) -> Rows:
    run("relay_open.insert", name=name)
    return run("relay_open.cursor", name=name)


@call(answer=_fenced)
def relay_begin(run: Run, name: str, tries: str, **_: Any) -> Rows:
    run("relay_begin.tries", name=name, tries=tries)
    return [{"state": "begun"}]


def _not_movable(run: Run, name: str, lease: str, token: str, place: int, **_: Any) -> Rows:
    """``gone``: the relay was removed, or an older copy of the file has lost the row at the cursor."""
    if fenced := _fenced(run, name, lease, token):
        return fenced
    return [] if run("relay_move.relay", name=name, place=place) else [{"state": "gone"}]


@call(answer=_not_movable)
def relay_move(run: Run, name: str, ended: str, parked: str, freed: str, **cursor: Any) -> Rows:
    """``ended``, ``parked`` and ``freed`` are JSON arrays, ``cursor`` the other columns of the relay."""
    run("relay_move.cursor", name=name, **cursor)
    run("relay_move.published", ended=ended)
    run("relay_move.unparked", name=name, freed=freed)
    run("relay_move.parked", name=name, parked=parked)
    return [{"state": "moved"}]


@call()
def relay_retry(run: Run, name: str, id: str | None = None) -> Rows:
    run("relay_retry.update", name=name, id=id)
    return [{"asked": changes(run)}]


@call()
def relay_remove(run: Run, name: str, actor: str, reason: str) -> Rows:
    run("relay_remove.audit", name=name, actor=actor, reason=reason)
    run("relay_remove.parked", name=name)
    run("relay_remove.relay", name=name)
    return [{"removed": changes(run)}]
