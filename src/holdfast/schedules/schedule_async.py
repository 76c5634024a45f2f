"""One schedule, and what its work is called with.

Every replica computes the slots by the clock of the database, and the first one opens a slot that is due:

    cursor ──advance──▶ slot open ──operation (name, slot)──▶ take, work ──settle──▶ success | failure
       └─────────────▶ slots skipped, with their reason          └── dies ──▶ open: another replica goes on

``advance`` compares the cursor, so exactly one replica opens a slot. The operation of the slot decides which replica
runs it: a slow or paused replica delays no other one, and is refused when it wakes up late. A change must keep this:

- A slot is run, or is skipped with a reason that is on record; never neither.
- It is settled only by its attempt, when the operation has ended, or by a replica that has found its owner dead.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from sys import modules
from typing import Any

from holdfast.database import driver_errors
from holdfast.database.connections.connection_async import AsyncConnection, recognise
from holdfast.database.engine_async import AsyncEngine
from holdfast.errors import EngineError, FencedOut, GrantLost, OperationInProgress, OwnershipUnknown
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.names import Unset, check_seconds
from holdfast.operations.decide import error_record, format_error, is_transient
from holdfast.operations.op_async import AsyncOp
from holdfast.operations.operations_async import AsyncOperations
from holdfast.operations.terms import Retry
from holdfast.recipes.elector_terms import replica_holder
from holdfast.runtime import forks, telemetry
from holdfast.runtime.concurrency_async import AsyncCancelScope, AsyncStopEvent, check_callable, maybe_await
from holdfast.runtime.identity import new_token, this_process
from holdfast.runtime.log import WARNING, logger
from holdfast.schedules.records import ScheduleRun, operation_key, slot_time
from holdfast.schedules.terms import LONGEST, MAX_ATTEMPTS, Plan, ScheduleTerms, Skip, parse_stored
from holdfast.schedules.timetable import SECOND

log = logger("holdfast.schedule")

TTL = 30.0
"""Seconds of the lease of a run without ``tx``."""
NOTE_LENGTH = 10_000
NEVER = -1
"""The cursor of a schedule that was never moved on."""
_UNSETTLED = (EngineError, OwnershipUnknown, GrantLost, FencedOut, OperationInProgress)
"""Errors after which it is not known what became of a run: the next look decides."""

Work = Callable[["AsyncScheduleSlot"], Any]


class SlotSettled(Exception):
    """The slot was settled before its work began."""


class AsyncScheduleSlot:
    """What ``work`` is called with: the slot that it runs for."""

    def __init__(
        self, name: str, slot: int, attempt: int, previous: ScheduleRun | None, op: AsyncOp, tx: Any,
        stopping: AsyncStopEvent,
    ) -> None:  # fmt: skip
        self.name = name
        self.time: datetime = slot_time(slot)
        """When it was due, in UTC."""
        self.attempt = attempt
        """From 1 on; higher when the processes of earlier attempts died."""
        self.previous = previous
        """The last run before it that succeeded or failed."""
        self.tx = tx
        """The connection whose transaction this run is a part of, or None."""
        self.stopping = stopping
        """Set by ``stop()`` and by SIGTERM: no other slot begins, and this one is waited for."""
        self._op, self._note = op, ""

    def __repr__(self) -> str:
        return f"<ScheduleSlot {self.name!r} {self.time:%Y-%m-%dT%H:%M:%S.%f%z} attempt {self.attempt}>"

    @property
    def grant(self) -> AsyncLeaseGrant | None:
        """Of the lease under which it runs, to protect transactions with. None with ``tx``."""
        return self._op._grants[0] if self._op._grants else None

    @property
    def lost(self) -> bool:
        """True once another replica may run this slot. Always False with ``tx``."""
        return self._op.lost

    def check(self) -> None:
        """LeaseLost or OwnershipUnknown once another replica may run this slot."""
        self._op.check()

    def note(self, text: str) -> None:
        """Keep a text with the record of this run; the end of it, if it has more than 10,000 characters."""
        self._note = text[-NOTE_LENGTH:].encode("utf-8", "replace").decode().replace("\0", "?")


class AsyncSchedule:
    """``client.schedule(…)``: ``run(work)`` in every replica."""

    def __init__(
        self, engine: AsyncEngine, operations: AsyncOperations, terms: ScheduleTerms, tx: Any, work: Work | None = None
    ) -> None:
        if work is not None:
            check_callable(work, "work")
        self._engine, self._operations, self._terms, self._tx, self._work = engine, operations, terms, tx, work
        self._runners: set[Any] = set()
        self._name_owner()

    def _name_owner(self) -> None:
        """A fork of this process is another owner."""
        self._era, process = forks.era, this_process()
        self._owner = replica_holder(None, os.environ, process["host"], process["pid"], new_token())

    @property
    def name(self) -> str:
        return self._terms.name

    def __repr__(self) -> str:
        return f"<Schedule {self.name!r}>"

    def __call__(self, slot: AsyncScheduleSlot) -> Any:
        """The decorated function itself."""
        if self._work is None:
            raise TypeError(f"{self!r} has no work: decorate a function with client.every(…), or call run(work)")
        return self._work(slot)

    async def run(self, work: Work | None = None, *, signals: bool = False) -> None:
        """Run ``work(slot)`` for each slot that this replica gets, until ``stop()``, which waits for the run that has
        begun. ``signals=True``: SIGTERM and SIGINT call it. An error of ``work`` is the outcome of that slot."""
        from holdfast.schedules.runner_async import AsyncScheduleRunner

        await AsyncScheduleRunner(self._engine, [self._with(work)], self._terms.overlap + 2).run(signals=signals)

    async def run_due(self, work: Work, *, retry_within: float = 0.0) -> ScheduleRun | None:
        """Run the slot that is due, unless that was done, and return its record; None when another process runs it at
        this moment. Before it, ordered slots are run, and earlier ones whose process died. For a process that something
        else starts, such as cron. With ``every=None`` the only slot is run, once ever. ``retry_within``: seconds from
        the slot (once ever: from its first start) in which one that has failed is run again."""
        patience = check_seconds(retry_within, "retry_within", 0.0, LONGEST)
        job = self._with(work)
        slot = await job._open_due()
        row = await job._fetch(slot)
        running = await job._recover_opens()
        if row is None and running < self._terms.overlap:  # other slots were open
            slot = await job._open_due()
            await job._recover_opens()
        elif running < self._terms.overlap and await job._is_retried(slot, row, patience):
            settled = {"name": self.name, "slot": slot, "attempt": row["attempt"], "status": "open"}
            await self._engine.call("schedule_settle", {**settled, "reason": None, "note": None})
            await job._run_slot(slot, AsyncStopEvent())
        row = await job._fetch(slot)
        return None if row is None or row["status"] == "open" else ScheduleRun._of(row)

    def stop(self) -> None:
        """Begin no further slot, and let ``run`` return when the run that has begun has ended. From any thread."""
        for runner in list(self._runners):
            runner.stop()

    # For runs and the runner

    def _with(self, work: Work | None) -> AsyncSchedule:
        """A schedule with that work."""
        if self._era != forks.era:
            self._name_owner()
        if work is None:
            if self._work is None:
                raise TypeError(f"{self!r} has no work: call run(work)")
            return self
        bound = AsyncSchedule(self._engine, self._operations, self._terms, self._tx, work)
        bound._runners = self._runners
        return bound

    async def _fetch(self, slot: int) -> Any:
        parameters = {"name": self.name, "slot": slot, "only_runs": False, "limit": 1}
        rows = await self._engine.call("schedule_slots", parameters)
        return rows[0] if rows else None

    async def _is_retried(self, slot: int, row: Any, patience: float) -> bool:
        if not patience or row is None or row["status"] != "failure":
            return False
        [look] = await self._look()
        since = row["started_at"] * SECOND if self._terms.timetable is None else slot
        return bool(look["now"] - since <= patience * SECOND)

    async def _look(self) -> list[Any]:
        return await self._engine.call("schedule_look", {"names": json.dumps([self.name])})

    async def _open_due(self) -> int:
        """Open the slot that is due, unless it has a row; skip those before it. Returns it."""
        terms, timetable = self._terms, self._terms.timetable
        while True:
            rows = await self._look()
            if not rows:
                wanted = json.dumps([[self.name, *terms.stored(), NEVER]])
                await self._engine.call("schedule_register", {"wanted": wanted})
                continue
            [row] = rows
            is_other = (row["every"], row["zone"]) != terms.stored()
            if is_other and timetable is None:
                raise ValueError(f"schedule {self.name!r} has a timetable: what runs once ever needs another name")
            slot = 0 if timetable is None else timetable.last_until(row["now"])
            if row["cursor"] >= slot:
                if not is_other:
                    return slot
                change = {"name": self.name, "expected": row["cursor"], "every": terms.stored()[0]}
                await self._engine.call("schedule_change", {**change, "zone": terms.stored()[1]})
                continue
            stored_timetable = parse_stored(row["every"], row["zone"])
            skips: tuple[Skip, ...] = ()
            if row["cursor"] != NEVER and stored_timetable is not None:
                missed = stored_timetable.due(row["cursor"], slot - 1)
                skips = () if missed is None else (Skip(*missed, "missed"),)
            state, _ = await self._advance(row["cursor"], Plan(slot, skips, slot))
            if state in ("paused", "full"):
                return slot

    async def _advance(self, expected: int, plan: Plan) -> tuple[str, Any]:
        """Move on as planned. Returns the state, and the row of the answer."""
        parameters = {
            "name": self.name, "expected": expected, "cursor": plan.cursor, "skips": json.dumps(plan.skips),
            "slot": plan.slot, "overlap": self._terms.overlap, "owner": self._owner,
        }  # fmt: skip
        [row] = await self._engine.call("schedule_advance", parameters)
        if row["state"] in ("done", "taken", "skipped"):
            for skip in plan.skips:
                _count("skipped", skip.size)
        return row["state"], row

    async def _recover_opens(self) -> int:
        """Go on with each open slot, the earliest first. Returns how many run in other processes."""
        running = 0
        for row in await self._look():
            for slot, attempt, _ in json.loads(row["opens"] or "[]"):
                if running < self._terms.overlap:
                    await self._recover(slot, attempt, AsyncStopEvent())
                    settled = await self._fetch(slot)
                    running += settled is not None and settled["status"] == "open"
        return running

    async def _recover(self, slot: int, attempt: int, stopping: AsyncStopEvent) -> None:
        """Go on with a slot that is open and that this process does not run: find out what became of it, and run it if
        its owner is dead."""
        record = await self._operations.get(operation_key(self._terms, slot))
        status = None if record is None else record.status
        if status == "success":
            await self._settle(slot, attempt, "success", None)
        elif status == "failure":
            await self._settle(slot, attempt, "failure", format_error((record and record.error) or {}))
        elif status == "running":
            return
        elif attempt >= MAX_ATTEMPTS:
            await self._settle(slot, attempt, "failure", f"its process died in each of {attempt} attempts")
        elif status == "partial" and self._terms.on_crash == "skip":
            await self._settle(slot, attempt, "skipped", "crash")
        elif self._terms.is_late(slot, (await self._look())[0]["now"]):
            await self._settle(slot, attempt, "skipped", "late")
        else:
            await self._run_slot(slot, stopping)

    async def _run_slot(self, slot: int, stopping: AsyncStopEvent) -> None:
        """Run an open slot as an operation, unless another process does, and settle it."""
        attempt, note, lateness = 0, "", 0.0
        work = self._work
        assert work is not None

        async def take_and_work(op: AsyncOp) -> Any:
            nonlocal attempt, note, lateness
            row = await self._take(slot, connection)
            op.check()  # this process may have been paused before the answer
            attempt, lateness = row["attempt"], self._terms.lateness(slot, row["now"])
            previous = json.loads(row["previous"]) if row["previous"] else None
            current = AsyncScheduleSlot(
                self.name, slot, attempt, None if previous is None else ScheduleRun._of(previous), op, connection,
                stopping,
            )  # fmt: skip
            if connection is None:
                telemetry.emit("schedule.started", lateness=lateness)
            try:
                value = await maybe_await(work(current))
            finally:
                note = current._note
            if connection is not None:
                await self._settle_in(connection, slot, attempt, note)
            return value

        try:
            async with self._connection() as connection:
                try:
                    outcome = await self._operation(slot, connection).run(take_and_work)
                    if not outcome.committed:
                        await maybe_await(connection.commit())
                except BaseException:
                    if connection is not None:
                        with suppress(Exception):  # the first error is the one to raise
                            await maybe_await(connection.rollback())
                    raise
            if outcome.status == "skipped":
                return
            if connection is not None and not outcome.replayed:
                telemetry.emit("schedule.started", lateness=lateness)
                _count("success", 1)
                return
            await self._settle(slot, attempt or await self._current_attempt(slot), "success", None, note)
        except SlotSettled:
            return
        except _UNSETTLED as error:
            self._report_unsettled(slot, error)
        except Exception as error:
            if self._tx is not None and is_transient(error, driver_errors.sqlstate(error)):
                self._report_unsettled(slot, error)
                return
            if self._tx is not None or not attempt:  # the attempt was rolled back, or has not begun
                attempt = await self._current_attempt(slot)
            reason = format_error(error_record(error))
            log.event(
                "schedule.failed", WARNING, "schedule %(schedule)r: the run for %(slot)s failed: %(error)s",
                exc_info=True, schedule=self.name, slot=slot_time(slot).isoformat(), error=reason,
            )  # fmt: skip
            await self._settle(slot, attempt, "failure", reason, note)

    def _operation(self, slot: int, connection: Any) -> Any:
        """A run that a dead owner left is run again: the effects of ``work`` are its own to repeat."""
        has_tx = connection is not None
        return self._operations._operation(
            operation_key(self._terms, slot), Unset.UNSET, connection, rollback=None,
            verify=None if has_tx else _not_done, on_partial=None if has_tx else "verify", when_locked="skip",
            timeout=0.0, ttl=TTL, keep=None, join=None,
            on_lost="cancel" if AsyncCancelScope.cancels and not has_tx else "flag", actor=None, justification=None,
            retry=Retry(attempts=1_000_000), checks=None, lineage=None, options=None,
        )  # fmt: skip

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """The connection of ``tx``: itself, or what it returns when it is a function."""
        tx = self._tx
        if not is_factory(tx):
            yield tx
            return
        opened = tx()
        if not hasattr(opened, "__aenter__"):
            opened = await maybe_await(opened)
        async with opened as connection:
            yield connection

    async def _take(self, slot: int, connection: Any) -> Any:
        """Begin the attempt; with ``tx`` in its transaction, which an operator who skips the slot waits for."""
        parameters = {"name": self.name, "slot": slot, "owner": self._owner}
        if connection is None:
            [row] = await self._engine.call("schedule_take", parameters)
        else:
            row = await self._recognise(connection).write("schedule_take", parameters)
        if row["attempt"] is None:
            raise SlotSettled(f"slot {slot} of schedule {self.name!r}")
        return row

    async def _settle_in(self, connection: Any, slot: int, attempt: int, note: str) -> None:
        """Record the success in the transaction of its effect."""
        parameters = {"name": self.name, "slot": slot, "attempt": attempt, "status": "success", "reason": None}
        row = await self._recognise(connection).write("schedule_settle", {**parameters, "note": note or None})
        if not row["settled"]:
            raise SlotSettled(f"slot {slot} of schedule {self.name!r}")

    def _recognise(self, connection: Any) -> AsyncConnection:
        return recognise(self._engine.database, connection, "the schedule is")

    async def _current_attempt(self, slot: int) -> int:
        row = await self._fetch(slot)
        return 0 if row is None else int(row["attempt"])

    async def _settle(self, slot: int, attempt: int, status: str, reason: str | None, note: str = "") -> None:
        parameters = {"name": self.name, "slot": slot, "attempt": attempt, "status": status, "reason": reason}
        [row] = await self._engine.call("schedule_settle", {**parameters, "note": note or None})
        if row["settled"]:
            _count(status, 1)

    def _report_unsettled(self, slot: int, error: BaseException) -> None:
        log.event(
            "schedule.unsettled", WARNING,
            "schedule %(schedule)r: what became of the run for %(slot)s is not known yet: %(error)s",
            schedule=self.name, slot=slot_time(slot).isoformat(), error=str(error),
        )  # fmt: skip


def _not_done() -> bool:
    return False


def _count(outcome: str, runs: int) -> None:
    telemetry.emit("schedule.ended", outcome=outcome, runs=runs)


def is_factory(tx: Any) -> bool:
    """Whether it returns connections. One of sqlite3 can be called, too, and is none."""
    sqlite3 = modules.get("sqlite3")
    return callable(tx) and not (sqlite3 is not None and isinstance(tx, sqlite3.Connection))
