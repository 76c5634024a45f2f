"""The pages of one lease, lock, operation, schedule or slot pool, and of everything that one name stands for."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.dashboard.actions import actions_panel
from holdfast.dashboard.explanation import ENDINGS, NamedRecords, describe_run, explain
from holdfast.dashboard.formats import (
    ends_with_process,
    error_text,
    format_span,
    get_path,
    link,
    one_line,
    record_state,
)
from holdfast.dashboard.panels import LEADING, schedule_state
from holdfast.dashboard.snapshot import MAX_BYTES, MAX_RECORDS, database_time
from holdfast.dashboard.source import PageSource
from holdfast.dashboard.stream import PageView, Panel
from holdfast.dashboard.tables import PageCell, PageColumn, facts, table
from holdfast.dashboard.timeline import DAY, HOUR, WINDOWS, build_timeline

MAX_GRANTS = 500
_SLOT = "@slot:"
_WAITER = "waiter of lease "
_DIGEST = 64
_AGES = re.compile(r"[0-9][0-9 dhms]* ago \(([0-9: -]+ UTC)\)")
Query = Mapping[str, str]


async def lease_page(source: PageSource, query: Query) -> PageView:
    name, client = query.get("name", ""), source.client
    lease, ended, locks, audit = await asyncio.gather(
        source.call(client.leases.get, name),
        source.rows(client.leases.history, name, limit=MAX_GRANTS),
        source.rows(client.locks.list),
        source.rows(client.audit.list, limit=1000, max_bytes=MAX_BYTES),
    )
    at = database_time([lease] if lease else [])
    live = [lease] if lease else []
    oldest = min((grant.acquired_at.timestamp() for grant in [*live, *ended]), default=at)
    window = WINDOWS.get(query.get("window", ""), HOUR if at - oldest < HOUR else DAY)
    acts: list[tuple[str, dict[str, str]]] = []
    if lease is not None:
        acts += [("leader.resign", {"name": name})] if lease.kind in LEADING else []
        is_gate = lease.kind == "gate"
        acts += [
            ("gate.close", {"name": name.removeprefix("@gate:")}) if is_gate else ("lease.release", {"name": name})
        ]
    timeline = build_timeline([name], live, ended, at, window, is_cut=len(ended) >= MAX_GRANTS)
    panels = {
        "facts": facts("Now", _lease_facts(lease)),
        "waiters": _waiters_table(lease, locks, at),
        "actions": actions_panel(acts),
        "timeline": {**timeline, "title": "Holders over time", "href": link("/lease", name=name)},
        "holders": table("Holders", _HOLDER_COLUMNS, _holders(lease, ended), empty="No process has held it yet."),
        "audit": _audit_table(audit, name),
    }
    return PageView("Lease", at, panels, name)


def _lease_facts(lease: Any) -> list[tuple[str, PageCell]]:
    if lease is None:
        return [("State", PageCell(state="free")), ("Holder", PageCell("no process holds it"))]
    return [
        ("State", PageCell(state="held")),
        ("Holder", PageCell(lease.holder)),
        ("Process", PageCell(process_of(lease))),
        ("Kind", PageCell(lease.kind)),
        ("Since", PageCell(time=lease.acquired_at.timestamp(), when=("for", lease.acquired_at.timestamp()))),
        ("Time left", lease_bar(lease)),
        ("Fence", PageCell(number=lease.fence)),
        ("Waiting", PageCell(number=lease.waiting, note={0: "", 1: "process"}.get(lease.waiting, "processes"))),
        *(
            ("Process began" if key == "started" else key.capitalize(), _info_cell(key, value))
            for key, value in sorted(lease.info.items())
            if key != "ttl"
        ),
    ]


def _waiters_table(lease: Any, locks: Sequence[Any], at: float) -> Panel:
    """A process that waits for a lease holds a shared lock on it, where the database shows such locks."""
    waiting = 0 if lease is None else lease.waiting
    rows = [
        [
            PageCell(one_line(lock.holder or lock.application_name) or "not visible to this role", is_name=True),
            PageCell("" if lock.pid is None else str(lock.pid)),
            PageCell(when=None if lock.duration is None else ("for", float(round(at - lock.duration)))),
        ]
        for lock in locks
        if lease is not None and lock.name == f"{_WAITER}{lease.name}"
    ]
    unnamed = waiting - len(rows)
    processes = "process waits" if unnamed == 1 else "processes wait"
    note = f"{unnamed} {'more ' if rows else ''}{processes}; which is not known here." if unnamed > 0 else ""
    columns = (PageColumn("Process"), PageColumn("Session", is_number=True), PageColumn("Waits for"))
    return table("Who waits", columns, rows, empty="" if rows else note, note=note if rows else "")


def _info_cell(key: str, value: Any) -> PageCell:
    return PageCell(time=value) if key == "started" and isinstance(value, int | float) else PageCell(one_line(value))


_HOLDER_COLUMNS = (
    PageColumn("Holder"),
    PageColumn("Outcome"),
    PageColumn("Fence", is_number=True),
    PageColumn("From", is_wide=True),
    PageColumn("Held for"),
    PageColumn("Free before", is_wide=True),
)


def _holders(lease: Any, ended: Sequence[Any]) -> list[list[PageCell]]:
    """The latest first. ``Free before``: the gap to the grant before it."""
    grants = [*([lease] if lease else []), *ended]
    rows = []
    for grant, before in zip(grants, [*grants[1:], None], strict=False):
        began = grant.acquired_at.timestamp()
        gap = None if before is None else max(0.0, began - before.ended_at.timestamp())
        outcome = "held" if grant is lease else grant.outcome
        by = f"{grant.actor}: {one_line(grant.reason)}" if outcome == "forced" else ENDINGS.get(outcome, "")
        held = (
            PageCell(when=("for", began))
            if grant is lease
            else PageCell(format_span(grant.ended_at.timestamp() - began))
        )
        rows.append(
            [
                PageCell(grant.holder, is_name=True, note=process_of(grant)),
                PageCell(state=outcome, note=by),
                PageCell(number=grant.fence),
                PageCell(time=began),
                held,
                PageCell("" if gap is None else format_span(gap)),
            ]
        )
    return rows


async def lock_page(source: PageSource, query: Query) -> PageView:
    name, client = query.get("name", ""), source.client
    every = await source.call(client.locks.list)
    locks = [lock for lock in every if lock.label == name]
    waits = {lock.pid: lock.label for lock in every if not lock.granted and lock.label != name}
    at = time.time()
    holders = sum(lock.granted for lock in locks)
    rows = [
        ("State", PageCell(state="held" if holders else "free")),
        ("Namespace", PageCell(locks[0].namespace or "") if locks else PageCell()),
        ("Holders", PageCell(number=holders)),
        ("Waiting", PageCell(number=max((lock.waiting for lock in locks), default=0))),
    ]
    panels = {
        "facts": facts("Now", rows),
        "tree": {"kind": "tree", "title": "Who waits for whom", "roots": build_tree(locks, waits, at)},
    }
    return PageView("Lock", at, panels, name)


def build_tree(locks: Sequence[Any], waits: Mapping[int, str], at: float) -> list[Panel]:
    """The holders, each with the waiters behind it. A waiter stands below the last session before it in the queue.
    ``waits``: the label of another lock that a session waits for, by pid."""
    nodes = {lock.pid: _node(lock, waits.get(lock.pid, ""), at) for lock in locks}
    queued = {lock.pid: index for index, lock in enumerate(locks) if not lock.granted}
    roots = []
    for lock in locks:
        ahead = [pid for pid in lock.blocked_by if pid in nodes and pid != lock.pid]
        before = [pid for pid in ahead if queued.get(pid, -1) < queued.get(lock.pid, -1)]
        if lock.granted or not before:
            roots.append(nodes[lock.pid])
        else:
            nodes[max(before, key=lambda pid: queued.get(pid, -1))]["children"].append(nodes[lock.pid])
    return roots


def _node(lock: Any, waits_for: str, at: float) -> Panel:
    return {
        "pid": lock.pid,
        "holder": one_line(lock.holder or lock.application_name),
        "state": "held" if lock.granted else "waits",
        "mode": lock.mode,
        "since": None if lock.duration is None else float(round(at - lock.duration)),
        "waits_for": waits_for,
        "waits_href": link("/lock", name=waits_for) if waits_for else "",
        "action": link("/act/lock.end", pid=str(lock.pid)) if lock.pid else "",
        "children": [],
    }


async def operation_page(source: PageSource, query: Query) -> PageView:
    key, client = query.get("key", ""), source.client
    evidence = NamedRecords(key, time.time(), **await _operation_evidence(source, key))
    entries = await source.rows(client.operations.history, key) if evidence.operation else ()
    audit = await source.rows(client.audit.list, limit=1000, max_bytes=MAX_BYTES)
    record = evidence.operation
    acts: list[tuple[str, dict[str, str]]] = []
    if record is not None and record.status != "running":
        acts += [("operation.reset", {"key": record.key})]
        if record.status == "partial" or (record.status != "success" and record.effect_started):
            acts += [("operation.complete", {"key": record.key})]
        if record.rollback and record.status in ("partial", "success"):
            acts += [("operation.rollback", {"key": record.key})]
    for review in evidence.reviews:
        if review.status == "open":
            acts += [(name, {"number": str(review.id)}) for name in ("review.approve", "review.reject")]
    sentences = [sentence for finding in explain(evidence) for sentence in finding.sentences]
    panels = {
        "why": {"kind": "sentences", "title": "Why", "sentences": _stable(sentences)},
        "facts": facts("Record", _operation_facts(record)),
        "actions": actions_panel(acts),
        "attempts": table("Attempts", _ATTEMPT_COLUMNS, _attempts(entries, record)),
        "entries": table("Entries of the log", _ENTRY_COLUMNS, _entries(entries)),
        "audit": _audit_table(audit, *(("operation " + each) for each in {key, record.key, record.label} if each))
        if record
        else _audit_table(()),
    }
    return PageView("Operation", evidence.at, panels, key if record is None else record.label)


def _stable(sentences: Sequence[str]) -> list[str]:
    """Without the ages, which the page counts itself: those before a time in brackets."""
    return [_AGES.sub("at \\1", sentence) for sentence in sentences]


async def _operation_evidence(source: PageSource, key: str) -> dict[str, Any]:
    client = source.client
    record = await source.call(client.operations.get, key)
    if record is None and len(key) == _DIGEST and set(key) <= set("0123456789abcdef"):
        matches = await source.rows(client.operations.match, key, limit=1)
        record = matches[0] if matches else None
    reviews = await source.rows(client.reviews.list, status=None, key=key, limit=100, max_bytes=MAX_BYTES)
    return {"operation": record, "reviews": reviews}


def _operation_facts(record: Any) -> list[tuple[str, PageCell]]:
    if record is None:
        return [("State", PageCell("no operation has this key"))]
    texts = ("dataset", "pipeline", "task", "operation", "rollback", "result_hash", "owner", "pointer", "key")
    return [
        ("Status", PageCell(state=record.status)),
        ("Attempt", PageCell(number=record.attempt)),
        ("Failures", PageCell(number=record.failures)),
        ("Error", PageCell(error_text(record.error))),
        ("Changed", PageCell(time=record.updated_at.timestamp(), when=("ago", record.updated_at.timestamp()))),
        ("Begun", PageCell(time=record.created_at.timestamp())),
        ("Result kept until", PageCell(time=record.expires_at and record.expires_at.timestamp())),
        *((name.replace("_", " ").capitalize(), PageCell(getattr(record, name) or "")) for name in texts),
        ("Run in lineage", PageCell(record.run)),
    ]


_ATTEMPT_COLUMNS = (
    PageColumn("Attempt", is_number=True),
    PageColumn("Outcome"),
    PageColumn("Began"),
    PageColumn("Took"),
    PageColumn("Fence", is_number=True, is_wide=True),
)
_ENTRY_COLUMNS = (
    PageColumn("No.", is_number=True),
    PageColumn("Entry"),
    PageColumn("Attempt", is_number=True, is_wide=True),
    PageColumn("At"),
    PageColumn("Detail", is_wide=True),
)


def _attempts(entries: Sequence[Any], record: Any) -> list[list[PageCell]]:
    """The latest first."""
    by_attempt: dict[int, list[Any]] = {}
    for entry in entries:
        by_attempt.setdefault(entry.attempt, []).append(entry)
    rows = []
    for attempt, group in sorted(by_attempt.items(), reverse=True):
        ends = [entry for entry in group if entry.kind in ("success", "failure", "rollback", "reset")]
        error = ends and ends[-1].fields.get("error")
        took = format_span((group[-1].at - group[0].at) / 1e6) if ends else ""
        outcome = ends[-1].kind if ends else record.status
        rows.append(
            [
                PageCell(number=attempt),
                PageCell(state=outcome, note=error_text(error)),
                PageCell(time=group[0].at / 1e6),
                PageCell(took),
                PageCell(number=group[0].fence),
            ]
        )
    return rows


def _entries(entries: Sequence[Any]) -> list[list[PageCell]]:
    """In the order of their chain."""
    return [
        [
            PageCell(number=entry.number),
            PageCell(entry.kind, note=f"hash {entry.hash[:12]}"),
            PageCell(number=entry.attempt),
            PageCell(time=entry.at / 1e6),
            PageCell(one_line("" if entry.detail == "{}" else entry.detail)),
        ]
        for entry in entries
    ]


async def schedule_page(source: PageSource, query: Query) -> PageView:
    name, client = query.get("name", ""), source.client
    records = await source.call(client.schedules.list)
    record = next((record for record in records if record.name == name), None)
    runs = await source.rows(client.schedules.runs, name, limit=200) if record else ()
    audit = await source.rows(client.audit.list, limit=1000, max_bytes=MAX_BYTES)
    acts: list[tuple[str, dict[str, str]]] = []
    if record is not None:
        names = ("schedule.resume",) if record.paused else ("schedule.pause", "schedule.run", "schedule.skip")
        acts = [(command, {"name": name}) for command in names]
    at = time.time()
    panels = {
        "facts": facts("Now", _schedule_facts(record)),
        "actions": actions_panel(acts),
        "runs": table("Slots", _RUN_COLUMNS, _runs(runs), empty="No slot has been run or skipped yet."),
        "audit": _audit_table(audit, name),
    }
    return PageView("Schedule", at, panels, name)


def _schedule_facts(record: Any) -> list[tuple[str, PageCell]]:
    if record is None:
        return [("State", PageCell("no schedule has this name: it is stored when a process first runs it"))]
    return [
        ("State", PageCell(state=schedule_state(record), note=record.paused or "")),
        ("Every", PageCell(record.every)),
        ("Zone", PageCell(record.zone or "")),
        ("Next slot", PageCell(time=record.next_slot.timestamp()) if record.next_slot else PageCell()),
        *(("Running", _slot_cell(slot)) for slot in record.running),
    ]


_RUN_COLUMNS = (
    PageColumn("Slot"),
    PageColumn("Outcome"),
    PageColumn("Late"),
    PageColumn("Took", is_wide=True),
    PageColumn("Process", is_wide=True),
)


def _runs(runs: Sequence[Any]) -> list[list[PageCell]]:
    rows = []
    for run in runs:
        done = run.started_at is not None and run.ended_at is not None
        took = format_span((run.ended_at - run.started_at).total_seconds()) if done else ""
        late = "" if run.lateness is None else format_span(run.lateness)
        note = "" if run.status == "success" else describe_run(run)
        rows.append(
            [
                _slot_cell(run.slot),
                PageCell(state=run.status, note=note),
                PageCell(late),
                PageCell(took),
                PageCell(run.owner or "", is_name=True),
            ]
        )
    return rows


def _slot_cell(slot: Any) -> PageCell:
    """What runs once ever has the slot 0, which is no time to show."""
    return PageCell(time=slot.timestamp()) if slot.timestamp() else PageCell("once")


async def pool_page(source: PageSource, query: Query) -> PageView:
    name, client = query.get("name", ""), source.client
    leases = await source.call(client.leases.list)
    slots = _slots(leases, name)
    capacity = source.pools.get(name)
    rows = []
    for slot, lease in sorted(slots.items()):
        rows.append(
            [
                PageCell(number=slot, href=link("/lease", name=lease.name)),
                PageCell(lease.holder, is_name=True),
                PageCell(when=("for", lease.acquired_at.timestamp())),
                PageCell(number=lease.fence),
                lease_bar(lease),
                PageCell("release", action=link("/act/slot.release", pool=name, slot=str(slot))),
            ]
        )
    columns = (
        PageColumn("Slot", is_number=True),
        PageColumn("Owner"),
        PageColumn("Held for", is_wide=True),
        PageColumn("Fence", is_number=True, is_wide=True),
        PageColumn("Time left"),
        PageColumn("Action"),
    )
    counts = [
        ("Held", PageCell(number=len(slots))),
        ("Capacity", PageCell() if capacity is None else PageCell(number=capacity)),
        ("Waiting", PageCell(number=max((lease.waiting for lease in slots.values()), default=0))),
    ]
    sessions = [
        record
        for record in await source.rows(client.objects.list, "@session", limit=MAX_RECORDS, max_bytes=MAX_BYTES)
        if get_path(record.payload, "pool") == name
    ]
    panels = {
        "facts": facts("Now", counts),
        "slots": table("Slots", columns, rows, empty="No slot is held."),
        "sessions": table("Sessions of the gateway", _SESSION_COLUMNS, [_session_row(record) for record in sessions]),
    }
    return PageView("Slot pool", database_time(leases), panels, name)


_SESSION_COLUMNS = (
    PageColumn("Session"), PageColumn("State"), PageColumn("Slot", is_number=True), PageColumn("Changed", is_wide=True),
    PageColumn("Action"),
)  # fmt: skip


def _session_row(record: Any) -> list[PageCell]:
    slot, state = get_path(record.payload, "slot"), record_state(record.payload)
    can_end = state == "ACTIVE"
    return [
        PageCell(str(record.id), is_name=True),
        PageCell(state=state),
        PageCell(number=slot) if isinstance(slot, int) else PageCell(),
        PageCell(time=record.updated_at.timestamp()),
        PageCell("cancel", action=link("/act/session.cancel", id=str(record.id))) if can_end else PageCell(),
    ]


def _slots(leases: Sequence[Any], pool: str) -> dict[int, Any]:
    """The leases of the slots of a pool, by number."""
    prefix = f"{_SLOT}{pool}:"
    numbers = {lease.name.removeprefix(prefix): lease for lease in leases if lease.name.startswith(prefix)}
    return {int(number): lease for number, lease in numbers.items() if number.isdecimal()}


def lease_bar(lease: Any) -> PageCell:
    """The time left of a live lease."""
    ttl = lease.info.get("ttl")
    return PageCell(
        bar={
            "until": lease.expires_at.timestamp(), "ttl": float(ttl) if isinstance(ttl, int | float) else None,
            "is_bound": ends_with_process(lease.info),
        }
    )  # fmt: skip


def process_of(grant: Any) -> str:
    """Host and pid of a live lease or of a grant that has ended."""
    return " ".join(one_line(value) for value in (grant.host, grant.pid) if value is not None)


async def gather_evidence(source: PageSource, name: str) -> NamedRecords:
    """The records of everything that is called ``name``. Raises ValueError for a name that nothing can have."""
    client = source.client
    leases = await source.call(client.leases.list)
    schedules = await source.rows(client.schedules.list)
    relays = await source.rows(client.relays.list)
    locks = await source.rows(client.locks.list)
    return NamedRecords(
        name,
        database_time(leases),
        next((lease for lease in leases if lease.name == name), None),
        ended=await source.rows(client.leases.history, name, limit=1),
        locks=[lock for lock in locks if lock.label == name],
        **await _operation_evidence(source, name),
        schedule=next((record for record in schedules if record.name == name), None),
        pool=list(_slots(leases, name).values()),
        capacity=source.pools.get(name),
        relay=next((relay for relay in relays if relay.name == name), None),
    )


async def explain_page(source: PageSource, query: Query) -> PageView:
    name = query.get("name", "").strip()
    if not name:
        return PageView(
            "Explain", time.time(), {"findings": {"kind": "findings", "title": "", "findings": [], "name": ""}}
        )
    evidence = await gather_evidence(source, name)
    findings = [
        {"what": finding.what, "sentences": _stable(finding.sentences), "href": finding.href}
        for finding in explain(evidence)
    ]
    panel = {"kind": "findings", "title": "", "findings": findings, "name": name}
    return PageView("Explain", evidence.at, {"findings": panel}, name)


def audit_columns() -> tuple[PageColumn, ...]:
    return (
        PageColumn("At"),
        PageColumn("Actor"),
        PageColumn("Action"),
        PageColumn("Subject", is_wide=True),
        PageColumn("Reason"),
        PageColumn("Outcome"),
    )


def audit_row(entry: Any) -> list[PageCell]:
    outcome = entry.outcome or "under way"
    return [
        PageCell(time=entry.at.timestamp(), note=f"entry {entry.id}", href=link("/entry", id=str(entry.id))),
        PageCell(entry.actor, is_name=True),
        PageCell(entry.action),
        PageCell(entry.subject, is_name=True),
        PageCell(one_line(entry.reason)),
        PageCell(state=outcome.partition(":")[0], note=one_line(outcome.partition(":")[2])),
    ]


def _audit_table(entries: Sequence[Any], *subjects: str) -> Panel:
    """The entries about these subjects."""
    return table(
        "What operators did", audit_columns(), [audit_row(entry) for entry in entries if entry.subject in subjects]
    )
