"""The calls of leases on SQLite.

They are volatile, because a lease is void after a crash of the machine: its holders are gone with it, and the first
session of a new boot raises the fence. Durable are those that record what an operator did.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from holdfast.database.sqlite_calls import Function, Rows, Run, call, changes
from holdfast.errors import Refused
from holdfast.names import Kind, kind_error


def _done(is_done: object) -> Rows:
    return [{"done": 1 if is_done else 0}]


INVALID = "22023"


def refuses(kind: Kind) -> Function:
    """The ``answer`` of a call that takes a lease of this kind."""

    def refuse(run: Run, **terms: Any) -> Rows:
        return refuse_take(run, kind, **terms)

    return refuse


def refuse_take(
    run: Run,
    kind: Kind,
    name: str,
    holder: str,
    token: str,
    beat: str | None = None,
    reenter: str | None = None,
    process: Mapping[str, Any] | None = None,
    **_: Any,
) -> Rows:
    """The answer to an acquire that changes nothing: granted before, held by another, or its beat is lost. Refused when
    the name is not one of this kind."""
    if problem := kind_error(kind, name):
        raise Refused(problem, INVALID)
    if rows := run("lease_take.granted_before", name=name, token=token):
        return rows
    if rows := run("lease_take.held", name=name, holder=holder, reenter=reenter):
        return rows
    if beat is not None and (rows := run("lease_take.beat_lost", beat=beat, label=(process or {}).get("label"))):
        return rows
    return []


@call(volatile=True, answer=refuses("plain"))
def lease_acquire(run: Run, **terms: Any) -> Rows:
    return lease_take(run, "plain", **terms)


def lease_take(
    run: Run,
    kind: Kind,
    name: str,
    holder: str,
    ttl: float,
    token: str,
    beat: str | None = None,
    reenter: str | None = None,
    at_least: float | None = None,
    solo: bool | None = None,
    session_key: int | None = None,
    process: Mapping[str, Any] | None = None,
) -> Rows:
    """Take a lease of any kind. Only the calls of the kinds call it, after ``refuse_take`` has let it pass."""
    former = next(iter(run("lease_take.former", name=name, beat=beat)), None)
    [row] = run("lease_take.fence")
    status, held_by = "acquired", None
    if former is not None:
        is_reentered, held_by = former["outcome"] == "reentered", former["holder"]
        status = "reentered" if is_reentered else "taken_over"
        run("lease_take.history", name=name, outcome=former["outcome"])
        run("beat.delete_solo", beat=former["beat"])
        run("lease_take.leave_beat", beat=former["beat"], dead=not is_reentered)
    beat = os.urandom(16).hex() if beat is None else beat
    columns = _columns(process or {})
    run("lease_take.beat", beat=beat, holder=holder, ttl=ttl, solo=solo, session_key=session_key, **columns)
    run(
        "lease_take.lease",
        name=name, kind=kind, holder=holder, beat=beat, token=token, fence=row["fence"], at_least=at_least,
        reenter=reenter,
    )  # fmt: skip
    return run("lease_take.granted", name=name, status=status, held_by=held_by)


def _columns(process: Mapping[str, Any]) -> dict[str, Any]:
    """What a listing shows of a process."""
    columns = {column: process.get(column) for column in ("label", "host", "pid", "started", "info")}
    if isinstance(columns["info"], Mapping):
        import json  # here: rarely needed, and every start would pay for it

        columns["info"] = json.dumps(columns["info"])
    return columns


def _not_alive(run: Run, name: str, token: str) -> Rows:
    return [] if run("lease.alive", name=name, token=token) else _done(False)


@call(volatile=True, answer=_not_alive)
def lease_renew(run: Run, name: str, token: str) -> Rows:
    """Whether it was renewed is for the update to say: the clock goes on after the answer."""
    return _done(run("lease_renew.beat", name=name, token=token))


def _not_stored(run: Run, name: str, token: str, **_: Any) -> Rows:
    return [] if run("lease.stored", name=name, token=token) else _done(False)


@call(volatile=True, answer=_not_stored)
def lease_release(run: Run, name: str, tell: bool | None = None, **_: Any) -> Rows:
    """``tell``: let the keeper of the beat notice it, which may be in another process. The proof concerns the answer
    alone, which has let this pass."""
    [lease] = run("lease_release.lease", name=name)
    run("lease.record_release", name=name)
    if lease["keeps"]:
        run("lease_release.kept_beat", name=name)
        run("lease_release.kept_lease", name=name)
    else:
        run("lease.delete", name=name)
    run("beat.delete_solo", beat=lease["beat"])
    if tell:
        run("beat.change", beat=lease["beat"])
    return _done(True)


@call(volatile=True, answer=_not_stored)
def lease_abandon(run: Run, name: str, **_: Any) -> Rows:
    """As a release, of what an unanswered acquire may have been granted: nothing is kept, nor is its beat."""
    [lease] = run("lease.beat", name=name)
    run("lease.record_release", name=name)
    run("lease.delete", name=name)
    run("beat.delete", beat=lease["beat"])
    return _done(True)


def _no_lease(run: Run, name: str, **_: Any) -> Rows:
    return [] if run("lease.beat", name=name) else _done(False)


@call(answer=_no_lease)
def lease_force_release(run: Run, name: str, actor: str, reason: str, **_: Any) -> Rows:
    run("lease_force_release.audit", name=name, actor=actor, reason=reason)
    return lease_take_away(run, name, actor, reason)


def lease_take_away(run: Run, name: str, actor: str, reason: str) -> Rows:
    """Called by a call that records it."""
    run("lease_force_release.history", name=name, actor=actor, reason=reason)
    [lease] = run("lease.beat", name=name)
    run("beat.change", beat=lease["beat"])
    run("beat.delete_solo", beat=lease["beat"])
    run("lease.delete", name=name)
    return _done(True)


def _other_fence(run: Run, name: str, fence: int, **_: Any) -> Rows:
    return [] if run("lease_force_release_if.lease", name=name, fence=fence) else _done(False)


@call(answer=_other_fence)
def lease_force_release_if(run: Run, name: str, fence: int, actor: str, reason: str) -> Rows:
    """``fence`` concerns the answer alone, which has let this pass."""
    return lease_force_release(run, name, actor, reason)


def _not_recallable(run: Run, name: str, fence: int, **_: Any) -> Rows:
    return [] if run("lease_recall.lease", name=name, fence=fence) else _done(False)


@call(answer=_not_recallable)
def lease_recall(run: Run, name: str, fence: int, actor: str, reason: str) -> Rows:
    rows = run("lease_recall.lease", name=name, fence=fence)
    for row in rows:  # none if it has just expired
        run("lease_recall.want", beat=row["beat"], fence=fence)
        run("lease_recall.audit", name=name, actor=actor, reason=reason)
    return _done(rows)


def _not_expired(run: Run, name: str) -> Rows:
    return [] if run("lease_clear.expired", name=name) else _done(False)


@call(answer=_not_expired)
def lease_clear(run: Run, name: str) -> Rows:
    purge(run)
    return _done(True)


def _not_guarded(run: Run, name: str, token: str, **_: Any) -> Rows:
    return [] if run("lease.alive", name=name, token=token) else [{"ended": None}]


@call(answer=_not_guarded)
def lease_wipe(run: Run, name: str, token: str, prefix: str = "") -> Rows:
    """Take away every lease whose name begins with ``prefix``, but no guard, elector or gate."""
    guards = run("lease_wipe.kind", name=name, token=token)
    if not guards:  # it has just expired
        return [{"ended": None}]
    if guards[0]["kind"] != "guard":
        raise Refused(f"lease {name!r} is not the lease of a guard: nothing is wiped", INVALID)
    run("lease_wipe.history", name=name, prefix=prefix, actor=guards[0]["holder"])
    run("lease_wipe.beats", prefix=prefix)
    run("lease_wipe.solo_beats", prefix=prefix)
    run("lease_wipe.leases", prefix=prefix)
    ended = changes(run)
    run("lease_wipe.audit", name=name, prefix=prefix, ended=ended)
    return [{"ended": ended}]


@call(volatile=True)
def beat_renew(run: Run, beat: str) -> Rows:
    return run("beat_renew.update", beat=beat)


def _not_on_beat(run: Run, beat: str, name: str, fence: int) -> Rows:
    return [] if run("beat_release.lease", beat=beat, name=name, fence=fence) else _done(False)


@call(volatile=True, answer=_not_on_beat)
def beat_release(run: Run, name: str, **_: Any) -> Rows:
    """Release a lease of the beat that its process does not know, because the answer to the acquire was lost."""
    return lease_release(run, name)


@call(volatile=True)
def beat_end(run: Run, beat: str) -> Rows:
    run("beat_end.history", beat=beat)
    run("beat_end.kept_beats", beat=beat)
    run("beat_end.kept_leases", beat=beat)
    run("beat_end.leases", beat=beat)
    run("beat.delete", beat=beat)
    return [{"ended": 0}]


@call(volatile=True)
def purge(run: Run) -> Rows:
    run("purge.expire_beats")
    run("purge.history")
    run("purge.leases")
    run("purge.beats")
    run("purge.old_history")
    return [{"ended": 0}]


@call()
def fence_raise(run: Run, entry: int, above: int | None = None) -> Rows:
    """The log's places are not raised: SQLite assigns them from its highest row."""
    if not run("fence_raise.entry", entry=entry):
        raise Refused("first begin an audit entry with the subject 'fences', and commit it", "42501")
    run("fence_raise.versions", above=min(above or 0, 1 << 49))
    return run("fence_raise.fences", above=above or 0)
