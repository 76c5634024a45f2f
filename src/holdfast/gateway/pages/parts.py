"""What each part of the page tells, from a sight: plain values with moments in them, and no ages, so that a part is
the same as long as nothing has happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.gateway.pages import words
from holdfast.gateway.pages.looking import LATEST, RECORDS, Sight
from holdfast.gateway.pages.problems import problems

ROWS = 40
"""That a table shows; the API has the others."""
SQUARES = 64
PHASES = ("Error", "Provisioning", "Deleting", "Deleted", "Ready")
STATES = ("waiting", "working", "expected", "idle", "ended")
STATUSES = ("partial", "running", "failure", "success")
_SLOT = "@slot:"

Part = dict[str, Any]


def tell(sight: Sight) -> dict[str, Part]:
    return {name: part(sight) for name, part in _PARTS.items()}


def _problems(sight: Sight) -> Part:
    found = problems(sight)
    return {"found": [each._asdict() for each in found], "count": len(found)}


def _leaders(sight: Sight) -> Part:
    leaders = [each for each in sight.leases if each.info.get("elector")]
    leaders.sort(key=lambda each: (each.name != sight.elector, not each.name.startswith("gateway:"), each.name))
    return {"rows": [_lease(each) for each in leaders[:ROWS]], "more": len(leaders[ROWS:])}


def _leases(sight: Sight) -> Part:
    """The leases of slots are told as slots."""
    found = [each for each in sight.leases if not each.name.startswith(_SLOT)]
    found.sort(key=lambda each: (each.name.startswith(("@", "holdfast:")), words.in_order(each.name)))
    return {"rows": [_lease(each) for each in found[:ROWS]], "more": len(found[ROWS:]), "count": len(found)}


def _lease(record: Any) -> Part:
    ttl = record.info.get("ttl")
    return {
        "name": record.name,
        "holder": record.holder,
        "where": " ".join(words.text(each) for each in (record.host, record.pid) if each is not None),
        "fence": record.fence,
        "since": record.acquired_at.timestamp(),
        "until": record.expires_at.timestamp(),
        "ttl": float(ttl) if isinstance(ttl, int | float) else None,
    }


def _locks(sight: Sight) -> Part:
    who = {each.pid: each.application_name for each in sight.locks}
    found: dict[str, Part] = {}
    for each in sight.locks:
        lock = found.setdefault(each.label, {"label": each.label, "holders": [], "waiters": []})
        since = None if each.duration is None else round(sight.at - each.duration)
        lock["holders" if each.granted else "waiters"].append({
            "pid": each.pid,
            "who": words.text(each.application_name),
            "since": since,
            "behind": [{"pid": pid, "who": words.text(who.get(pid))} for pid in each.blocked_by],
        })  # fmt: skip
    rows = sorted(found.values(), key=lambda each: (-len(each["waiters"]), words.in_order(each["label"])))
    waiting = sum(len(each["waiters"]) for each in rows)
    return {"rows": rows[:ROWS], "more": len(rows[ROWS:]), "held": len(sight.locks) - waiting, "waiting": waiting}


def _slots(sight: Sight) -> Part:
    held: dict[str, dict[int, str]] = {pool: {} for pool in sight.pools}
    for each in sight.leases:
        pool, _, slot = each.name.removeprefix(_SLOT).rpartition(":")
        if each.name.startswith(_SLOT) and slot.isdecimal():
            held.setdefault(pool, {})[int(slot)] = each.holder
    pools = []
    for pool, owners in held.items():
        capacity = sight.pools.get(pool)
        last = max([capacity or 0, *owners])
        squares = [{"slot": n, "owner": owners.get(n)} for n in range(1, last + 1)] if last <= SQUARES else []
        pools.append({"pool": pool, "held": len(owners), "capacity": capacity, "squares": squares})
    states = Counter(words.state(each.payload) for each in sight.sessions)
    return {
        "pools": pools,
        "held": sum(each["held"] for each in pools),
        "capacity": sum(each["capacity"] or 0 for each in pools),
        "sessions": _counted(states),
    }


def _operations(sight: Sight) -> Part:
    counts = Counter(each.status for each in sight.operations if each.status in ("success", "failure"))
    counts.update(each.status for each in sight.unfinished)
    known = {each.key for each in sight.unfinished}
    latest = [each for each in sight.operations if each.key not in known][:10]
    return {
        "counts": [{"name": name, "count": counts[name]} for name in STATUSES],
        "rows": [_operation(each) for each in [*sight.unfinished[:ROWS], *latest]],
        "of": min(LATEST, len(sight.operations)),
        "relays": [
            {"name": each.name, "holder": each.holder, "entries": each.entries, "parked": each.parked}
            for each in sight.relays
        ],
        "reviews": len(sight.reviews),
    }


def _operation(record: Any) -> Part:
    error = record.error or {}
    return {
        "label": record.label,
        "key": record.key,
        "status": record.status,
        "attempt": record.attempt,
        "dataset": record.dataset,
        "error": words.text(error.get("message")) if record.status == "failure" else "",
        "at": record.updated_at.timestamp(),
    }


def _sandboxes(sight: Sight) -> Part:
    return _records(sight.sandboxes, words.phase, PHASES, words.condition)


def _agents(sight: Sight) -> Part:
    return _records(sight.agents, words.state, STATES, words.doing)


def _records(
    records: Sequence[Any], state: Callable[[Any], str], order: Sequence[str], why: Callable[[Any], str]
) -> Part:
    rows = [
        {
            "id": each.id,
            "name": words.called(each),
            "state": state(each.payload),
            "why": why(each.payload),
            "at": each.updated_at.timestamp(),
        }
        for each in records
    ]
    rank = {name: place for place, name in enumerate(order)}
    rows.sort(key=lambda row: (rank.get(row["state"], -1), words.in_order(row["name"])))
    return {
        "rows": rows[:ROWS],
        "more": len(rows[ROWS:]),
        "count": len(rows),
        "full": len(rows) == RECORDS,
        "counts": _counted(Counter(row["state"] for row in rows), order),
    }


def _counted(counts: Counter[str], order: Iterable[str] = ()) -> list[Part]:
    names = [*(name for name in order if name in counts), *sorted(counts.keys() - set(order))]
    return [{"name": name, "count": counts[name]} for name in names]


def _glance(sight: Sight) -> Part:
    """The figures at the top, from the parts that they sum up."""
    locks, slots, operations = _locks(sight), _slots(sight), _operations(sight)
    counts = {each["name"]: each["count"] for each in operations["counts"]}
    phases = Counter(words.phase(each.payload) for each in sight.sandboxes)
    unfinished = f"{counts['partial']} half done" if counts["partial"] else "none half done"
    ready = f"ready of {len(sight.sandboxes)}"
    return {
        "tiles": [
            {"part": "leases", "what": "Leases", "figure": len(sight.leases), "note": f"{slots['held']} of them slots"},
            {"part": "locks", "what": "Locks", "figure": locks["held"], "note": f"{locks['waiting']} waiting"},
            {"part": "slots", "what": "Slots", "figure": slots["held"], "note": f"of {slots['capacity']}"},
            {"part": "operations", "what": "Operations", "figure": counts["running"], "note": f"running, {unfinished}"},
            {"part": "sandboxes", "what": "Sandboxes", "figure": phases["Ready"], "note": ready},
            {"part": "agents", "what": "Agents", "figure": len(sight.agents), "note": "known"},
        ]
    }  # fmt: skip


_PARTS: dict[str, Callable[[Sight], Part]] = {
    "problems": _problems, "glance": _glance, "leaders": _leaders, "leases": _leases, "locks": _locks,
    "slots": _slots, "operations": _operations, "sandboxes": _sandboxes, "agents": _agents,
}  # fmt: skip
