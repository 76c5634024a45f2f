# Generated from _async/recipes/elector.py by scripts/unasync.py. Do not edit.
"""The elector: of all replicas that run it, one does the work, and another goes on when that one cannot.

A thin loop around the table in ``core.election``: it asks for the lease, runs the work beside itself, tells it to stop,
and releases the lease when the work has ended. What the lease is worth is the lease's affair.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

from holdfast._sync.engines.engine import Engine
from holdfast._sync.primitives.grant import EXIT_STATUS, LeaseGrant
from holdfast._sync.primitives.lease import Lease
from holdfast._sync.recipes.term import Term
from holdfast._wire.clock import jitter, now
from holdfast._wire.identity import new_token
from holdfast._wire.kernel import Marks
from holdfast._wire.log import logger
from holdfast._wire.running import Bell, Interrupts, Job, check_work
from holdfast._wire.waiting import settled
from holdfast.core.election import Action, ElectorStatus, ElectorTerms, Event, State, after, replica
from holdfast.core.errors import EngineError, FencedOut, LeaseLost, OwnershipUnknown, Refused
from holdfast.core.grant import Held

log = logger("holdfast.elector")

Work = Callable[[Term], object]
OnNewLeader = Callable[[str], object]
_STANDBY_POLL = 0.01
"""Seconds between two looks of a standby on one machine, where looking costs next to nothing."""
_EXPECTED = (LeaseLost, OwnershipUnknown, FencedOut)
"""How work may end that was told to stop."""


class Elector:
    """``run(work)`` in every replica. ``stop()`` is for good, ``resign()`` lets another one lead; both return at once,
    and may be called from anywhere."""

    def __init__(self, engine: Engine, terms: ElectorTerms, on_new_leader: OnNewLeader | None) -> None:
        self._engine, self._terms, self._on_new_leader = engine, terms, on_new_leader
        self._kernel = engine.database.dialect == "sqlite" and Marks.available
        self.holder = f"{terms.holder or replica(os.environ, new_token())}/{new_token()[:8]}"
        self._state = State.STANDBY
        self._running = self._stopped = self._resigned = self._answered = False
        self._bell = Bell()
        self._grant: LeaseGrant | None = None
        self._leader: str | None = None
        self._last_leader: str | None = None
        self._since: datetime | None = None
        self._transitions = 0
        self._renewed_at: float | None = None
        self._told_at: float | None = None
        self._overdue = False

    @property
    def name(self) -> str:
        return self._terms.name

    def __repr__(self) -> str:
        return f"<Elector {self.name!r} {self.holder!r} {self._state.value}>"

    def run(self, work: Work, *, signals: bool = False) -> None:
        """Stand by, lead, stand by again, until ``stop()``, or until the work returns or raises by itself.

        ``work(term)`` runs while we lead. When the lease is lost, on ``resign()`` and on ``stop()`` it is cancelled
        (without asyncio: ``term.stopping`` is set and ``term.check()`` raises), and the lease is released when it has
        ended. ``signals=True``: SIGTERM and SIGINT call ``stop()``.
        """
        check_work(work)
        if self._running:
            raise RuntimeError(f"{self!r} is running already")
        self._running = True
        try:
            with Interrupts(self.stop) if signals else nullcontext():
                while not self._is_over() and (grant := self._stand_by()) is not None:
                    self._lead(grant, work)
        finally:
            self._running = False

    def stop(self) -> None:
        """Stop the work if it runs here, release the lease, and let ``run`` return."""
        self._stopped = True
        self._bell.ring()

    def resign(self) -> bool:
        """Stop the work and let another replica lead; True if we led. We stand by again after ``retry_every``."""
        leading = self._state is State.LEADING
        self._resigned = leading
        self._bell.ring()
        return leading

    def status(self) -> ElectorStatus:
        """What we know, for health endpoints; asks nobody."""
        grant = self._grant
        age = grant.age() if grant else None if self._renewed_at is None else now() - self._renewed_at
        return ElectorStatus(
            self.name, self.holder, self._state.value, self._leader, self._since, self._transitions, age,
            grant.fence if grant else None,
        )  # fmt: skip

    def _stand_by(self) -> LeaseGrant | None:
        """Ask until we are granted the lease; None when it is over. Woken by a release, and by ``stop()``."""
        if self._resigned:  # somebody else first; and not in their queue, where a wake-up would be lost on us
            self._resigned = False
            self._pause(self._terms.retry_every)
        keeper, lease = self._engine.keeper, Lease(self._engine, self._lease_terms(), 0.0)
        keeper.watch(self.name, self._bell.ring)
        try:
            while not self._is_over():
                answer = self._ask(lease)
                if isinstance(answer, LeaseGrant):
                    return answer
                self._bell.wait(self._until_next(answer))
            return None
        finally:
            keeper.unwatch(self.name, self._bell.ring)

    def _is_over(self) -> bool:
        if self._stopped:
            self._turn(Event.STOP)
        return self._state is State.ENDED

    def _pause(self, seconds: float) -> None:
        until = now() + seconds
        while not self._stopped and (left := until - now()) > 0:
            self._bell.wait(left)

    def _ask(self, lease: Lease) -> LeaseGrant | Held | None:
        try:
            answer = lease.ask()
        except EngineError as error:
            if self._engine.closed or (isinstance(error, Refused) and not self._answered):
                raise  # what was never possible will not be
            log.warning("elector %r: no answer, asks again: %s", self.name, error, extra=self._fields())
            return None
        self._answered = True
        if isinstance(answer, Held):
            if answer.session_watch is not None:
                self._engine.keeper.keep_vigil(self.name, answer.session_watch)
            if answer.remaining is not None:
                self._renewed_at = now() - max(0.0, self._lease_terms().ttl - answer.remaining)
            log.debug("elector %r: standing by, %s leads", self.name, answer.holder, extra=self._fields(answer.holder))
            self._see(answer.holder)
        return answer

    def _until_next(self, held: Held | None) -> float:
        if held is not None and held.remaining is None:  # just being changed by somebody
            return jitter(0.002, 0.02)
        every = min(self._terms.retry_every, _STANDBY_POLL) if self._kernel else self._terms.retry_every
        pause = every * jitter(0.75, 1.0)
        return pause if held is None or held.remaining is None else min(pause, held.remaining + jitter(0.001, 0.01))

    def _lead(self, grant: LeaseGrant, work: Work) -> None:
        self._grant, self._told_at, self._overdue = grant, None, False
        job: Job | None = None
        try:
            if not self._is_over() and self._turn(Event.GRANTED) is Action.START:
                log.info("elector %r: leading with fence %d", self.name, grant.fence, extra=self._fields(self.holder))
                self._see(self.holder)
                term = Term(grant)
                job = Job(work, term, self._bell.ring)
                self._supervise_anyhow(term, job)
        finally:
            if job is None or job.ended:
                self._release(grant)
            else:  # interrupted twice: nobody waits for the work any more
                grant.let_expire()
        if job is not None:
            self._judge(job.error)

    def _supervise_anyhow(self, term: Term, job: Job) -> None:
        try:
            self._supervise(term, job)
        except BaseException:  # run() itself is cancelled or interrupted: the work is stopped all the same
            self._stopped = True
            self._supervise(term, job)
            raise

    def _supervise(self, term: Term, job: Job) -> None:
        """Until the work has ended, however it is told to."""
        while not job.ended:
            event = self._event(term)
            if event is not None and self._turn(event) is Action.CANCEL:
                self._told_at = now()
                if event is Event.LOST:
                    self._tell_loss(term)
                term.stopping.set()
                job.cancel()
            elif event is Event.GRACE_OVER:
                self._overrun(term)
            else:
                self._bell.wait(self._until_event(term))

    def _event(self, term: Term) -> Event | None:
        if self._stopped and self._state in (State.LEADING, State.YIELDING):
            return Event.STOP
        if self._state is State.LEADING:
            if self._resigned:
                return Event.RESIGN
            return Event.LOST if term.remaining() <= self._terms.grace else None
        if not self._overdue and self._told_at is not None and now() >= self._told_at + self._terms.grace:
            return Event.GRACE_OVER
        return None

    def _until_event(self, term: Term) -> float:
        if self._state is State.LEADING:
            return max(0.001, term.remaining() - self._terms.grace)
        if not self._overdue and self._told_at is not None:
            return max(0.001, self._told_at + self._terms.grace - now())
        return 1.0

    def _overrun(self, term: Term) -> None:
        """It was told to stop, and has not: what cannot be stopped is not released. It ends with its TTL."""
        self._overdue = True
        log.error(
            "elector %r: the work has not stopped in %g s; its lease is not released, and not renewed any more",
            self.name, self._terms.grace, extra=self._fields(self.holder),
        )  # fmt: skip
        if self._terms.overrun == "exit":
            log.critical("elector %r: overrun='exit': this process ends now", self.name)
            os._exit(EXIT_STATUS)
        if self._grant is not None and not term.lost:
            self._grant.let_expire()

    def _tell_loss(self, term: Term) -> None:
        left = term.remaining()
        why = f"not renewed in time, {left:.1f} s are left for the work to stop" if left else "it is gone"
        log.info("elector %r: lost the lease: %s", self.name, why, extra=self._fields(self.holder))

    def _release(self, grant: LeaseGrant) -> None:
        self._turn(Event.WORK_ENDED)
        self._grant, self._leader, self._since = None, None, None
        try:
            if grant.lost:
                grant.abandon()
                return
            grant.release()
        except EngineError as error:
            grant.abandon()
            log.info("elector %r: released later: %s", self.name, error, extra=self._fields(self.holder))
        else:
            log.info("elector %r: released", self.name, extra=self._fields(self.holder))

    def _judge(self, error: BaseException | None) -> None:
        """What the work raised is the caller's to know; unless it was told to stop, and stopped."""
        if error is None or (self._told_at is not None and isinstance(error, _EXPECTED)):
            return
        if self._told_at is not None and type(error).__name__ == "CancelledError":
            return
        raise error

    def _see(self, leader: str | None) -> None:
        if leader is None or leader == self._leader:
            return
        self._transitions += self._last_leader not in (None, leader)
        self._leader = self._last_leader = leader
        self._since = datetime.now(UTC)
        if self._on_new_leader is not None:
            try:
                settled(self._on_new_leader(leader))
            except Exception:
                log.exception("elector %r: on_new_leader failed", self.name)

    def _lease_terms(self) -> Any:
        return self._terms.lease(
            self.holder, kernel=self._kernel, on_lost=lambda _: self._bell.ring(), on_renewed=self._renewed
        )

    def _renewed(self) -> None:
        """In the keeper's thread."""
        log.info("elector %r: renewed", self.name, extra=self._fields(self.holder))

    def _turn(self, event: Event) -> Action:
        self._state, action = after(self._state, event)
        return action

    def _fields(self, holder: str | None = None) -> dict[str, Any]:
        """What a structured log can be searched by."""
        return {"elector": self.name, "replica": self.holder, "holder": holder}
