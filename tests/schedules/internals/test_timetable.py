"""The slots of a schedule: none is lost and none repeated, wherever the computation begins, also when clocks change."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from itertools import pairwise, takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from holdfast.schedules.timetable import COUNT_LIMIT, SECOND, CronTimetable, DueSlots, parse_timetable

YEAR = 2027
START, END = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) * SECOND for year in (YEAR, YEAR + 1))
ZONES = ("Europe/Berlin", "America/New_York", "America/Santiago", "Australia/Lord_Howe")
"""Berlin's clocks skip 02:00 to 03:00, and show 02:00 to 03:00 twice; New York's show 01:00 to 02:00 twice; Santiago's
skip 00:00 to 01:00, and show 23:00 to 24:00 twice; Lord Howe's change by half an hour."""
DAYS: dict[str, Callable[[date], bool]] = {
    "* * *": lambda _: True,
    "1,15 * *": lambda day: day.day in (1, 15),
    "* * SUN": lambda day: day.weekday() == 6,
    "1-7 3,4,10,11 *": lambda day: day.day <= 7 and day.month in (3, 4, 10, 11),
    "13 * FRI": lambda day: day.day == 13 or day.weekday() == 4,
}


@cache
def grid(zone: str) -> list[tuple[int, int, date]]:
    """Every five minutes that pass in the year: time, local minute, local day."""
    locals_ = ((at, datetime.fromtimestamp(at / SECOND, ZoneInfo(zone))) for at in range(START, END, 300 * SECOND))
    return [(at, local.minute, local.date()) for at, local in locals_]


def shown_first(zone: str, naive: datetime) -> int:
    """When a clock first shows that time, or the next minute that it does show."""
    while True:
        local = naive.replace(tzinfo=ZoneInfo(zone))
        if local.astimezone(UTC).astimezone(local.tzinfo).replace(tzinfo=None) == naive:
            return int(local.timestamp()) * SECOND
        naive += timedelta(minutes=1)


@cache
def expected(zone: str, hours: tuple[int, ...] | None, minutes: tuple[int, ...], days: str) -> list[int]:
    """The slots of the year, by brute force. ``hours``: None for "*"."""
    matches = DAYS[days]
    if hours is None:
        return [at for at, minute, day in grid(zone) if minute in minutes and matches(day)]
    dates = [date(YEAR, 1, 1) + timedelta(days=number) for number in range(-1, 367)]
    times = [datetime.combine(day, time(h, m)) for day in dates if matches(day) for h in hours for m in minutes]
    return sorted({at for at in (shown_first(zone, each) for each in times) if START <= at < END})


numbers = st.sets(st.sampled_from(range(0, 60, 5)), min_size=1, max_size=3).map(lambda some: tuple(sorted(some)))
hours = st.none() | st.sets(st.sampled_from([0, 1, 2, 3, 4, 23]), min_size=1, max_size=3).map(
    lambda some: tuple(sorted(some))
)


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@example("Australia/Lord_Howe", None, (35,), "* * *", [])
@example("Australia/Lord_Howe", None, (15, 35), "* * SUN", [])
@example("Australia/Lord_Howe", (2,), (15,), "* * *", [])
@example("America/Santiago", None, (0,), "* * SUN", [])
@example("America/Santiago", (0, 23), (30,), "* * SUN", [])
@given(
    st.sampled_from(ZONES), hours, numbers, st.sampled_from(list(DAYS)), st.lists(st.integers(START, END), max_size=12)
)
def test_slots_of_a_year_are_those_of_brute_force_from_any_start(
    zone: str, hours: tuple[int, ...] | None, minutes: tuple[int, ...], days: str, starts: list[int]
) -> None:
    def field(values: tuple[int, ...] | None) -> str:
        return "*" if values is None else ",".join(map(str, values))

    timetable = parse_timetable(f"{field(minutes)} {field(hours)} {days}", zone)
    slots = expected(zone, hours, minutes, days)
    assert isinstance(timetable, CronTimetable)
    assert list(takewhile(lambda slot: slot < END, timetable._slots(START - 1))) == slots
    for start in starts:
        place = bisect.bisect_right(slots, start)
        if place < len(slots):
            assert timetable.next_after(start) == slots[place]
    for start, end in pairwise(sorted(starts)):
        first, last = bisect.bisect_right(slots, start), bisect.bisect_right(slots, end) - 1
        due = timetable.due(start, end)
        count = min(last - first + 1, COUNT_LIMIT + 1)
        assert due == (DueSlots(slots[first], slots[last], count) if count else None)


@settings(max_examples=50)
@given(st.integers(SECOND // 10, 400 * 86400 * SECOND), st.integers(0, END), st.integers(0, 10**16))
def test_slots_of_an_interval_are_its_multiples(interval: int, after: int, span: int) -> None:
    timetable = parse_timetable(timedelta(microseconds=interval))
    slot = timetable.next_after(after)
    assert slot % interval == 0
    assert 0 < slot - after <= interval
    due = timetable.due(after, after + span)
    assert (due is None) == (slot > after + span)
    if due is not None:
        assert due == DueSlots(slot, slot + (due.size - 1) * interval, due.size)
        assert due.last <= after + span < due.last + interval


@pytest.mark.parametrize(
    ("every", "zone", "day", "local"),
    [
        ("30 2 * * *", "Europe/Berlin", date(2027, 3, 28), ["03:00+02:00"]),  # it does not happen
        ("30 2 * * *", "Europe/Berlin", date(2027, 10, 31), ["02:30+02:00"]),  # it happens twice
        ("*/30 2 * * *", "Europe/Berlin", date(2027, 10, 31), ["02:00+02:00", "02:30+02:00"]),
        ("30 */2 1-3 * *", "Europe/Berlin", date(2027, 10, 31), []),
        ("30 2,3 * * *", "Europe/Berlin", date(2027, 3, 28), ["03:00+02:00", "03:30+02:00"]),
        ("15,45 2 * * *", "Australia/Lord_Howe", date(2027, 10, 3), ["02:30+11:00", "02:45+11:00"]),
        ("35 1 * * *", "Australia/Lord_Howe", date(2027, 4, 4), ["01:35+11:00"]),
        ("35 0-2 * * *", "Australia/Lord_Howe", date(2027, 4, 4), ["00:35+11:00", "01:35+11:00", "02:35+10:30"]),
    ],
)  # fmt: skip
def test_a_time_that_happens_twice_or_never_is_one_slot(every: str, zone: str, day: date, local: list[str]) -> None:
    assert slots_of_day(every, zone, day) == local


@pytest.mark.parametrize(
    ("every", "zone", "day", "local"),
    [
        ("35 * * * *", "Australia/Lord_Howe", date(2027, 4, 4),
         ["00:35+11:00", "01:35+11:00", "01:35+10:30", "02:35+10:30"]),
        ("35 * * * *", "Australia/Lord_Howe", date(2027, 10, 3), ["01:35+10:30", "02:35+11:00", "03:35+11:00"]),
        ("15 * * * *", "Australia/Lord_Howe", date(2027, 10, 3), ["01:15+10:30", "03:15+11:00"]),
        ("35 * * * *", "Europe/Berlin", date(2027, 10, 31), ["02:35+02:00", "02:35+01:00"]),
        ("35 * * * *", "Europe/Berlin", date(2027, 3, 28), ["01:35+01:00", "03:35+02:00"]),
    ],
)  # fmt: skip
def test_with_every_hour_a_time_that_happens_twice_is_two_slots_and_one_that_never_does_is_none(
    every: str, zone: str, day: date, local: list[str]
) -> None:
    slots = slots_of_day(every, zone, day)
    first = slots.index(local[0])
    assert slots[first : first + len(local)] == local


def slots_of_day(every: str, zone: str, day: date) -> list[str]:
    """The local times of a day, each computed from the one before."""
    midnight, next_midnight = (
        int(datetime(each.year, each.month, each.day, tzinfo=ZoneInfo(zone)).timestamp()) * SECOND
        for each in (day, day + timedelta(days=1))
    )
    timetable, found, at = parse_timetable(every, zone), [], midnight - 1
    while (at := timetable.next_after(at)) < next_midnight:
        found.append(
            datetime.fromtimestamp(at / SECOND, ZoneInfo(zone)).isoformat(timespec="minutes").partition("T")[2]
        )
    return found


@pytest.mark.parametrize(
    ("every", "zone", "message"),
    [
        ("0 0 30 2 *", "UTC", "never fires: month 2 has no day 30"),
        ("0 0 31 2,4,6 *", "UTC", "never fires"),
        ("0 0 */8 2 MON#5", "UTC", "never fires: no date within 50 years matches it"),
        ("0 0 29 2 MON#4", "UTC", None),
        ("0 3 * * * *", "UTC", "it has 6 fields, and five are needed"),
        ("60 3 * * *", "UTC", "its minute is wrong"),
        ("0 3 * * nope", "UTC", "its day of week is wrong"),
        ("0 3 * * *", "Mars/Base", "zone 'Mars/Base' is not known"),
        ("0 3 * * *", "Europe", "zone 'Europe' is not known"),
        (0.09, "UTC", "from 0.1 seconds to 3660 days, not 0.09 seconds"),
        (timedelta(milliseconds=99), "UTC", "from 0.1 seconds"),
        (float("nan"), "UTC", "not nan seconds"),
        (1e12, "UTC", "to 3660 days"),
        (60, "Europe/Berlin", "zone='Europe/Berlin' is for a cron expression"),
    ],
)
def test_bad_input_is_refused_with_the_reason(every: str | float | timedelta, zone: str, message: str | None) -> None:
    if message is None:  # rare, but it does fire
        assert parse_timetable(every, zone).next_after(START) > START
        return
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_timetable(every, zone)


def test_what_is_no_interval_and_no_expression_is_refused() -> None:
    for wrong in (True, None, [1]):
        with pytest.raises(TypeError, match="every must be a number of seconds, a timedelta or a cron expression"):
            parse_timetable(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="zone must be a str"):
        parse_timetable("0 3 * * *", 2)  # type: ignore[arg-type]
