"""When a schedule is due: its slots, from an interval or from a cron expression.

Pure: no database and no clock. A slot is a time in whole microseconds since 1970, so that every process computes the
same one. A change must keep this: the slots do not depend on where the computation begins.

    every 300 s                          the multiples of 300 s since 1970, in UTC
    "*/5 * * * *"  hour is *             every hour that passes has its slots, also both of a repeated one
    "30 2 * * *"   any other hour        the wall clock: a time that happens twice is one slot, the first one;
                                         a time that does not happen is a slot at the next instant
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
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
        start = datetime.fromtimestamp(after // SECOND, self.zone)
        for slot in _simulate(_by_the_clock(self.expression), start):
            # The second time that a clock shows 02:10, it is not later than the 02:30 that it showed the first time.
            if (at := int(slot.timestamp()) * SECOND) > after:
                yield at


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
    try:
        timetable.next_after(0)
    except RuntimeError:  # of the generator: the simulation has stopped
        raise ValueError(f"every={expression!r:.100} never fires: no date within 50 years matches it") from None
    return timetable


def _simulate(expression: str, start: datetime) -> CronSim:
    try:
        from cronsim import CronSim, CronSimError
    except ModuleNotFoundError as error:
        raise missing_extra(error, "cron") from error
    try:
        return CronSim(expression, start.astimezone(UTC) if start.tzinfo == ZoneInfo("UTC") else start)
    except CronSimError as error:
        raise ValueError(_cron_problem(expression, str(error))) from None


def _cron_problem(expression: str, problem: str) -> str:
    """cronsim reports a day that no month has as a bad day."""
    _, _, day, month, _ = expression.split()
    if problem == "Bad day-of-month" and day.isdecimal() and 30 <= int(day) <= 31:
        return f"every={expression!r:.100} never fires: month {month} has no day {day}"
    field = problem.removeprefix("Bad ").replace("-", " ")
    return f"every={expression!r:.100} is not a cron expression: its {field} is wrong"


def _by_the_clock(expression: str) -> str:
    """The expression as cronsim follows the wall clock for it. As Debian's cron does, it goes by the time that passes
    where the minute or the hour begins with a star; we do that for every hour alone, so that 02:30 is one slot."""
    minute, hour, *days = expression.split()
    if hour in ("*", "*/1"):
        return " ".join([minute, "*", *days])
    minute = f"0-59{minute[1:]}" if minute.startswith("*") else minute
    hour = f"0-23{hour[1:]}" if hour.startswith("*") else hour
    return " ".join([minute, hour, *days])
