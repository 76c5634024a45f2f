"""Whatever the policy, the zone, the pauses and the restarts: each slot gets exactly one fate, in order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.schedules.terms import (
    DEFAULT_MAX_LATE,
    Misfire,
    ScheduleTerms,
    Skip,
    describe,
    parse_stored,
    plan,
    stored,
)
from holdfast.schedules.timetable import SECOND, parse_timetable

BEGIN = 1_806_278_400 * SECOND
"""A day before the clocks of Berlin go forward."""
TIMETABLES = [("17 s", ""), ("*/20 * * * *", "Europe/Berlin"), ("30 2 * * *", "Europe/Berlin")]


def terms(timetable: Any, **options: Any) -> ScheduleTerms:
    defaults = {"misfire": "skip", "max_late": None, "jitter": 0.0, "on_crash": "retry", "overlap": 1, "has_tx": False}
    return ScheduleTerms.check("nightly", timetable, **(defaults | options))


steps = st.lists(
    st.tuples(st.integers(1, 200_000) | st.integers(1, 60), st.booleans(), st.booleans()), min_size=1, max_size=12
)
"""Seconds that pass, whether it is paused by then, and whether so many slots run as may."""


@settings(max_examples=80)
@given(
    st.sampled_from(TIMETABLES), st.sampled_from(["skip", "once", "all"]), st.none() | st.sampled_from([30.0, 7200.0]),
    st.sampled_from([0.0, 5.0]), steps,
)  # fmt: skip
def test_each_slot_runs_or_is_skipped_once_in_order(
    every: tuple[str, str],
    misfire: Misfire,
    max_late: float | None,
    jitter: float,
    passed: list[tuple[int, bool, bool]],
) -> None:
    timetable = parse_timetable(timedelta(seconds=17)) if every[0] == "17 s" else parse_timetable(*every)
    if every[0] == "17 s":
        passed = [(seconds % 400 + 1, is_paused, is_full) for seconds, is_paused, is_full in passed]
    checked = terms(timetable, misfire=misfire, max_late=max_late, jitter=jitter)
    cursor, now = BEGIN, BEGIN
    fates: list[int] = []
    for seconds, is_paused, is_full in passed:  # nothing but the cursor is remembered from one to the next: a restart
        now += seconds * SECOND
        while (todo := plan(checked, timetable, cursor, now, is_paused=is_paused, is_full=is_full)) is not None:
            new: list[int] = []
            for skip in todo.skips:
                at = skip.first - 1
                while (at := timetable.next_after(at)) <= skip.last:
                    new.append(at)
                assert new[-1] == skip.last
                assert skip.reason != "paused" or is_paused
            if todo.slot is not None:
                assert not is_paused
                assert not is_full
                assert todo.slot + checked.delay(todo.slot) <= now
                limit = max_late or (DEFAULT_MAX_LATE if misfire == "skip" else None)
                assert limit is None or now - todo.slot <= (limit + jitter) * SECOND
                new.append(todo.slot)
            assert new == sorted(set(new))
            assert todo.cursor == new[-1] > cursor
            fates += new
            cursor = todo.cursor
        if not is_full or misfire == "skip":
            assert checked.next_at(timetable, cursor) > now, "everything that is due was dealt with"
    at, expected = BEGIN, []
    while (at := timetable.next_after(at)) <= cursor:
        expected.append(at)
    assert fates == expected


def test_a_policy_says_what_becomes_of_missed_slots() -> None:
    timetable = parse_timetable(10)
    now = BEGIN + 35 * SECOND
    first, last = BEGIN + 10 * SECOND, BEGIN + 30 * SECOND
    missed = (Skip(first, last - 10 * SECOND, 2, "missed"),)

    def planned(**options: Any) -> Any:
        return plan(terms(timetable, **options), timetable, BEGIN, now, is_paused=False, is_full=False)

    assert planned() == (last, missed, last)
    assert planned(misfire="once") == (last, missed, last)
    assert planned(misfire="all") == (first, (), first)
    assert planned(misfire="all", max_late=20) == (
        first + 10 * SECOND,
        (Skip(first, first, 1, "late"),),
        first + 10 * SECOND,
    )
    assert planned(max_late=1) == (last, (Skip(first, last, 3, "late"),), None)


def test_jitter_is_the_same_in_every_process_and_spreads_the_slots() -> None:
    delays = [terms(parse_timetable(60), jitter=20.0).delay(slot * 60 * SECOND) for slot in range(200)]
    assert delays == [terms(parse_timetable(60), jitter=20.0).delay(slot * 60 * SECOND) for slot in range(200)]
    assert 0 <= min(delays) < 2 * SECOND
    assert 18 * SECOND < max(delays) < 20 * SECOND


def test_a_stored_timetable_is_read_as_it_was_written() -> None:
    for timetable in (parse_timetable(0.25), parse_timetable("*/5 2 * * *", "Europe/Berlin"), None):
        assert parse_stored(*stored(timetable)) == timetable
    assert describe(*stored(parse_timetable(0.25))) == "0.25 s"
    assert describe(*stored(parse_timetable("0  3 * * *"))) == "0 3 * * *"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"misfire": "none"}, "misfire must be 'skip', 'once' or 'all'"),
        ({"on_crash": "ignore"}, "on_crash must be 'retry' or 'skip'"),
        ({"on_crash": "skip", "has_tx": True}, "with tx= a run that crashed has left none"),
        ({"overlap": 0}, "overlap must be 1 or more"),
        ({"max_late": 0}, "max_late must be between 0.001"),
        ({"jitter": -1}, "jitter must be between 0"),
        ({"jitter": 1.5}, "jitter=1.5 is longer than the interval"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        terms(parse_timetable(1), **options)
    with pytest.raises(ValueError, match="name must have 1 to 150 characters"):
        ScheduleTerms.check(
            "x" * 151, None, misfire="skip", max_late=None, jitter=0.0, on_crash="retry", overlap=1, has_tx=False
        )
