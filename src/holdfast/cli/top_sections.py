"""The sections of `holdfast top`: what is read from the database, the rows that show it, and the details of one row.

It only reads. A release is the governed command that ``Row.release`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import holdfast
from holdfast.cli import leases, locks, ops, output, schedules, slots

if TYPE_CHECKING:
    from holdfast import Client, LockRecord

WAITER = "waiter of lease "
"""Of the name of the lock that a process holds while it waits for a lease."""
_INTERNAL_LOCKS = (WAITER, "waiter of a lease", "session of ", "session without a lease", "owner of operations")
_LED = ("elector", "relay")
"""Kinds of leases whose holder leads, and whose waiters stand by."""
_LIMIT = 200
"""Operations that are shown, of each status."""
_PAST = 20
"""Ended grants and runs in the details of a row."""

Cells = Sequence[object]
Table = tuple[str, Sequence[output.Column], Sequence[Cells]]
"""With its title."""


class Release(NamedTuple):
    """A governed command that frees what a row shows."""

    command: str
    parameters: Mapping[str, Any]
    lease: str
    fence: int
    description: str


class Row(NamedTuple):
    identity: object
    cells: Cells
    details: Callable[[], Details]
    release: Release | None = None
    depth: int = 0
    """In a tree. A row belongs to the last one before it that has a smaller depth."""


class Details(NamedTuple):
    title: str
    fields: Sequence[tuple[str, object]]
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Section:
    title: str
    summary: str
    """How many, or why it cannot be shown."""
    columns: Sequence[output.Column] = ()
    rows: Sequence[Row] = ()


@dataclass(frozen=True)
class Reading:
    """What was read, or why nothing was."""

    sections: Sequence[Section]
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    problem: str | None = None


class Sections:
    """Reads all sections of one database."""

    TITLES = ("Leaders", "Leases", "Locks", "Slots", "Operations", "Schedules")

    def __init__(self, client: Client, capacities: dict[str, int]) -> None:
        self.client = client
        self.shows_all = False
        """Whether holdfast's own leases and locks are shown, too."""
        self._capacities = capacities
        self._leases: list[dict[str, Any]] = []
        self._locks: list[LockRecord] = []

    def read(self) -> Reading:
        """Raises HoldfastError if the database does not answer, or has no leases. A section that this role may not read
        says so."""
        self._leases = [*map(leases.describe, self.client.leases.list())]
        self._locks = []
        with suppress(holdfast.Refused):  # reported by the section of locks
            self._locks = self.client.locks.list()
        readers = (
            self._read_leaders, self._read_leases, self._read_locks, self._read_slots, self._read_operations,
            self._read_schedules,
        )  # fmt: skip
        return Reading([self._read(title, reader) for title, reader in zip(self.TITLES, readers, strict=True)])

    def _read(self, title: str, reader: Callable[[], Section]) -> Section:
        try:
            return reader()
        except (holdfast.Unreachable, holdfast.Unanswered):
            raise
        except holdfast.HoldfastError as error:
            return Section(title, output.clean(error))

    def _read_leaders(self) -> Section:
        columns = (
            output.Column("leader of", 16), output.Column("leader", 12), output.Column("for"), output.Column("left"),
            output.Column("standbys", 8), output.Column("host", 20), output.Column("pid"), output.Column("fence"),
        )  # fmt: skip
        led = [lease for lease in self._leases if lease["kind"] in _LED]
        rows = [
            self._lease_row(
                lease,
                (lease["name"], lease["holder"], output.duration(lease["age"]), leases.time_left(lease),
                 self._waiters(lease) or output.state("none", "waits"), lease["host"], lease["pid"], lease["fence"]),
            )
            for lease in led
        ]  # fmt: skip
        return Section("Leaders", f"{len(led)}" if led else "no replica leads", columns, rows)

    def _waiters(self, lease: Mapping[str, Any]) -> str:
        """The processes that wait for a lease; how many, where they are not known."""
        names = {
            lock.holder or lock.role or "" for lock in self._locks if lock.name == f"{WAITER}{lease['name']}"
        }  # fmt: skip
        if len(names) >= lease["waiting"]:
            return ", ".join(sorted(names))
        return str(lease["waiting"])

    def _read_leases(self) -> Section:
        shown = [lease for lease in self._leases if self.shows_all or _is_plain(lease)]
        view = leases.view(lambda: shown)
        waiting = sum(lease["waiting"] for lease in shown)
        summary = view.count(shown) + (f", {waiting} waiting" if waiting else "")
        rows = [self._lease_row(lease, cells) for lease, cells in zip(shown, view.rows(shown), strict=True)]
        return Section("Leases", summary, view.columns, rows)

    def _lease_row(self, lease: dict[str, Any], cells: Cells, release: Release | None = None) -> Row:
        name, fence = lease["name"], lease["fence"]
        described = f"lease {name!r}, held by {lease['holder']}"
        release = release or Release("lease.release", {"name": name}, name, fence, described)

        def details() -> Details:
            fields = {**lease, "waiters": self._waiters(lease), "info": output.to_json(lease["info"], indent=None)}
            past = leases.history_table(self.client.leases.history(name, limit=_PAST))
            return Details(f"lease {name}", _as_fields(fields), [("Earlier holders, the latest first", *past)])

        return Row((name, fence), cells, details, release)

    def _read_locks(self) -> Section:
        records = self._locks or self.client.locks.list()
        shown = [lock for lock in records if self.shows_all or not (lock.name or "").startswith(_INTERNAL_LOCKS)]
        tree = list(lock_tree(shown))
        view = locks.view(lambda: shown)
        all_cells = view.rows([lock for lock, _ in tree])
        rows = [
            Row((lock.pid, lock.label, lock.granted, lock.mode), (_indent(cells[0], depth), *cells[1:]),
                self._lock_details(lock, shown), depth=depth)
            for (lock, depth), cells in zip(tree, all_cells, strict=True)
        ]  # fmt: skip
        return Section("Locks", view.count(shown), view.columns, rows)

    def _lock_details(self, lock: LockRecord, every: Sequence[LockRecord]) -> Callable[[], Details]:
        def details() -> Details:
            same = [other for other in every if other.pid == lock.pid or other.label == lock.label]
            view = locks.view(lambda: same)
            fields = [(name, value) for name, value in _as_fields(lock.as_dict()) if name != "label"]
            return Details(
                f"lock {lock.label}", fields, [("This lock, and all of its session", view.columns, view.rows(same))]
            )

        return details

    def _read_slots(self) -> Section:
        pools = slots.pools_of(self._leases, self._capacities)
        view = slots.view(lambda: pools)
        by_name = {lease["name"]: lease for lease in self._leases}
        rows = []
        for pool in pools:
            all_cells = view.rows([pool])
            for slot, cells in zip(pool["slots"], all_cells, strict=False):
                lease = by_name[f"{slots.PREFIX}{pool['pool']}:{slot['slot']}"]
                description = f"slot {slot['slot']} of {pool['pool']}, held by {slot['owner']}"
                which = {"pool": pool["pool"], "slot": slot["slot"]}
                release = Release("slot.release", which, lease["name"], lease["fence"], description)
                rows.append(self._lease_row(lease, cells, release))
            if not pool["slots"]:
                unused = Details(f"pool {pool['pool']}", _as_fields(pool))
                rows.append(Row((pool["pool"], None), all_cells[0], partial(_same, unused)))
        return Section("Slots", view.count(pools), view.columns, rows)

    def _read_operations(self) -> Section:
        records = [
            record
            for status in ("partial", "running")
            for record in self.client.operations.list(status=status, limit=_LIMIT)
        ]
        columns, all_cells = ops.operations_table(records)
        counts = [
            f"{count} {status}"
            for status in ("partial", "running")
            if (count := sum(record.status == status for record in records))
        ]
        rows = [
            Row(record.key, cells, self._operation_details(record))
            for record, cells in zip(records, all_cells, strict=True)
        ]
        return Section("Operations", ", ".join(counts) or "no operation is running or partial", columns, rows)

    def _operation_details(self, record: Any) -> Callable[[], Details]:
        def details() -> Details:
            latest = self.client.operations.find(record.key)
            entries = self.client.operations.history(record.key)
            [replayed] = self.client.operations.replay(record.key)
            return Details(
                f"operation {record.label}",
                ops.operation_fields(latest, replayed),
                [("Log", *ops.entries_table(entries))],
            )

        return details

    def _read_schedules(self) -> Section:
        records = [*map(schedules.as_dict, self.client.schedules.list())]
        view = schedules.view(lambda: records)
        rows = [
            Row(record["name"], cells, self._schedule_details(record))
            for record, cells in zip(records, view.rows(records), strict=True)
        ]
        return Section("Schedules", view.count(records), view.columns, rows)

    def _schedule_details(self, record: Mapping[str, Any]) -> Callable[[], Details]:
        def details() -> Details:
            last = record["last"] or {}
            fields = {**record, "last": last.get("status"), "output": last.get("note")}
            fields["running"] = ", ".join(map(output.format_time, record["running"]))
            runs = schedules.runs_table(self.client.schedules.runs(record["name"], limit=_PAST))
            return Details(f"schedule {record['name']}", _as_fields(fields), [("Runs, the latest first", *runs)])

        return details


def lock_tree(records: Iterable[LockRecord]) -> Iterator[tuple[LockRecord, int]]:
    """Each lock with its depth, in the order of a tree: below a holder come the sessions that wait for it; below a
    waiter those that wait behind it, and the locks that it holds itself. What waits in a circle comes last."""
    records = list(records)
    waiters: dict[str, list[LockRecord]] = {}
    held: dict[int | None, list[LockRecord]] = {}
    for lock in records:
        if lock.granted:
            held.setdefault(lock.pid, []).append(lock)
        else:
            waiters.setdefault(lock.label, []).append(lock)
    waiting = {lock.pid for lock in records if not lock.granted}
    yielded: set[int] = set()

    def walk(lock: LockRecord, depth: int) -> Iterator[tuple[LockRecord, int]]:
        if id(lock) in yielded:
            return
        yielded.add(id(lock))
        yield lock, depth
        behind = [waiter for waiter in waiters.get(lock.label, ()) if lock.pid in waiter.blocked_by]
        for child in (*behind, *(() if lock.granted else held.get(lock.pid, ()))):
            yield from walk(child, depth + 1)

    for root in sorted(records, key=lambda lock: not lock.granted or lock.pid in waiting):
        yield from walk(root, 0)


def _is_plain(lease: Mapping[str, Any]) -> bool:
    return lease["kind"] not in _LED and not lease["name"].startswith(leases.OWN_PREFIXES)


def _indent(label: object, depth: int) -> str:
    return f"{'  ' * (depth - 1)}└ {label}" if depth else str(label)


def _same(details: Details) -> Details:
    return details


def _as_fields(values: Mapping[str, Any]) -> list[tuple[str, object]]:
    """The fields that have a value, with times and durations as listings show them."""

    def as_text(name: str, value: object) -> object:
        if isinstance(value, datetime):
            return f"{output.format_time(value)} UTC"
        if name in ("age", "remaining", "duration", "overdue"):
            return output.duration(float(str(value)))
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value

    return [
        (name.replace("_", " "), as_text(name, value))
        for name, value in values.items()
        if value not in (None, "", [], ())
    ]
