"""The records of schedules and of their runs, for listings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from holdfast.schedules.terms import ScheduleTerms, describe
from holdfast.schedules.timetable import SECOND
from holdfast.timestamps import as_datetime

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """What became of a slot, or of several that were skipped for one reason."""

    slot: datetime
    status: Literal["open", "success", "failure", "skipped"]
    """open: it runs, or is about to."""
    reason: str | None
    """Of a failure, the error. Of a skipped one: late | missed | overlap | paused | crash, or what an operator said."""
    attempt: int
    owner: str | None
    """The process of the last attempt."""
    started_at: datetime | None
    ended_at: datetime | None
    note: str | None
    until: datetime
    """The last slot of several that were skipped."""
    count: int
    """How many were skipped; 2001 means more than 2000."""

    @property
    def lateness(self) -> float | None:
        """Seconds from the slot to its first start; None before that, and for what runs once ever."""
        return (
            None
            if self.started_at is None or not self.slot.timestamp()
            else (self.started_at - self.slot).total_seconds()
        )

    @classmethod
    def _of(cls, row: Row) -> ScheduleRun:
        return cls(
            slot_time(row["slot"]), row["status"], row["reason"], row["attempt"], row["owner"],
            as_datetime(row["started_at"]), as_datetime(row["ended_at"]), row["note"], slot_time(row["until"]),
            row["count"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule in a listing."""

    name: str
    every: str
    zone: str | None
    """Of a cron expression."""
    paused: str | None
    """Who paused it, and why."""
    next_slot: datetime | None
    """The first slot that nothing has become of yet. In the past when no process runs the schedule. None: once ever, or
    unknown, because cronsim is not installed here."""
    overdue: float
    """Seconds since the next slot was due."""
    running: tuple[datetime, ...]
    """The slots that are open."""
    last: ScheduleRun | None
    """The last slot that was run or skipped."""

    @classmethod
    def _of(cls, row: Row, last: ScheduleRun | None, next_slot: int | None) -> ScheduleRecord:
        opens = json.loads(row["opens"] or "[]")
        overdue = 0.0 if next_slot is None or row["paused"] else max(0.0, (row["now"] - next_slot) / SECOND)
        return cls(
            row["name"], describe(row["every"], row["zone"]), row["zone"], row["paused"],
            None if next_slot is None else slot_time(next_slot), overdue, tuple(slot_time(slot) for slot, *_ in opens),
            last,
        )  # fmt: skip


def slot_time(slot: int) -> datetime:
    return as_datetime(slot / SECOND)


def operation_key(terms: ScheduleTerms, slot: int) -> str:
    """The key of the operation of a slot."""
    return f"schedule:{terms.name}:{slot}"
