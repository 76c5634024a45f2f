"""The pages that list all rows of a kind: filtered, sorted and paged by their URL."""

from __future__ import annotations

import time
from collections.abc import Mapping

from holdfast.dashboard.formatting import format_span, link, one_line, record_name, record_state, sandbox_phase
from holdfast.dashboard.panels import schedule_state
from holdfast.dashboard.snapshot import database_time, is_standby
from holdfast.dashboard.source import PageSource
from holdfast.dashboard.stream import PageView
from holdfast.dashboard.tables import PageCell, PageColumn, Rows, listing
from holdfast.dashboard.things import audit_columns, audit_row

MAX_READ = 10_000
"""Rows that are read, of those with no bound of their own."""
Query = Mapping[str, str]


async def leases_page(source: PageSource, query: Query) -> PageView:
    leases = await source.call(source.client.leases.list)
    columns = (
        PageColumn("Lease"),
        PageColumn("Holder"),
        PageColumn("Kind", is_wide=True),
        PageColumn("Held for"),
        PageColumn("Fence", is_number=True, is_wide=True),
        PageColumn("Waiting", is_number=True, is_wide=True),
        PageColumn("Time left"),
    )
    rows = []
    for lease in leases:
        ttl = lease.info.get("ttl")
        place = " ".join(one_line(value) for value in (lease.host, lease.pid) if value is not None)
        rows.append(
            [
                PageCell(lease.name, link("/lease", name=lease.name), is_name=True),
                PageCell(lease.holder, is_name=True, note=place),
                PageCell(lease.kind),
                PageCell(when=("for", lease.acquired_at.timestamp())),
                PageCell(number=lease.fence),
                PageCell(number=lease.waiting),
                PageCell(
                    bar={
                        "until": lease.expires_at.timestamp(),
                        "ttl": float(ttl) if isinstance(ttl, int | float) else None,
                    }
                ),
            ]
        )
    empty = 'No lease is held. Acquire one with client.lease("name") in your program, or holdfast run NAME -- COMMAND.'
    panel = listing("Leases", columns, rows, "/leases", query, empty=empty)
    return PageView("Leases", database_time(leases), {"rows": panel})


async def history_page(source: PageSource, query: Query) -> PageView:
    ended = await source.call(source.client.leases.history, limit=MAX_READ)
    columns = (
        PageColumn("Lease"),
        PageColumn("Holder"),
        PageColumn("Outcome"),
        PageColumn("Ended"),
        PageColumn("Held for", is_wide=True),
        PageColumn("Fence", is_number=True, is_wide=True),
    )
    rows = [
        [
            PageCell(grant.name, link("/lease", name=grant.name), is_name=True),
            PageCell(grant.holder, is_name=True),
            PageCell(state=grant.outcome, note=f"{grant.actor}: {one_line(grant.reason)}" if grant.actor else ""),
            PageCell(time=grant.ended_at.timestamp()),
            PageCell(format_span((grant.ended_at - grant.acquired_at).total_seconds())),
            PageCell(number=grant.fence),
        ]
        for grant in ended
    ]
    panel = listing("Grants that have ended", columns, rows, "/history", query, empty="No grant has ended yet.")
    return PageView("History", time.time(), {"rows": panel})


async def locks_page(source: PageSource, query: Query) -> PageView:
    locks = [lock for lock in await source.call(source.client.locks.list) if not is_standby(lock)]
    at = time.time()
    columns = (
        PageColumn("Lock"),
        PageColumn("State"),
        PageColumn("Session", is_number=True),
        PageColumn("Client"),
        PageColumn("Mode", is_wide=True),
        PageColumn("For"),
        PageColumn("Behind", is_wide=True),
    )
    rows = [
        [
            PageCell(lock.label, link("/lock", name=lock.label), is_name=True),
            PageCell(state="held" if lock.granted else "waits"),
            PageCell() if lock.pid is None else PageCell(str(lock.pid)),
            PageCell(one_line(lock.holder or lock.application_name), is_name=True),
            PageCell(lock.mode),
            PageCell() if lock.duration is None else PageCell(when=("for", float(round(at - lock.duration)))),
            PageCell(", ".join(map(str, lock.blocked_by))),
        ]
        for lock in locks
    ]
    empty = 'No lock is held. In your program: client.lock("name").'
    return PageView("Locks", at, {"rows": listing("Locks", columns, rows, "/locks", query, empty=empty)})


async def operations_page(source: PageSource, query: Query) -> PageView:
    records = await source.call(source.client.operations.list, limit=MAX_READ)
    columns = (
        PageColumn("Operation"),
        PageColumn("Status"),
        PageColumn("Attempt", is_number=True, is_wide=True),
        PageColumn("Dataset", is_wide=True),
        PageColumn("Changed"),
    )
    rows = [
        [
            PageCell(
                record.label,
                link("/operation", key=record.key),
                is_name=True,
                note=one_line((record.error or {}).get("message")),
            ),
            PageCell(state=record.status),
            PageCell(number=record.attempt),
            PageCell(record.dataset or ""),
            PageCell(when=("ago", record.updated_at.timestamp())),
        ]
        for record in records
    ]
    empty = "No operation has run yet. Run one with client.operation(key).run(work)."
    panel = listing("Operations", columns, rows, "/operations", query, empty=empty, is_cut=len(records) >= MAX_READ)
    return PageView("Operations", time.time(), {"rows": panel})


async def schedules_page(source: PageSource, query: Query) -> PageView:
    records = await source.call(source.client.schedules.list)
    columns = (
        PageColumn("Schedule"),
        PageColumn("State"),
        PageColumn("Every"),
        PageColumn("Zone", is_wide=True),
        PageColumn("Next slot"),
    )
    rows = [
        [
            PageCell(record.name, link("/schedule", name=record.name), is_name=True),
            PageCell(state=schedule_state(record), note=record.paused or ""),
            PageCell(record.every),
            PageCell(record.zone or ""),
            PageCell(time=record.next_slot.timestamp()) if record.next_slot else PageCell(),
        ]
        for record in records
    ]
    empty = "No schedule is stored. A process stores one when it first runs it: client.every(…)."
    panel = listing("Schedules", columns, rows, "/schedules", query, empty=empty)
    return PageView("Schedules", time.time(), {"rows": panel})


async def audit_page(source: PageSource, query: Query) -> PageView:
    entries = await source.call(source.client.audit.list, limit=MAX_READ)
    rows: Rows = []
    for entry in entries:
        first, *rest = audit_row(entry)
        rows.append([PageCell(time=first.time, note=first.note, href=link("/entry", id=str(entry.id))), *rest])
    panel = listing(
        "What operators did",
        audit_columns(),
        rows,
        "/audit",
        query,
        is_cut=len(entries) >= MAX_READ,
        empty="No operator has run a command yet.",
    )
    return PageView("Audit", time.time(), {"rows": panel})


async def objects_page(source: PageSource, query: Query) -> PageView:
    """The objects of a type: sandboxes and agents of a gateway, and a program's own."""
    kind = query.get("type", "")
    records = await source.call(source.client.objects.list, kind, limit=MAX_READ)
    state = sandbox_phase if kind == "sandbox" else record_state
    columns = (
        PageColumn("Id"),
        PageColumn("Name"),
        PageColumn("State"),
        PageColumn("Version", is_number=True, is_wide=True),
        PageColumn("Changed"),
    )
    rows = [
        [
            PageCell(str(record.id), is_name=True),
            PageCell(record_name(record), is_name=True),
            PageCell(state=state(record.payload)),
            PageCell(number=record.version),
            PageCell(time=record.updated_at.timestamp()),
        ]
        for record in records
    ]
    panel = listing(
        "Objects",
        columns,
        rows,
        "/objects",
        query,
        empty="There is no object of this type.",
        is_cut=len(records) >= MAX_READ,
    )
    return PageView("Objects", time.time(), {"rows": panel}, kind)


async def reviews_page(source: PageSource, query: Query) -> PageView:
    reviews = await source.call(source.client.reviews.list, status=None, limit=MAX_READ)
    columns = (
        PageColumn("Review", is_number=True),
        PageColumn("Operation"),
        PageColumn("Status"),
        PageColumn("Cause"),
        PageColumn("Opened", is_wide=True),
        PageColumn("Action"),
    )
    rows = [
        [
            PageCell(number=review.id),
            PageCell(review.label, link("/operation", key=review.key), is_name=True),
            PageCell(state=review.status, note=f"{review.actor}: {one_line(review.answer)}" if review.actor else ""),
            PageCell(review.reason, note=one_line(review.detail)),
            PageCell(time=review.opened_at.timestamp()),
            PageCell("approve", action=link("/act/review.approve", number=str(review.id)))
            if review.status == "open"
            else PageCell(),
        ]
        for review in reversed(reviews)
    ]
    panel = listing("Reviews", columns, rows, "/reviews", query, empty="No operation has needed a review.")
    return PageView("Reviews", time.time(), {"rows": panel})
