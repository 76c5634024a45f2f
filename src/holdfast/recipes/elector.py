# Generated from elector_async.py by scripts/unasync.py. Do not edit.
"""The elector: of all replicas that run it, one leads and does the work, and another takes over when it cannot.

    run ─→ _stand_by: ask for the lease ─→ granted ─→ Leadership.serve: start the work, supervise it
     ↑                                                  lost, resign(), stop(): make the work stop
     └───────────────────────────────────────────────── the work has ended: release the lease

Which step follows which event is the table in ``elector_terms``. Who holds the lease is decided by the database alone.

A change must keep this:

- The lease is released after the work has ended, never before, and is renewed until then. Work that does not stop
  within its grace keeps its lease, which is not renewed any more, and no other work starts beside it in this process.
- A grant is in ``grants`` from the moment it exists until its release: an interrupt at any point gives it back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any, Literal

from holdfast.database.engine import Engine, Resource
from holdfast.database.file_turns import SessionLocks
from holdfast.errors import EngineError, FencedOut, HoldfastError, LeaseLost, OwnershipUnknown, Refused
from holdfast.lease.grant import LeaseGrant
from holdfast.lease.handle import Lease
from holdfast.lease.keeper import keeper_of
from holdfast.lease.terms import Refusal
from holdfast.recipes.elector_terms import (
    ElectorAction,
    ElectorEvent,
    ElectorState,
    ElectorStatus,
    ElectorTerms,
    replica_holder,
    transition,
)
from holdfast.runtime import forks, telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import (
    LoopWatchdog,
    Notifier,
    StopEvent,
    StopSignals,
    Wakeup,
    Worker,
    add_leased_work,
    check_callable,
    check_work,
    leased_work,
)
from holdfast.runtime.exit import LOST_STATUS
from holdfast.runtime.identity import new_token, this_process
from holdfast.runtime.log import CRITICAL, ERROR, INFO, WARNING, logger

log = logger("holdfast.elector")

OnNewLeader = Callable[[str], object]
_END_TIMEOUT = 1.0
"""Seconds that ``on_new_leader`` may still take at the end of a run."""
_STOP_ERRORS = (LeaseLost, OwnershipUnknown, FencedOut)
"""What work may raise that was made to stop: nothing has failed."""


class Term:
    """What ``work`` is called with. ``fence`` rises with every term: send it along with effects outside the
    database."""

    def __init__(self, grant: LeaseGrant) -> None:
        self._grant = grant
        self.name, self.holder, self.fence = grant.name, grant.holder, grant.fence
        self.stopping = StopEvent()
        """Set when the work has to stop: the lease is lost, or on ``resign()`` or ``stop()``."""
        self.gained = 0
        """For the reconciler, see Mandate: a term is responsible for all records from the start."""

    def __repr__(self) -> str:
        return f"<Term {self.name!r} fence={self.fence} {'stopping' if self.stopping.is_set() else 'leading'}>"

    @property
    def lost(self) -> bool:
        """True once we may no longer act as the leader."""
        return self._grant.lost

    def remaining(self) -> float:
        """Seconds for which the term can be trusted if nothing renews it."""
        return self._grant.remaining()

    def check(self) -> None:
        """LeaseLost or OwnershipUnknown when the term is lost; LeaseLost when the work has to stop."""
        self._grant.check()
        if self.stopping.is_set():
            raise LeaseLost(f"the term of {self.holder!r} as {self.name!r} is ending: the work has to stop")

    def grant_for(self, key: str) -> LeaseGrant | None:
        """The grant to write a record under: the same for every record."""
        return self._grant

    def protect(self, connection: Any, *, at: Literal["start", "commit"] = "start") -> int:
        """Protect the transaction open on ``connection``: it cannot commit once another replica leads. Returns the
        fence."""
        return self._grant.protect(connection, at=at)

    def transaction(self, connection: Any, *, at: Literal["start", "commit"] = "start") -> AbstractContextManager[Any]:
        """Open a transaction on ``connection`` and protect it: FencedOut once another replica leads."""
        return self._grant.transaction(connection, at=at)


Work = Callable[[Term], object]


class Elector:
    """``run(work)`` in every replica. ``stop()`` ends it for good, ``resign()`` lets another replica lead; both return
    at once and may be called from any thread."""

    def __init__(self, engine: Engine, terms: ElectorTerms, on_new_leader: OnNewLeader | None) -> None:
        if on_new_leader is not None:
            check_callable(on_new_leader, "on_new_leader")
        self._engine, self._terms, self._on_new_leader = engine, terms, on_new_leader
        self._local = engine.database.dialect == "sqlite" and SessionLocks.available and not terms.watchdog
        """Whether the kernel shows if the leader lives, and that is enough."""
        self._watchdog = LoopWatchdog() if terms.watchdog else None
        self._stopped = False
        self._reset()

    def _reset(self) -> None:
        """A replica that does not run yet. A fork of this process is another replica, and starts like this, too."""
        self._era = forks.era
        self._run = ElectorRun()
        self._run.stopped = self._stopped
        self._notifier = (
            None if self._on_new_leader is None else Notifier(self._on_new_leader, self._report_callback_error)
        )
        self._is_running = False
        self._was_answered = False
        """Whether the database has ever answered. Until then an error of its own is final."""
        self._grant: LeaseGrant | None = None
        self._leader: str | None = None
        self._last_leader: str | None = None
        self._since: datetime | None = None
        self._transitions = 0
        self._renewed_at: float | None = None
        telemetry.register(self)
        process = this_process()
        self.holder = replica_holder(self._terms.holder, os.environ, process["host"], process["pid"], new_token())

    def _reset_after_fork(self) -> None:
        if self._era != forks.era:
            self._reset()

    @property
    def name(self) -> str:
        return self._terms.name

    def __repr__(self) -> str:
        return f"<Elector {self.name!r} {self.holder!r} {self._run.state.value}>"

    def run(self, work: Work, *, signals: bool = False) -> None:
        """Stand by, lead, and stand by again, until ``stop()`` or until the work returns or raises by itself, which
        this raises, too. It may be called again after that, unless it was stopped.

        ``work(term)`` runs while we lead. When the lease is lost, on ``resign()`` and on ``stop()`` it is cancelled
        (without asyncio: ``term.stopping`` is set and ``term.check()`` raises), and the lease is released when it has
        ended. ``signals=True``: SIGTERM and SIGINT call ``stop()``.
        """
        check_work(work)
        self._check_can_run()
        self._is_running = True
        resource = Resource(stop=self.stop, wait=self._leave, leave=self._let_expire)
        self._engine.register(resource)
        add_leased_work(self)
        grants: list[LeaseGrant] = []
        try:
            with StopSignals(self.stop) if signals else nullcontext():
                while not self._run.is_over() and self._stand_by(grants):
                    self._lead(grants, work)
        finally:
            for grant in grants:  # interrupted between the grant and the work
                grant._abandon()
            self._is_running = False
            self._engine.unregister(resource)
            leased_work.discard(self)
            if self._notifier is not None:
                self._notifier.finish(_END_TIMEOUT)

    def _check_can_run(self) -> None:
        """RuntimeError unless it can run now. Prepares the next run after one that has ended."""
        self._reset_after_fork()
        if self._is_running:
            raise RuntimeError(f"{self!r} is running already")
        if self._run.state not in (ElectorState.STANDBY, ElectorState.ENDED):
            raise RuntimeError(f"{self!r} cannot run again: the work of a run that was interrupted has not ended")
        if self._run.state is ElectorState.ENDED:
            if self._stopped:
                raise RuntimeError(f"{self!r} was stopped for good: create another one with client.elector(…)")
            self._run = ElectorRun()

    def stop(self) -> None:
        """Stop the work if it runs here, release the lease, and let ``run`` return."""
        self._stopped = self._run.stopped = True
        self._run.wakeup.set()

    def resign(self) -> bool:
        """Stop the work and let another replica lead; True if we led. We stand by again after ``retry_every``."""
        self._reset_after_fork()
        leading = self._run.state is ElectorState.LEADING
        if leading:  # a second call, while the work stops, must not undo the first
            self._run.resigned = True
            self._run.wakeup.set()
        return leading

    @property
    def _busy(self) -> bool:
        """Whether the work runs in this process, and can still be stopped."""
        return self._grant is not None and self._era == forks.era and self._engine.owner.alive()

    def _leave(self) -> None:
        """The client closes: wait until the work has ended and its lease is released, or until its grace is over."""
        ended = Wakeup()
        self._run.add_waiter(ended.set)
        until = now() + self._terms.grace + _END_TIMEOUT
        self.stop()
        while self._grant is not None and not self._run.overdue and (left := until - now()) > 0:
            ended.wait(left)

    def _let_expire(self) -> None:
        """Work that has not ended by now keeps its lease, which is not renewed any more."""
        if self._grant is not None:
            self._grant._let_expire()

    def status(self) -> ElectorStatus:
        """What this replica has seen, for health endpoints. Does not ask the database."""
        self._reset_after_fork()
        grant = self._grant
        age = grant._age() if grant else None if self._renewed_at is None else now() - self._renewed_at
        return ElectorStatus(
            self.name, self.holder, self._run.state.value, self._leader, self._since, self._transitions, age,
            grant.fence if grant else None,
        )  # fmt: skip

    def _gauges(self) -> Iterator[tuple[str, float]]:
        yield "electors_leading", float(self._run.state is ElectorState.LEADING)

    def _stand_by(self, grants: list[LeaseGrant]) -> bool:
        """Ask until the lease is granted; False when the run is over. A release wakes us, and so does ``stop()``."""
        if self._run.resigned:  # another replica first. Subscribe after that: a wake-up sent to us would be wasted
            self._run.resigned = False
            self._run.sleep(self._terms.retry_every)
        terms = self._terms.lease_terms(
            self.holder, local=self._local, on_beat=self._on_beat, on_recall=self._on_recall,
            may_renew=None if self._watchdog is None else self._watchdog.turns,
        )  # fmt: skip
        if self._watchdog is not None:
            self._watchdog.begin()
        lease = Lease(self._engine, terms, 0.0)
        background = keeper_of(self._engine.database, brittle=terms.brittle).background
        background.subscribe(self.name, self._run.wakeup.set)
        try:
            while not self._run.is_over():
                refusal = self._ask(lease, grants)
                if grants:
                    return True
                if refusal is not None:
                    if refusal.session_key is not None:
                        background.watch_session(self.name, refusal.session_key)
                    self._record_refusal(refusal, terms.ttl)
                delay = self._terms.retry_delay(refusal, local=self._local, chance=jitter(0.0, 1.0))
                self._run.wakeup.wait(delay)
            return False
        finally:
            background.unsubscribe(self.name, self._run.wakeup.set)

    def _ask(self, lease: Lease, grants: list[LeaseGrant]) -> Refusal | None:
        """Ask once. None when the lease was granted (the grant is in ``grants``) or the database did not answer.
        EngineError when the client is closed, or the database never answered without an error of its own."""
        try:
            refusal = self._fetch_holder() if self._local else None
            refusal = refusal or lease._ask(grants)
        except EngineError as error:
            if self._engine.closed or (isinstance(error, Refused) and not self._was_answered):
                raise  # a missing table or privilege: asking again does not help
            log.event(
                "elector.unanswered", WARNING, "elector %(elector)r: no answer, asks again: %(error)s",
                error=str(error), **self._fields(),
            )  # fmt: skip
            return None
        self._was_answered = True
        return refusal

    def _record_refusal(self, refusal: Refusal, ttl: float) -> None:
        if refusal.remaining is not None:
            self._renewed_at = now() - max(0.0, ttl - refusal.remaining)
        log.debug("elector %r: standing by, %s leads", self.name, refusal.holder, extra=self._fields(refusal.holder))
        self._record_leader(refusal.holder)

    def _fetch_holder(self) -> Refusal | None:
        """Who holds the lease; None when it is free. On one machine a standby polls this every few milliseconds: asking
        for the lease itself costs more, because a session key is locked first."""
        rows = self._engine.call("lease_held", {"name": self.name})
        return Refusal(self.name, rows[0]["holder"], rows[0]["remaining"], None) if rows else None

    def _lead(self, grants: list[LeaseGrant], work: Work) -> None:
        self._grant = grant = grants[0]
        try:
            if not self._run.is_over() and self._run.advance(ElectorEvent.GRANTED) is ElectorAction.START:
                log.event(
                    "elector.changed", INFO, "elector %(elector)r: leading with fence %(fence)d",
                    to="leading", fence=grant.fence, **self._fields(self.holder),
                )  # fmt: skip
                telemetry.emit("elector.changed", to="leading")
                self._record_leader(self.holder)
            Leadership(self._terms, self._run, grants).serve(work)
            grants.clear()
        finally:
            self._grant = self._leader = self._since = self._renewed_at = None
            self._run.notify_waiters()

    def _record_leader(self, leader: str | None) -> None:
        if leader is None or leader == self._leader:
            return
        self._transitions += self._last_leader not in (None, leader)
        self._leader = self._last_leader = leader
        self._since = datetime.now(UTC)
        if self._notifier is not None:
            self._notifier.notify(leader)

    def _report_callback_error(self, error: Exception) -> None:
        log.event(
            "elector.callback_failed", ERROR, "elector %(elector)r: on_new_leader failed: %(error)s",
            exc_info=error.__traceback__ is not None, elector=self.name, error=str(error),
        )  # fmt: skip

    def _on_recall(self) -> None:
        """In the background thread: an operator asks for the lease, which may have been granted only just now."""
        self._run.resigned = True
        self._run.wakeup.set()

    def _on_beat(self, problem: HoldfastError | None, lost: bool) -> None:
        """In the background thread."""
        if lost:
            self._run.wakeup.set()
        elif problem is None:
            log.event("elector.renewed", INFO, "elector %(elector)r: renewed", **self._fields(self.holder))

    def _fields(self, leader: str | None = None) -> dict[str, Any]:
        """The fields of a log record."""
        return {"elector": self.name, "holder": self.holder, "leader": leader}


class ElectorRun:
    """One run of an elector: its state in the table, and what other threads have requested of it."""

    def __init__(self) -> None:
        self.state = ElectorState.STANDBY
        self.stopped = self.resigned = False
        self.overdue = False
        """Whether the work has not stopped within its grace."""
        self.wakeup = Wakeup()
        self._waiters: list[Callable[[], None]] = []

    def advance(self, event: ElectorEvent) -> ElectorAction:
        """Go to the next state; what to do now."""
        self.state, action = transition(self.state, event)
        return action

    def is_over(self) -> bool:
        """Apply a stop that was requested, then say whether the run has ended."""
        if self.stopped:
            self.advance(ElectorEvent.STOP)
        return self.state is ElectorState.ENDED

    def add_waiter(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` at the end of a term, and at the end of its grace."""
        self._waiters.append(notify)

    def notify_waiters(self) -> None:
        for notify in self._waiters:
            notify()

    def sleep(self, seconds: float) -> None:
        """Returns early when the run is stopped."""
        until = now() + seconds
        while not self.stopped and (left := until - now()) > 0:
            self.wakeup.wait(left)


class Leadership:
    """One term of this replica: starts the work, makes it stop, waits for its end, and then releases the lease."""

    def __init__(self, terms: ElectorTerms, run: ElectorRun, grants: list[LeaseGrant]) -> None:
        """``grants`` holds our grant. The caller gives it back if ``serve`` is interrupted, unless it was removed."""
        self._terms, self._run, self._grants = terms, run, grants
        self._grant = grant = grants[0]
        self._term = Term(grant)
        self._stopping_since: float | None = None
        """When the work was made to stop."""
        self._unattended = False
        """Whether the work runs on although ``serve`` has returned."""
        run.overdue = False
        self._fields: dict[str, Any] = {"elector": terms.name, "holder": grant.holder, "leader": grant.holder}

    def serve(self, work: Work) -> None:
        """Run the work until it has ended, however long that takes, and release the lease. Raises what the work
        raised, unless it was made to stop."""
        worker = Worker(work, self._term, self._on_end)
        try:
            if self._run.state is ElectorState.LEADING:
                worker.start()
                self._supervise(worker)
        finally:
            if worker.ended:
                self._release()
            else:  # interrupted twice: nothing waits for the work any more, so it releases its lease itself
                self._grants.clear()
                self._grant._let_expire()
                self._unattended = True
                if worker.ended:  # at this very moment
                    self._on_end()
        self._raise_error(worker.error)

    def _on_end(self) -> None:
        """In the thread of the work, after it has ended."""
        self._run.wakeup.set()
        if self._unattended:
            self._run.advance(ElectorEvent.WORK_ENDED)
            self._grant._abandon()

    def _supervise(self, worker: Worker) -> None:
        try:
            self._wait_for_end(worker)
        except BaseException:  # run() itself was cancelled or interrupted: the work is stopped all the same
            self._run.stopped = True
            self._wait_for_end(worker)
            raise

    def _wait_for_end(self, worker: Worker) -> None:
        """Make the work stop when an event says so, and return when it has ended."""
        while not worker.ended:
            event = self._next_event()
            if event is not None and self._run.advance(event) is ElectorAction.CANCEL:
                self._stopping_since = now()
                if event is ElectorEvent.LOST:
                    self._report_loss()
                self._term.stopping.set()
                worker.cancel()
            elif event is ElectorEvent.GRACE_OVER:
                self._end_grace()
            else:
                self._run.wakeup.wait(self._seconds_to_event())

    def _next_event(self) -> ElectorEvent | None:
        run = self._run
        if run.stopped and run.state in (ElectorState.LEADING, ElectorState.YIELDING):
            return ElectorEvent.STOP
        if run.state is ElectorState.LEADING:
            if run.resigned:
                return ElectorEvent.RESIGN
            return ElectorEvent.LOST if self._term.remaining() <= self._terms.grace else None
        if not run.overdue and self._stopping_since is not None and now() >= self._stopping_since + self._terms.grace:
            return ElectorEvent.GRACE_OVER
        return None

    def _seconds_to_event(self) -> float:
        if self._run.state is ElectorState.LEADING:
            return max(0.001, self._term.remaining() - self._terms.grace)
        if not self._run.overdue and self._stopping_since is not None:
            return max(0.001, self._stopping_since + self._terms.grace - now())
        return 1.0

    def _end_grace(self) -> None:
        """The work has not stopped in time: its lease is not released, and ends with its TTL."""
        log.event(
            "elector.overrun", ERROR,
            "elector %(elector)r: the work has not stopped in %(grace)g s; its lease is not released, and not renewed "
            "any more",
            grace=self._terms.grace, **self._fields,
        )  # fmt: skip
        if self._terms.overrun == "exit":
            log.event(
                "elector.exits", CRITICAL, "elector %(elector)r: overrun='exit': this process ends now", **self._fields
            )
            os._exit(LOST_STATUS)
        if not self._term.lost:
            self._grant._let_expire()
        self._run.overdue = True
        self._run.notify_waiters()

    def _report_loss(self) -> None:
        left = self._term.remaining()
        reason = f"not renewed in time, {left:.1f} s are left for the work to stop" if left else "it is gone"
        log.event(
            "elector.changed", INFO, "elector %(elector)r: lost the lease: %(reason)s",
            to="lost", reason=reason, **self._fields,
        )  # fmt: skip
        telemetry.emit("elector.changed", to="lost")

    def _release(self) -> None:
        self._run.advance(ElectorEvent.WORK_ENDED)
        try:
            if self._grant.lost:
                self._grant._abandon()
                return
            self._grant.release(timeout=self._grant._limit())
        except EngineError as error:
            self._grant._abandon()
            log.event(
                "elector.released_late", INFO, "elector %(elector)r: released later: %(error)s",
                error=str(error), **self._fields,
            )  # fmt: skip
        else:
            log.event("elector.changed", INFO, "elector %(elector)r: released", to="released", **self._fields)
            telemetry.emit("elector.changed", to="released")

    def _raise_error(self, error: BaseException | None) -> None:
        """Raise what the work raised, unless it was made to stop and that is how it stopped."""
        if error is None:
            return
        # By its name: the flavour for threads does not import asyncio.
        cancelled = type(error).__name__ == "CancelledError"
        if self._stopping_since is None or not (cancelled or isinstance(error, _STOP_ERRORS)):
            raise error
