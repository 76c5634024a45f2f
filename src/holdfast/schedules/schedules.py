# Generated from schedules_async.py by scripts/unasync.py. Do not edit.
"""``client.schedules``: run many at once; list them and their runs; pause, resume, order or skip runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from holdfast.database.connections.connection import recognise
from holdfast.database.engine import Engine
from holdfast.names import check_count, check_limit, check_name, check_said
from holdfast.operations.operations import Operations
from holdfast.schedules.records import ScheduleRecord, ScheduleRun, slot_time
from holdfast.schedules.schedule import Schedule, is_factory
from holdfast.schedules.terms import Misfire, OnCrash, ScheduleTerms, Skip, parse_stored
from holdfast.schedules.timetable import SECOND, Timetable, parse_timetable

Records = list[ScheduleRecord]
Runs = list[ScheduleRun]
Rows = list[Any]


class Schedules:
    """All schedules of a database. ``client.schedule(…)`` makes one."""

    def __init__(self, engine: Engine, operations: Operations) -> None:
        self._engine, self._operations = engine, operations

    def run(self, schedules: Iterable[Schedule], *, concurrency: int = 32, signals: bool = False) -> None:
        """Run many schedules, which ``client.every(…)`` made, with one wait and at most ``concurrency`` runs at once,
        in tasks or threads. The ``stop()`` of any of them ends it, when the runs that have begun have ended;
        ``signals=True``: SIGTERM and SIGINT do."""
        from holdfast.schedules.runner import ScheduleRunner

        given = [schedule._with(None) for schedule in schedules]
        if not given:
            raise ValueError("there is no schedule to run")
        runner = ScheduleRunner(self._engine, given, check_count(concurrency, 1, "concurrency") + 1)
        runner.run(signals=signals)

    def list(self) -> Records:
        """Every schedule, by name: its next slot, what runs, and what became of the last slot."""
        records: Records = []
        for row in self._engine.call("schedule_look", {"names": None}):
            last = None if row["last"] is None else ScheduleRun._of(json.loads(row["last"]))
            next_slot = None
            with suppress(ModuleNotFoundError, ValueError):  # a reader need not have cronsim, nor the zone
                if (timetable := parse_stored(row["every"], row["zone"])) is not None:
                    next_slot = timetable.next_after(row["cursor"])
            records.append(ScheduleRecord._of(row, last, next_slot))
        return records

    def runs(self, name: str, *, limit: int = 100) -> Runs:
        """What became of the slots of a schedule, the latest first. About a thousand are kept. LookupError when there
        is no such schedule."""
        self._find(name)
        parameters = {"name": name, "slot": None, "only_runs": False, "limit": check_limit(limit)}
        return [ScheduleRun._of(row) for row in self._engine.call("schedule_slots", parameters)]

    def pause(self, name: str, *, actor: str, reason: str) -> None:
        """Skip every slot from now on, until ``resume``. The run that has begun goes on. Like the other orders, it is
        recorded in the audit."""
        order = _check_order(actor, reason)
        self._find(name)
        self._engine.call("schedule_pause", {"name": name, "paused": True, **order}, again=None)

    def resume(self, name: str, *, actor: str, reason: str) -> None:
        """Go on with the next slot. Those of the pause are skipped."""
        order = _check_order(actor, reason)
        row = self._find(name)
        timetable = parse_stored(row["every"], row["zone"])
        due = None if timetable is None or not row["paused"] else timetable.due(row["cursor"], row["now"])
        if due is not None:
            parameters = {
                "name": name, "expected": row["cursor"], "cursor": due.last, "slot": None, "overlap": 1,
                "skips": json.dumps([Skip(*due, "paused")]), "owner": actor,
            }  # fmt: skip
            self._engine.call("schedule_advance", parameters)
        self._engine.call("schedule_pause", {"name": name, "paused": False, **order}, again=None)

    def run_now(self, name: str, *, actor: str, reason: str) -> datetime:
        """Order a run beside those of the timetable, which a replica begins within seconds. Returns its slot."""
        order = _check_order(actor, reason)
        self._find(name)
        [row] = self._engine.call("schedule_order", {"name": name, "slot": None, **order}, again=None)
        return slot_time(row["slot"])

    def skip(self, name: str, slot: datetime, *, actor: str, reason: str) -> bool:
        """Skip one slot; False when it has begun, or was skipped already. ValueError when the schedule has no such
        slot."""
        order = _check_order(actor, reason)
        row = self._find(name)
        timetable, micros = parse_stored(row["every"], row["zone"]), _micros(slot)
        if timetable is None or timetable.next_after(micros - 1) != micros:
            raise ValueError(f"schedule {name!r} has no slot at {slot.isoformat()}")
        [row] = self._engine.call("schedule_order", {"name": name, "slot": micros, **order}, again=None)
        return row["slot"] is not None

    def remove(self, name: str, *, actor: str, reason: str) -> None:
        """Delete a schedule that no process runs any more, with the record of its slots."""
        order = _check_order(actor, reason)
        self._find(name)
        self._engine.call("schedule_remove", {"name": name, **order}, again=None)

    # Internals

    def _schedule(
        self, name: str, every: str | float | timedelta | None, *, zone: str, misfire: Misfire,
        max_late: float | None, jitter: float, tx: Any, on_crash: OnCrash, overlap: int,
    ) -> Schedule:  # fmt: skip
        if every is None and zone != "UTC":
            raise ValueError(f"zone={zone!r} is for a cron expression: what runs once ever has no time of day")
        timetable: Timetable | None = None if every is None else parse_timetable(every, zone)
        terms = ScheduleTerms.check(
            name, timetable, misfire=misfire, max_late=max_late, jitter=jitter, on_crash=on_crash, overlap=overlap,
            has_tx=tx is not None,
        )  # fmt: skip
        if tx is not None and not is_factory(tx):
            recognise(self._engine.database, tx, "the schedule is")
            if overlap > 1:
                raise ValueError(
                    "overlap= of more than 1 needs a connection for each run: give tx= a function that returns one"
                )
        return Schedule(self._engine, self._operations, terms, tx)

    def _find(self, name: str) -> Any:
        rows = self._engine.call("schedule_look", {"names": json.dumps([check_name(name)])})
        if not rows:
            raise LookupError(f"there is no schedule {name!r}: it is stored when a process first runs it")
        return rows[0]


def _check_order(actor: str, reason: str) -> dict[str, str]:
    return {"actor": check_said(actor, "actor"), "reason": check_said(reason, "reason", limit=1000)}


def _micros(slot: object) -> int:
    if not isinstance(slot, datetime):
        raise TypeError(f"slot must be a datetime, not {type(slot).__name__}")
    if slot.utcoffset() is None:
        raise ValueError(f"slot must have a time zone, such as datetime(…, tzinfo=UTC), not {slot!r}")
    whole = int(slot.timestamp()) * SECOND
    return whole + slot.microsecond
