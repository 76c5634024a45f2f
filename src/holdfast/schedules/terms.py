"""The decisions of schedules: their checked arguments, which slots run and which are skipped, and when the next is due.

Pure: no database and no clock. Times are microseconds since 1970, by the clock of the database.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Literal, NamedTuple, TypedDict

from holdfast.names import check_count, check_name, check_seconds
from holdfast.schedules.timetable import SECOND, CronTimetable, DueSlots, IntervalTimetable, Timetable, parse_timetable

Misfire = Literal["skip", "once", "all"]
OnCrash = Literal["retry", "skip"]
Reason = Literal["late", "missed", "overlap", "paused"]

NAME_LENGTH = 150
"""Characters of a name: it is part of the keys of operations."""
DEFAULT_MAX_LATE = 60.0
"""Seconds, where a slot that was missed is skipped."""
MAX_ATTEMPTS = 10
"""Attempts of one slot whose processes die: work that kills its process must not end one replica after the other."""
LONGEST = 366 * 86400.0
ONCE = "once"
"""What is stored as the timetable of what runs once ever. Its slot is 0."""


class ScheduleArguments(TypedDict, total=False):
    """The arguments of ``client.schedule(…)`` that ``client.every(…)`` passes on."""

    zone: str
    misfire: Misfire
    max_late: float | None
    jitter: float
    tx: Any
    on_crash: OnCrash
    overlap: int


class Skip(NamedTuple):
    """Slots that do not run, for one reason."""

    first: int
    last: int
    size: int
    reason: Reason


class Plan(NamedTuple):
    """How a schedule moves on: to ``cursor``, with these slots skipped, and with ``slot`` to run, or None."""

    cursor: int
    skips: tuple[Skip, ...]
    slot: int | None


class ScheduleTerms(NamedTuple):
    """The arguments of ``client.schedule(…)``, checked."""

    name: str
    timetable: Timetable | None
    """None: once ever."""
    misfire: Misfire
    max_late: float | None
    """As it was given."""
    jitter: float
    on_crash: OnCrash
    overlap: int

    @classmethod
    def check(
        cls, name: str, timetable: Timetable | None, *, misfire: Misfire, max_late: float | None, jitter: float,
        on_crash: OnCrash, overlap: int, has_tx: bool,
    ) -> ScheduleTerms:  # fmt: skip
        """ValueError or TypeError when an argument is wrong."""
        if misfire not in ("skip", "once", "all"):
            raise ValueError(f"misfire must be 'skip', 'once' or 'all', not {misfire!r}")
        if on_crash not in ("retry", "skip"):
            raise ValueError(f"on_crash must be 'retry' or 'skip', not {on_crash!r}")
        if on_crash == "skip" and has_tx:
            raise ValueError(
                "on_crash='skip' is for effects outside of the database: with tx= a run that crashed has left none, "
                "and runs again; max_late= limits until when"
            )
        check_seconds(jitter, "jitter", 0.0, LONGEST)
        if isinstance(timetable, IntervalTimetable) and jitter * SECOND > timetable.interval:
            raise ValueError(f"jitter={jitter!r} is longer than the interval: slots would begin in another order")
        return cls(
            check_name(name, limit=NAME_LENGTH), timetable, misfire,
            None if max_late is None else check_seconds(max_late, "max_late", 0.001, LONGEST),
            float(jitter), on_crash, check_count(overlap, 1, "overlap"),
        )  # fmt: skip

    def stored(self) -> tuple[str, str | None]:
        """How the timetable is stored."""
        return stored(self.timetable)

    def delay(self, slot: int) -> int:
        """How much later than the slot it begins: the same in every process."""
        if not self.jitter:
            return 0
        part = int.from_bytes(sha256(f"{self.name}:{slot}".encode()).digest()[:6], "big") / 2**48
        return int(part * self.jitter * SECOND)

    def next_at(self, timetable: Timetable, cursor: int) -> int:
        """When the next slot begins."""
        slot = timetable.next_after(cursor)
        return slot + self.delay(slot)

    def lateness(self, slot: int, now: int) -> float:
        """Seconds since the slot should have begun; 0 for what runs once ever."""
        return 0.0 if self.timetable is None else max(0.0, (now - slot - self.delay(slot)) / SECOND)

    def is_late(self, slot: int, now: int) -> bool:
        """Whether it may not begin any more, for ``max_late`` as it was given."""
        return self.max_late is not None and now - slot - self.delay(slot) > self.max_late * SECOND


def stored(timetable: Timetable | None) -> tuple[str, str | None]:
    if timetable is None:
        return ONCE, None
    if isinstance(timetable, CronTimetable):
        return timetable.expression, timetable.zone.key
    return str(timetable.interval), None


def parse_stored(every: str, zone: str | None) -> Timetable | None:
    """The timetable of a row."""
    if zone is not None:
        return parse_timetable(every, zone)
    return None if every == ONCE else parse_timetable(int(every) / SECOND)


def describe(every: str, zone: str | None) -> str:
    """The stored timetable for people."""
    if zone is not None:
        return every
    return ONCE if every == ONCE else f"{int(every) / SECOND:.15g} s"


def plan(
    terms: ScheduleTerms, timetable: Timetable, cursor: int, now: int, *, is_paused: bool, is_full: bool
) -> Plan | None:
    """What to do with the slots after ``cursor`` that are due; None when there is nothing to do at this time.

    ``is_full``: so many slots run as ``overlap`` allows.
    """
    due = timetable.due(cursor, now)
    while due is not None and due.last + terms.delay(due.last) > now:
        due = timetable.due(cursor, due.last - 1)
    if due is None:
        return None
    if is_paused:
        return Plan(due.last, (Skip(*due, "paused"),), None)
    max_late = terms.max_late
    if max_late is None and terms.misfire == "skip":
        max_late = DEFAULT_MAX_LATE
    late = (
        None
        if max_late is None
        else timetable.due(cursor, min(now - int((max_late + terms.jitter) * SECOND), due.last + 1) - 1)
    )
    skips = () if late is None else (Skip(*late, "late"),)
    reached = cursor if late is None else late.last
    rest = timetable.due(reached, due.last)
    if rest is None:
        return Plan(due.last, skips, None)
    if is_full and terms.misfire != "skip":  # the rest waits
        return Plan(reached, skips, None) if skips else None
    if terms.misfire == "all":
        return Plan(rest.first, skips, rest.first)
    earlier: DueSlots | None = timetable.due(reached, rest.last - 1)
    if earlier is not None:
        skips = (*skips, Skip(*earlier, "missed"))
    if is_full:
        return Plan(rest.last, (*skips, Skip(rest.last, rest.last, 1, "overlap")), None)
    return Plan(rest.last, skips, rest.last)
