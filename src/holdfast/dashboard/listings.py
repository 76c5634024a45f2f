"""The pages that list all rows of a kind: filtered, sorted and paged by their URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.dashboard.formats import error_text, format_span, link, one_line, record_name, record_state, sandbox_phase
from holdfast.dashboard.panels import schedule_state
from holdfast.dashboard.snapshot import MAX_BYTES, database_time, without_standbys
from holdfast.dashboard.source import MAX_READ, PageSource
from holdfast.dashboard.stream import PageView
from holdfast.dashboard.tables import PageCell, PageColumn, listing
from holdfast.dashboard.things import audit_columns, audit_row, lease_bar, process_of

Query = Mapping[str, str]
Row = list[PageCell]


def _columns(text: str) -> tuple[PageColumn, ...]:
    """``#``: a number; ``~``: left out on narrow screens."""
    return tuple(PageColumn(word.strip("#~"), "#" in word, "~" in word) for word in text.split(", "))


def _view(
    title: str, columns: str, records: Sequence[Any], build: Callable[[Any], Row], query: Query, empty: str, *,
    at: float | None = None, is_cut: bool = False,
) -> PageView:  # fmt: skip
    path = f"/{title.lower()}"
    panel = listing(title, _columns(columns), records, build, path, query, empty=empty, is_cut=is_cut)
    return PageView(title, time.time() if at is None else at, {"rows": panel})


async def leases_page(source: PageSource, query: Query) -> PageView:
    leases = await source.call(source.client.leases.list)
    columns = "Lease, Holder, Kind~, Held for, Fence#~, Waiting#~, Time left"
    empty = 'No lease is held. Acquire one with client.lease("name") in your program, or holdfast run NAME -- COMMAND.'
    return _view("Leases", columns, leases, _lease, query, empty, at=database_time(leases))


def _lease(lease: Any) -> Row:
    return [
        PageCell(lease.name, link("/lease", name=lease.name), is_name=True),
        PageCell(lease.holder, is_name=True, note=process_of(lease)), PageCell(lease.kind),
        PageCell(when=("for", lease.acquired_at.timestamp())), PageCell(number=lease.fence),
        PageCell(number=lease.waiting), lease_bar(lease),
    ]  # fmt: skip


async def history_page(source: PageSource, query: Query) -> PageView:
    """The grants that have ended."""
    ended = await source.call(source.client.leases.history, limit=MAX_READ)
    columns = "Lease, Holder, Outcome, Ended, Held for~, Fence#~"
    return _view("History", columns, ended, _grant, query, "No grant has ended yet.")


def _grant(grant: Any) -> Row:
    by = f"{grant.actor}: {one_line(grant.reason)}" if grant.actor else ""
    return [
        PageCell(grant.name, link("/lease", name=grant.name), is_name=True), PageCell(grant.holder, is_name=True),
        PageCell(state=grant.outcome, note=by), PageCell(time=grant.ended_at.timestamp()),
        PageCell(format_span((grant.ended_at - grant.acquired_at).total_seconds())), PageCell(number=grant.fence),
    ]  # fmt: skip


async def locks_page(source: PageSource, query: Query) -> PageView:
    locks = without_standbys(await source.call(source.client.locks.list))
    at = time.time()

    def build(lock: Any) -> Row:
        return [
            PageCell(lock.label, link("/lock", name=lock.label), is_name=True),
            PageCell(state="held" if lock.granted else "waits"), PageCell("" if lock.pid is None else str(lock.pid)),
            PageCell(one_line(lock.holder or lock.application_name), is_name=True), PageCell(lock.mode),
            PageCell(when=None if lock.duration is None else ("for", float(round(at - lock.duration)))),
            PageCell(", ".join(map(str, lock.blocked_by))),
        ]  # fmt: skip

    columns = "Lock, State, Session#, Client, Mode~, For, Behind~"
    return _view("Locks", columns, locks, build, query, 'No lock is held. In your program: client.lock("name").', at=at)


async def operations_page(source: PageSource, query: Query) -> PageView:
    records, is_cut = await source.bounded(source.client.operations.list, limit=MAX_READ, max_bytes=MAX_BYTES)
    columns = "Operation, Status, Attempt#~, Dataset~, Changed"
    empty = "No operation has run yet. Run one with client.operation(key).run(work)."
    return _view("Operations", columns, records, _operation, query, empty, is_cut=is_cut)


def _operation(record: Any) -> Row:
    note = error_text(record.error)
    return [
        PageCell(record.label, link("/operation", key=record.key), is_name=True, note=note),
        PageCell(state=record.status), PageCell(number=record.attempt), PageCell(record.dataset or ""),
        PageCell(when=("ago", record.updated_at.timestamp())),
    ]  # fmt: skip


async def schedules_page(source: PageSource, query: Query) -> PageView:
    records = await source.call(source.client.schedules.list)
    empty = "No schedule is stored. A process stores one when it first runs it: client.every(…)."
    return _view("Schedules", "Schedule, State, Every, Zone~, Next slot", records, _schedule, query, empty)


def _schedule(record: Any) -> Row:
    return [
        PageCell(record.name, link("/schedule", name=record.name), is_name=True),
        PageCell(state=schedule_state(record), note=record.paused or ""), PageCell(record.every),
        PageCell(record.zone or ""), PageCell(time=record.next_slot and record.next_slot.timestamp()),
    ]  # fmt: skip


async def audit_page(source: PageSource, query: Query) -> PageView:
    """What operators did."""
    entries, is_cut = await source.bounded(source.client.audit.list, limit=MAX_READ, max_bytes=MAX_BYTES)
    panel = listing(
        "Audit", audit_columns(), entries, audit_row, "/audit", query, empty="No operator has run a command yet.",
        is_cut=is_cut,
    )  # fmt: skip
    return PageView("Audit", time.time(), {"rows": panel})


async def objects_page(source: PageSource, query: Query) -> PageView:
    """The objects of a type: sandboxes and agents of a gateway, and a program's own."""
    kind = query.get("type", "")
    objects = source.client.objects
    records = await source.call(objects.list, kind, limit=MAX_READ, max_bytes=MAX_BYTES)
    is_cut = bool(records) and bool(await source.call(objects.list, kind, after=records[-1].id, limit=1))
    state = sandbox_phase if kind == "@sandbox" else record_state
    page = source.object_pages.get(kind, "")

    def build(record: Any) -> Row:
        href = link(page, id=str(record.id)) if page else ""
        return [
            PageCell(str(record.id), href, is_name=True), PageCell(record_name(record), is_name=True),
            PageCell(state=state(record.payload)), PageCell(number=record.version),
            PageCell(time=record.updated_at.timestamp()),
        ]  # fmt: skip

    empty = "There is no object of this type."
    columns = "Id, Name, State, Version#~, Changed"
    title = next((page.title for page in source.pages.values() if kind and page.type == kind), "Objects")
    panel = listing(title, _columns(columns), records, build, "/objects", query, empty=empty, is_cut=is_cut)
    return PageView(title, time.time(), {"rows": panel})


async def reviews_page(source: PageSource, query: Query) -> PageView:
    reviews, is_cut = await source.bounded(source.client.reviews.list, status=None, limit=MAX_READ, max_bytes=MAX_BYTES)
    columns = "Review#, Operation, Status, Cause, Opened~, Action"
    return _view("Reviews", columns, reviews[::-1], _review, query, "No operation has needed a review.", is_cut=is_cut)


def _review(review: Any) -> Row:
    decided = f"{review.actor}: {one_line(review.answer)}" if review.actor else ""
    action = link("/act/review.approve", number=str(review.id)) if review.status == "open" else ""
    return [
        PageCell(number=review.id), PageCell(review.label, link("/operation", key=review.key), is_name=True),
        PageCell(state=review.status, note=decided), PageCell(review.reason, note=one_line(review.detail)),
        PageCell(time=review.opened_at.timestamp()), PageCell("approve" if action else "", action=action),
    ]  # fmt: skip
