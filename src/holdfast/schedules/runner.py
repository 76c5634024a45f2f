# Generated from runner_async.py by scripts/unasync.py. Do not edit.
"""Runs schedules: one wait for all of them.

    look (all schedules, one statement) ─▶ what is due? ─▶ a task each: advance, run, settle
      ▲                                       │
      └────────── wait until the next slot ◀──┘   at most LOOK_EVERY

The clock of the database is extrapolated with the local clock that never steps, from the last answer on. So this
machine's own clock is never asked, and a wrong one changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from holdfast.database.engine import Engine, Resource
from holdfast.errors import EngineError
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import StopEvent, StopSignals, TaskPool, Wakeup
from holdfast.runtime.log import ERROR, WARNING, logger
from holdfast.schedules.schedule import Schedule
from holdfast.schedules.terms import describe, parse_stored, plan
from holdfast.schedules.timetable import SECOND, Timetable

log = logger("holdfast.schedule")

LOOK_EVERY = 2.0
"""Seconds between two looks: for pauses, orders of operators and open slots of other replicas."""
PATIENCE = SECOND
"""Microseconds that another replica has to begin a slot that it has opened."""
LEAVE_TIMEOUT = 10.0
"""Seconds that the end of a client waits for runs."""


class ScheduleJob:
    """A schedule in this process, and what is known of it."""

    def __init__(self, schedule: Schedule, timetable: Timetable) -> None:
        self.schedule, self.timetable = schedule, timetable
        self.cursor = 0
        self.is_known = self.is_paused = False
        self.is_busy = False
        """Whether it is being moved on."""
        self.is_superseded = False
        """Whether another replica has stored a newer timetable."""
        self.at = math.inf
        """When to move it on, by the clock of the database."""
        self.active: set[int] = set()
        """The slots that this process runs, or looks after."""

    @property
    def is_changing(self) -> bool:
        """Whether it still deals with the slots of the timetable that was stored before ours."""
        return self.timetable != self.schedule._terms.timetable

    def set_alarm(self) -> None:
        if self.is_known and not (self.is_busy or self.is_superseded):
            slot_at = self.schedule._terms.next_at(self.timetable, self.cursor)
            self.at = -math.inf if self.is_changing else slot_at


class ScheduleRunner:
    """One run of schedules, until ``stop()``."""

    def __init__(self, engine: Engine, schedules: Sequence[Schedule], concurrency: int) -> None:
        self._engine, self._concurrency = engine, concurrency
        self._jobs: dict[str, ScheduleJob] = {}
        for schedule in schedules:
            terms = schedule._terms
            if terms.timetable is None:
                raise ValueError(f"schedule {terms.name!r} runs once ever: it is for run_due()")
            if terms.name in self._jobs:
                raise ValueError(f"two schedules are called {terms.name!r}: give one of them another name=")
            self._jobs[terms.name] = ScheduleJob(schedule, terms.timetable)
        self._names = json.dumps(list(self._jobs))
        self._wakeup, self._ended = Wakeup(), Wakeup()
        self._stopping = StopEvent()
        self._offset = 0.0
        """The clock of the database minus the local one, in seconds."""
        self._look_at = 0.0
        """When to look again, by the local clock."""

    def stop(self) -> None:
        """From any thread, and in a signal handler."""
        self._stopping.set()
        self._wakeup.set()

    def run(self, *, signals: bool) -> None:
        resource = Resource(stop=self.stop, wait=self._leave)
        self._engine.register(resource)
        for job in self._jobs.values():
            job.schedule._runners.add(self)
        try:
            with StopSignals(self.stop) if signals else nullcontext():
                with TaskPool(self._concurrency) as pool:
                    try:
                        self._serve(pool)
                    finally:
                        self._stopping.set()
                    pool.finish()
        finally:
            for job in self._jobs.values():
                job.schedule._runners.discard(self)
            self._engine.unregister(resource)
            self._ended.set()

    def _leave(self) -> None:
        """The client closes: wait for the runs, bounded."""
        self._ended.wait(LEAVE_TIMEOUT)

    def _serve(self, pool: TaskPool) -> None:
        while not self._stopping.is_set():
            try:
                if now() >= self._look_at:
                    self._look(pool)
                delay = self._begin_due(pool)
            except EngineError as error:
                if self._engine.closed:
                    raise
                self._report_unanswered(error)
                delay = jitter(0.2, 0.5)
            if not self._stopping.is_set():
                self._wakeup.wait(delay)

    def _time(self) -> int:
        """The clock of the database, in microseconds."""
        return int((now() + self._offset) * SECOND)

    def _set_time(self, micros: int) -> None:
        self._offset = micros / SECOND - now()

    # Look

    def _look(self, pool: TaskPool) -> None:
        rows = self._engine.call("schedule_look", {"names": self._names})
        if len(rows) < len(self._jobs):
            rows = self._register({row["name"] for row in rows})
        self._set_time(rows[0]["now"])
        self._look_at = now() + LOOK_EVERY * jitter(0.75, 1.0)
        for row in rows:
            job = self._jobs[row["name"]]
            self._compare_timetable(job, row)
            job.is_known, job.is_paused = True, row["paused"] is not None
            if not job.is_busy:
                job.cursor = row["cursor"]
                job.set_alarm()
            if row["opens"] and row["opens"] != "[]":
                self._recover(pool, job, json.loads(row["opens"]))

    def _register(self, stored_names: set[str]) -> list[Any]:
        wanted = [
            [name, *job.schedule._terms.stored(), None] for name, job in self._jobs.items() if name not in stored_names
        ]
        self._engine.call("schedule_register", {"wanted": json.dumps(wanted)})
        return self._engine.call("schedule_look", {"names": self._names})

    def _compare_timetable(self, job: ScheduleJob, row: Any) -> None:
        """If another timetable is stored when a process starts, its slots up to now are dealt with before ours is
        stored (see _open). Later, another replica has stored a newer one, and this one stands by."""
        is_other = (row["every"], row["zone"]) != job.schedule._terms.stored()
        if is_other and (job.is_changing or not job.is_known):
            job.timetable = parse_stored(row["every"], row["zone"]) or job.timetable
        elif is_other and not job.is_superseded and not job.is_busy:
            job.is_superseded, job.at = True, math.inf
            log.event(
                "schedule.superseded", WARNING,
                "schedule %(schedule)r has another timetable by now, %(every)s: this replica stands by",
                schedule=row["name"], every=describe(row["every"], row["zone"]),
            )  # fmt: skip
        elif not is_other:
            job.is_superseded = False

    def _recover(self, pool: TaskPool, job: ScheduleJob, opens: list[Any]) -> None:
        """Look after the open slots that this process does not run, as many at once as may run."""
        for slot, attempt, taken_at in opens[: job.schedule._terms.overlap]:
            if slot not in job.active and self._time() - taken_at > PATIENCE:
                job.active.add(slot)
                pool.spawn(self._finish, job, slot, job.schedule._recover, slot, attempt, self._stopping)

    # Slots

    def _begin_due(self, pool: TaskPool) -> float:
        """Begin to move on what is due. Returns the seconds until the next time."""
        for job in self._jobs.values():
            if job.at <= self._time() and not self._stopping.is_set():
                job.is_busy, job.at = True, math.inf
                pool.spawn(self._move_on, job)
        at = min(job.at for job in self._jobs.values())
        return max(0.0, min((at - self._time()) / SECOND, self._look_at - now()))

    def _move_on(self, job: ScheduleJob) -> None:
        """Open the slot that is due, and run it if no other replica was first."""
        slot: int | None = None
        try:
            slot = self._open(job)
            job.is_busy = False
        except EngineError as error:
            self._report_unanswered(error)
        finally:
            if job.is_busy:  # no answer: the next look says how far it is
                job.is_busy, self._look_at = False, now() + jitter(0.2, 0.5)
            self._wakeup.set()
        if slot is not None and not self._stopping.is_set():  # else another replica finds it open, or the next start
            job.active.add(slot)
            self._finish(job, slot, job.schedule._run_slot, slot, self._stopping)

    def _open(self, job: ScheduleJob) -> int | None:
        """The slot that this replica has opened, or None. Sets the alarm for the next one."""
        schedule, is_full = job.schedule, False
        while not self._stopping.is_set():
            todo = plan(
                schedule._terms, job.timetable, job.cursor, self._time(), is_paused=job.is_paused, is_full=is_full
            )
            if todo is None:
                if is_full:  # the end of a run, or the next look, sets the alarm
                    return None
                if job.is_changing:
                    self._store_timetable(job)
                break
            state, row = schedule._advance(job.cursor, todo)
            self._set_time(row["now"])
            if state == "gone":
                job.is_known, self._look_at = False, 0.0
                return None
            job.cursor, is_full = row["reached"], state == "full"
            job.is_paused = state == "paused" or (job.is_paused and state != "resumed")
            if state in ("taken", "early"):
                job.is_busy = False
                job.set_alarm()
                return todo.slot if state == "taken" else None
        job.is_busy = False
        job.set_alarm()
        return None

    def _store_timetable(self, job: ScheduleJob) -> None:
        terms = job.schedule._terms
        every, zone = terms.stored()
        parameters = {"name": terms.name, "expected": job.cursor, "every": every, "zone": zone}
        [row] = self._engine.call("schedule_change", parameters)
        if row["changed"] and terms.timetable is not None:
            job.timetable = terms.timetable
        self._look_at = 0.0

    def _finish(self, job: ScheduleJob, slot: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Run or recover a slot to its end."""
        try:
            function(*arguments)
        except EngineError as error:
            self._report_unanswered(error)
        except Exception as error:
            log.event(
                "schedule.unsettled", ERROR, "schedule %(schedule)r: a slot could not be settled: %(error)s",
                exc_info=True, schedule=job.schedule.name, error=str(error),
            )  # fmt: skip
        finally:
            job.active.discard(slot)
            job.set_alarm()
            self._wakeup.set()

    def _report_unanswered(self, error: EngineError) -> None:
        log.event("schedule.unanswered", WARNING, "schedules: no answer, asks again: %(error)s", error=str(error))
