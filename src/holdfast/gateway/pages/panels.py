"""The values that each panel of the page shows, built from a snapshot by pure functions.

Panels contain points in time and no ages, so a panel stays equal as long as nothing happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.gateway.pages import formatting
from holdfast.gateway.pages.formatting import natural_order, one_line
from holdfast.gateway.pages.problems import find_problems
from holdfast.gateway.pages.snapshot import MAX_OPERATIONS, MAX_RECORDS, Snapshot

MAX_ROWS = 40
"""Of a table; the API returns the others."""
MAX_SQUARES = 64
"""A pool with more slots is shown as a bar."""
PHASES = ("Error", "Provisioning", "Deleting", "Deleted", "Ready", "Completed")
STATES = ("waiting", "working", "expected", "idle", "ended")
STATUSES = ("partial", "running", "failure", "undone", "success")
_SLOT_LEASE = "@slot:"

Panel = dict[str, Any]


def build_panels(snapshot: Snapshot) -> dict[str, Panel]:
    return {name: build(snapshot) for name, build in _PANELS.items()}


def _problems(snapshot: Snapshot) -> Panel:
    problems = find_problems(snapshot)
    return {"problems": [problem._asdict() for problem in problems], "count": len(problems)}


def _leaders(snapshot: Snapshot) -> Panel:
    leaders = [lease for lease in snapshot.leases if lease.kind in ("elector", "relay")]
    leaders.sort(key=lambda lease: (lease.name != snapshot.elector, not lease.name.startswith("gateway:"), lease.name))
    return {"rows": [_lease(lease) for lease in leaders[:MAX_ROWS]], "more": len(leaders[MAX_ROWS:])}


def _leases(snapshot: Snapshot) -> Panel:
    """The leases of slots are in the panel of slots."""
    leases = [lease for lease in snapshot.leases if not lease.name.startswith(_SLOT_LEASE)]
    leases.sort(key=lambda lease: (lease.name.startswith(("@", "holdfast:")), natural_order(lease.name)))
    return {
        "rows": [_lease(lease) for lease in leases[:MAX_ROWS]],
        "more": len(leases[MAX_ROWS:]),
        "count": len(leases),
    }


def _lease(record: Any) -> Panel:
    ttl = record.info.get("ttl")
    return {
        "name": record.name,
        "holder": record.holder,
        "where": " ".join(one_line(each) for each in (record.host, record.pid) if each is not None),
        "fence": record.fence,
        "since": record.acquired_at.timestamp(),
        "until": record.expires_at.timestamp(),
        "ttl": float(ttl) if isinstance(ttl, int | float) else None,
    }


def _locks(snapshot: Snapshot) -> Panel:
    names = {lock.pid: one_line(lock.holder or lock.application_name) for lock in snapshot.locks}
    rows_by_lock: dict[object, Panel] = {}
    for lock in snapshot.locks:
        row = rows_by_lock.setdefault(
            (lock.namespace, lock.entity_id, lock.name),
            {"label": lock.label, "holders": [], "waiters": [], "waiting": lock.waiting},
        )
        since = None if lock.duration is None else round(snapshot.at - lock.duration)
        row["holders" if lock.granted else "waiters"].append({
            "pid": lock.pid,
            "application": one_line(lock.holder or lock.application_name),
            "since": since,
            "behind": [{"pid": pid, "application": names.get(pid, "")} for pid in lock.blocked_by],
        })  # fmt: skip
    rows = sorted(rows_by_lock.values(), key=lambda row: (-row["waiting"], natural_order(row["label"])))
    waiting = sum(row["waiting"] for row in rows)
    held = sum(lock.granted for lock in snapshot.locks)
    return {"rows": rows[:MAX_ROWS], "more": len(rows[MAX_ROWS:]), "held": held, "waiting": waiting}


def _slots(snapshot: Snapshot) -> Panel:
    owners_by_pool: dict[str, dict[int, str]] = {pool: {} for pool in snapshot.pools}
    for lease in snapshot.leases:
        pool, _, slot = lease.name.removeprefix(_SLOT_LEASE).rpartition(":")
        if lease.name.startswith(_SLOT_LEASE) and slot.isdecimal():
            owners_by_pool.setdefault(pool, {})[int(slot)] = lease.holder
    pools = []
    for pool, owners in owners_by_pool.items():
        capacity = snapshot.pools.get(pool)
        last = max([capacity or 0, *owners])
        numbers = range(1, last + 1) if last <= MAX_SQUARES else ()
        squares = [{"slot": number, "owner": owners.get(number)} for number in numbers]
        pools.append({"pool": pool, "held": len(owners), "capacity": capacity, "squares": squares})
    return {
        "pools": pools,
        "held": sum(pool["held"] for pool in pools),
        "capacity": sum(pool["capacity"] or 0 for pool in pools),
        "sessions": _counts(Counter(formatting.record_state(session.payload) for session in snapshot.sessions)),
    }


def _operations(snapshot: Snapshot) -> Panel:
    """Unfinished operations are all counted, the others among the latest."""
    counts = Counter(record.status for record in snapshot.operations if record.status not in ("partial", "running"))
    counts.update(record.status for record in snapshot.unfinished)
    unfinished = {record.key for record in snapshot.unfinished}
    latest = [record for record in snapshot.operations if record.key not in unfinished][:10]
    return {
        "counts": [{"name": name, "count": counts[name]} for name in STATUSES],
        "rows": [_operation(record) for record in [*snapshot.unfinished[:MAX_ROWS], *latest]],
        "of": min(MAX_OPERATIONS, len(snapshot.operations)),
        "relays": [
            {"name": relay.name, "holder": relay.holder, "entries": relay.entries, "parked": relay.parked}
            for relay in snapshot.relays
        ],
        "reviews": len(snapshot.reviews),
    }


def _operation(record: Any) -> Panel:
    error = record.error or {}
    return {
        "label": record.label,
        "key": record.key,
        "status": record.status,
        "attempt": record.attempt,
        "dataset": record.dataset,
        "error": one_line(error.get("message")) if record.status in ("failure", "undone") else "",
        "at": record.updated_at.timestamp(),
    }


def _sandboxes(snapshot: Snapshot) -> Panel:
    return _records(snapshot.sandboxes, formatting.sandbox_phase, PHASES, formatting.sandbox_reason)


def _agents(snapshot: Snapshot) -> Panel:
    return _records(snapshot.agents, formatting.record_state, STATES, formatting.agent_activity)


def _records(
    records: Sequence[Any], state: Callable[[Any], str], order: Sequence[str], note: Callable[[Any], str]
) -> Panel:
    rows = [
        {
            "id": record.id,
            "name": formatting.record_name(record),
            "state": state(record.payload),
            "note": note(record.payload),
            "at": record.updated_at.timestamp(),
        }
        for record in records
    ]
    rank = {name: place for place, name in enumerate(order)}
    rows.sort(key=lambda row: (rank.get(row["state"], -1), natural_order(row["name"])))
    return {
        "rows": rows[:MAX_ROWS],
        "more": len(rows[MAX_ROWS:]),
        "count": len(rows),
        "is_full": len(rows) == MAX_RECORDS,
        "counts": _counts(Counter(row["state"] for row in rows), order),
    }


def _counts(counts: Counter[str], order: Iterable[str] = ()) -> list[Panel]:
    names = [*(name for name in order if name in counts), *sorted(counts.keys() - set(order))]
    return [{"name": name, "count": counts[name]} for name in names]


def _glance(snapshot: Snapshot) -> Panel:
    """The figures at the top, from the panels that they sum up."""
    locks, slots, operations = _locks(snapshot), _slots(snapshot), _operations(snapshot)
    counts = {row["name"]: row["count"] for row in operations["counts"]}
    phases = Counter(formatting.sandbox_phase(record.payload) for record in snapshot.sandboxes)
    unfinished = f"{counts['partial']} interrupted" if counts["partial"] else "none interrupted"
    ready = f"ready of {len(snapshot.sandboxes)}"
    slots_note = f"{slots['held']} of them slots"
    return {
        "tiles": [
            {"panel": "leases", "title": "Leases", "figure": len(snapshot.leases), "note": slots_note},
            {"panel": "locks", "title": "Locks", "figure": locks["held"], "note": f"{locks['waiting']} waiting"},
            {"panel": "slots", "title": "Slots", "figure": slots["held"], "note": f"of {slots['capacity']}"},
            {"panel": "operations", "title": "Operations", "figure": counts["running"],
             "note": f"running, {unfinished}"},
            {"panel": "sandboxes", "title": "Sandboxes", "figure": phases["Ready"], "note": ready},
            {"panel": "agents", "title": "Agents", "figure": len(snapshot.agents), "note": "known"},
        ]
    }  # fmt: skip


_PANELS: dict[str, Callable[[Snapshot], Panel]] = {
    "problems": _problems, "glance": _glance, "leaders": _leaders, "leases": _leases, "locks": _locks,
    "slots": _slots, "operations": _operations, "sandboxes": _sandboxes, "agents": _agents,
}  # fmt: skip
