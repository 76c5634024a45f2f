"""The values that each panel of the overview shows, built from a snapshot by pure functions.

Panels contain points in time and no ages, so a panel stays equal as long as nothing happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.commands.problem_commands import ACKNOWLEDGE
from holdfast.dashboard import formats
from holdfast.dashboard.actions import command_line
from holdfast.dashboard.formats import link, natural_order, one_line
from holdfast.dashboard.problems import find_problems
from holdfast.dashboard.snapshot import MAX_ENDED, MAX_OPERATIONS, MAX_RECORDS, Snapshot
from holdfast.dashboard.stream import Panel
from holdfast.dashboard.timeline import HOUR, LOST, build_timeline

_MAX_TITLE = 200
MAX_ROWS = 12
"""Of a table; its own page lists the others."""
MAX_SQUARES = 64
"""A pool with more slots is shown as a bar."""
PHASES = ("Error", "Provisioning", "Deleting", "Deleted", "Ready", "Completed")
STATES = ("waiting", "working", "expected", "idle", "ended")
STATUSES = ("partial", "running", "failure", "undone", "success")
_SLOT_LEASE = "@slot:"

OVERDUE = 60.0
"""Seconds after which no process seems to run a schedule."""
LEADING = ("elector", "relay")
"""The kinds of leases whose holders lead."""


def build_panels(snapshot: Snapshot, window: float = HOUR) -> dict[str, Panel]:
    """``window``: the seconds that the timeline shows."""
    panels = {name: build(snapshot) for name, build in _PANELS.items()}
    panels["timeline"] = _timeline(snapshot, window)
    return panels


def _timeline(snapshot: Snapshot, window: float) -> Panel:
    """The leaders, and the leases that were lost or taken away."""
    leading = {lease.name for lease in snapshot.leases if lease.kind in LEADING}
    leading |= {snapshot.elector} if snapshot.elector else set()
    lost = {grant.name for grant in snapshot.ended if grant.outcome in LOST}
    names = [*sorted(leading), *sorted(name for name in lost - leading if not name.startswith(("@slot:", "@gate:")))]
    is_cut = len(snapshot.ended) >= MAX_ENDED
    return build_timeline(names, snapshot.leases, snapshot.ended, snapshot.at, window, is_cut=is_cut)


def _problems(snapshot: Snapshot) -> Panel:
    """Those that are acknowledged are folded away."""
    rows: dict[bool, list[Panel]] = {False: [], True: []}
    for problem in find_problems(snapshot):
        row = problem._replace(every=())._asdict()
        names = ", ".join(subject.name for subject in problem.subjects if subject.name)
        title = "".join(character for character in f"{problem.title}: {names}" if character.isprintable())
        parameters = {"problem": title[:_MAX_TITLE], "fingerprints": ",".join(problem.fingerprints)}
        if problem.kind:
            row["act"] = link(f"/act/{ACKNOWLEDGE}", **parameters)
            row["command"] = command_line(ACKNOWLEDGE, parameters, "…")
        rows[problem.acknowledged is not None].append(row)
    return {"problems": rows[False], "acknowledged": rows[True], "count": len(rows[False])}


def _leaders(snapshot: Snapshot) -> Panel:
    leaders = [lease for lease in snapshot.leases if lease.kind in LEADING]
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
        "is_bound": formats.ends_with_process(record.info),
        "ttl": float(ttl) if isinstance(ttl, int | float) else None,
        "waiting": getattr(record, "waiting", 0),
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
        "sessions": _counts(Counter(formats.record_state(session.payload) for session in snapshot.sessions)),
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
    return {
        "label": record.label,
        "key": record.key,
        "status": record.status,
        "attempt": record.attempt,
        "dataset": record.dataset,
        "error": formats.error_text(record.error) if record.status in ("failure", "undone") else "",
        "at": record.updated_at.timestamp(),
    }


def _schedules(snapshot: Snapshot) -> Panel:
    records = sorted(snapshot.schedules, key=lambda record: (not record.paused, natural_order(record.name)))
    rows = [
        {
            "name": record.name,
            "every": record.every,
            "state": schedule_state(record),
            "note": record.paused or "",
            "next": None if record.next_slot is None else record.next_slot.timestamp(),
        }
        for record in records
    ]
    return {"rows": rows[:MAX_ROWS], "more": len(rows[MAX_ROWS:])}


def schedule_state(record: Any) -> str:
    """One word for a record of ``client.schedules``."""
    if record.paused:
        return "paused"
    if record.running:
        return "running"
    if record.overdue > OVERDUE:
        return "overdue"
    return "waits for its slot" if record.last is None else record.last.status


def _sandboxes(snapshot: Snapshot) -> Panel:
    page = snapshot.object_pages.get("@sandbox", "")
    return _records(snapshot.sandboxes, formats.sandbox_phase, PHASES, formats.sandbox_reason, page)


def _agents(snapshot: Snapshot) -> Panel:
    page = snapshot.object_pages.get("@agent", "")
    return _records(snapshot.agents, formats.record_state, STATES, formats.agent_activity, page)


def _records(
    records: Sequence[Any], state: Callable[[Any], str], order: Sequence[str], note: Callable[[Any], str], page: str
) -> Panel:
    rows = [
        {
            "href": formats.link(page, id=str(record.id)) if page else "",
            "name": formats.record_name(record),
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
    phases = Counter(formats.sandbox_phase(record.payload) for record in snapshot.sandboxes)
    unfinished = f"{counts['partial']} interrupted" if counts["partial"] else "none interrupted"
    tiles = [
        ("leases", "Leases", len(snapshot.leases), f"{slots['held']} of them slots", True),
        ("locks", "Locks", locks["held"], f"{locks['waiting']} waiting", True),
        ("slots", "Slots", slots["held"], f"of {slots['capacity']}" if slots["capacity"] else "held", slots["pools"]),
        ("operations", "Operations", counts["running"], f"running, {unfinished}", True),
        ("schedules", "Schedules", len(snapshot.schedules), _schedules_note(snapshot), snapshot.schedules),
        ("sandboxes", "Sandboxes", phases["Ready"], f"ready of {len(snapshot.sandboxes)}", snapshot.sandboxes),
        ("agents", "Agents", len(snapshot.agents), "known", snapshot.agents),
    ]
    names = ("panel", "title", "figure", "note")
    return {"tiles": [dict(zip(names, tile, strict=False)) for tile in tiles if tile[-1]]}


def _schedules_note(snapshot: Snapshot) -> str:
    paused = sum(bool(record.paused) for record in snapshot.schedules)
    return f"{paused} paused" if paused else "none paused"


_PANELS: dict[str, Callable[[Snapshot], Panel]] = {
    "problems": _problems, "glance": _glance, "leaders": _leaders, "leases": _leases, "locks": _locks,
    "slots": _slots, "operations": _operations, "schedules": _schedules, "sandboxes": _sandboxes, "agents": _agents,
}  # fmt: skip
