"""When a schedule is due: its slots, from an interval or from a cron expression.

Pure: no database and no clock. A slot is a time in whole microseconds since 1970, so that every process computes the
same one. A change must keep this: the slots do not depend on where the computation begins.

    every 300 s                          the multiples of 300 s since 1970, in UTC
    "*/5 * * * *"  hour is *             each instant whose local time matches: a time that happens twice is two slots,
                                         a time that does not happen is none
    "30 2 * * *"   any other hour        the wall clock: a time that happens twice is one slot, the first one;
                                         a time that does not happen is a slot at the next instant

However far the clocks change: by an hour, by half an hour, across midnight.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple
from zoneinfo import ZoneInfo

from holdfast.extras import missing_extra

if TYPE_CHECKING:
    from cronsim import CronSim

SECOND = 1_000_000
MIN_INTERVAL, MAX_INTERVAL = SECOND // 10, 3660 * 86400 * SECOND
COUNT_LIMIT = 2000
"""Slots of a cron expression that are counted at most: a day and a half of one a minute."""


class DueSlots(NamedTuple):
    """The slots of a span of time."""

    first: int
    last: int
    size: int
    """COUNT_LIMIT + 1 when there are more than COUNT_LIMIT of a cron expression."""


class IntervalTimetable(NamedTuple):
    """A slot at each multiple of the interval since 1970."""

    interval: int

    def next_after(self, time: int) -> int:
        """The first slot later than that."""
        return (time // self.interval + 1) * self.interval

    def last_until(self, time: int) -> int:
        """The last slot that is not later than that."""
        return time // self.interval * self.interval

    def due(self, after: int, until: int) -> DueSlots | None:
        """The slots later than ``after`` and not later than ``until``; None when there is none."""
        first, last = self.next_after(after), until // self.interval * self.interval
        return DueSlots(first, last, (last - first) // self.interval + 1) if first <= last else None


class CronTimetable(NamedTuple):
    """The slots of a cron expression in a time zone."""

    expression: str
    zone: ZoneInfo

    def next_after(self, time: int) -> int:
        """The first slot later than that."""
        return next(self._slots(time))

    def last_until(self, time: int, since: int = 0) -> int:
        """The last slot that is not later than that; ``since`` when it has none after that."""
        span = 3600 * SECOND
        while True:  # from there backwards: since ``since`` there may be millions
            start = max(since, time - span)
            last = max(takewhile(lambda slot: slot <= time, self._slots(start)), default=since)
            if last > since or start == since:
                return last
            span *= 4

    def due(self, after: int, until: int) -> DueSlots | None:
        """The slots later than ``after`` and not later than ``until``; None when there is none."""
        first = last = self.next_after(after)
        if first > until:
            return None
        count = 0
        for slot in self._slots(after):
            if slot > until:
                return DueSlots(first, last, count)
            if count > COUNT_LIMIT:
                return DueSlots(first, self.last_until(until, first), count)
            last, count = slot, count + 1
        raise AssertionError("a cron expression has no last slot")

    def _slots(self, after: int) -> Iterator[int]:
        """All slots later than that."""
        start = datetime.fromtimestamp(after // SECOND, self.zone).replace(fold=0)
        first, second = _instants(start)
        if second > first:  # begin before the span that is repeated: the second slots of its times may still be due
            start -= timedelta(seconds=second - first)
        times = (time.replace(tzinfo=self.zone) for time in _simulate(self.expression, start.replace(tzinfo=None)))
        has_each_hour = self.expression.split()[1] in ("*", "*/1")
        for instant in _by_instant(times) if has_each_hour else _by_the_clock(times):
            if (at := instant * SECOND) > after:  # two times that do not happen may have the same next instant
                yield at
                after = at


Timetable = IntervalTimetable | CronTimetable


def parse_timetable(every: str | float | timedelta, zone: str = "UTC") -> Timetable:
    """The timetable of ``every``: seconds, a timedelta, or a cron expression, whose times are those of ``zone``.

    TypeError or ValueError when it is none of these, when it is too short, and when it is never due.
    """
    if isinstance(every, str):
        return _parse_cron(every, _parse_zone(zone))
    if isinstance(every, timedelta):
        interval = every // timedelta(microseconds=1)
    elif isinstance(every, bool) or not isinstance(every, int | float):
        raise TypeError(
            f"every must be a number of seconds, a timedelta or a cron expression, not {type(every).__name__}"
        )
    elif not MIN_INTERVAL <= every * SECOND <= MAX_INTERVAL:  # also true of NaN
        raise _bad_interval(f"{every!r} seconds")
    else:
        interval = round(every * SECOND)
    if not MIN_INTERVAL <= interval <= MAX_INTERVAL:
        raise _bad_interval(str(every))
    if zone != "UTC":
        raise ValueError(f"zone={zone!r} is for a cron expression: an interval has the same length everywhere")
    return IntervalTimetable(interval)


def _bad_interval(given: str) -> ValueError:
    return ValueError(f"every must be an interval from 0.1 seconds to 3660 days, not {given}")


def _parse_zone(zone: object) -> ZoneInfo:
    if not isinstance(zone, str):
        raise TypeError(f"zone must be a str such as 'Europe/Berlin', not {type(zone).__name__}")
    try:
        return ZoneInfo(zone)
    except (KeyError, ValueError, OSError):  # not found, not a name, a folder of zones
        raise ValueError(
            f"zone {zone!r} is not known: use an IANA name such as 'Europe/Berlin'; a system without time zones needs "
            "pip install tzdata"
        ) from None


def _parse_cron(expression: str, zone: ZoneInfo) -> CronTimetable:
    fields = expression.split()
    if len(fields) != 5:
        raise ValueError(
            f"every={expression!r:.100} is not a cron expression: it has {len(fields)} fields, and five are needed "
            "(minute, hour, day of the month, month, day of the week)"
        )
    timetable = CronTimetable(" ".join(fields), zone)
    if next(timetable._slots(0), None) is None:  # the simulation has stopped
        raise ValueError(f"every={expression!r:.100} never fires: no date within 50 years matches it")
    return timetable


def _simulate(expression: str, start: datetime) -> CronSim:
    """The local times later than ``start``, without a zone. cronsim has rules of its own for zones, and loses slots
    where clocks change by half an hour."""
    try:
        from cronsim import CronSim, CronSimError
    except ModuleNotFoundError as error:
        raise missing_extra(error, "cron") from error
    try:
        return CronSim(expression, start)
    except CronSimError as error:
        raise ValueError(_cron_problem(expression, str(error))) from None


def _instants(local: datetime) -> tuple[int, int]:
    """The first and the second instant of a local time that happens twice. They are the same if it happens once; if it
    does not happen, the second is less than the first."""
    return int(local.timestamp()), int(local.replace(fold=1).timestamp())


def _by_instant(times: Iterator[datetime]) -> Iterator[int]:
    """Each instant of each time, in order: the second instants of a span that is repeated follow all first ones."""
    repeated: list[int] = []
    for local in times:
        first, second = _instants(local)
        if second < first:
            continue
        while repeated and repeated[0] < first:
            yield repeated.pop(0)
        yield first
        if second > first:
            repeated.append(second)


def _by_the_clock(times: Iterator[datetime]) -> Iterator[int]:
    """The first instant of each time; of one that does not happen, the next instant."""
    for local in times:
        shown = local
        while (instants := _instants(shown))[1] < instants[0]:
            shown += timedelta(minutes=1)
        yield instants[0]


def _cron_problem(expression: str, problem: str) -> str:
    """cronsim reports a day that no month has as a bad day."""
    _, _, day, month, _ = expression.split()
    if problem == "Bad day-of-month" and day.isdecimal() and 30 <= int(day) <= 31:
        return f"every={expression!r:.100} never fires: month {month} has no day {day}"
    field = problem.removeprefix("Bad ").replace("-", " ")
    return f"every={expression!r:.100} is not a cron expression: its {field} is wrong"
