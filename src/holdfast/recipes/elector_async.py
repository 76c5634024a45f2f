"""The elector: of all replicas that run it, one does the work, and another goes on when that one cannot.

A thin loop around the table in ``election``: it asks for the lease until it is granted, and lets ``tenure`` run
the work under it. What the lease is worth is the lease's affair.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

from holdfast.database.background import Background
from holdfast.database.engine_async import AsyncEngine, AsyncResource
from holdfast.database.file_turns import SessionLocks
from holdfast.errors import EngineError, HoldfastError, Refused
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.lease.handle_async import AsyncLease
from holdfast.lease.keeper import keeper_of
from holdfast.lease.terms import LeaseTerms, Refusal
from holdfast.recipes.election import Action, ElectorStatus, ElectorTerms, Event, State, replica
from holdfast.recipes.tenure_async import AsyncCourse, AsyncTenure, Work
from holdfast.runtime import forks, telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import StopSignals, add_leased_work, leased_work
from holdfast.runtime.concurrency_async import AsyncNotifier, AsyncWakeup, check_callable, check_work
from holdfast.runtime.identity import new_token
from holdfast.runtime.log import logger

log = logger("holdfast.elector")

OnNewLeader = Callable[[str], object]
_FAREWELL = 1.0
"""Seconds that ``on_new_leader`` has to return when all else is over."""


class AsyncElector:
    """``run(work)`` in every replica. ``stop()`` is for good, ``resign()`` lets another one lead; both return at once,
    and may be called from anywhere."""

    def __init__(self, engine: AsyncEngine, terms: ElectorTerms, on_new_leader: OnNewLeader | None) -> None:
        if on_new_leader is not None:
            check_callable(on_new_leader, "on_new_leader")
        self._engine, self._terms, self._on_new_leader = engine, terms, on_new_leader
        self._kernel = engine.database.dialect == "sqlite" and SessionLocks.available
        self._stopped = False
        self._begin()

    def _begin(self) -> None:
        """As one that does not run yet. A fork of this process is another replica, and begins so, too."""
        self._era = forks.era
        self._course = AsyncCourse()
        self._course.stopped = self._stopped
        self._teller = None if self._on_new_leader is None else AsyncNotifier(self._on_new_leader, self._not_told)
        self._running = self._answered = False
        self._grant: AsyncLeaseGrant | None = None
        self._leader: str | None = None
        self._last_leader: str | None = None
        self._since: datetime | None = None
        self._transitions = 0
        self._renewed_at: float | None = None
        telemetry.register(self)
        self.holder = f"{self._terms.holder or replica(os.environ, new_token())}/{new_token()[:8]}"

    def _notice_fork(self) -> None:
        if self._era != forks.era:
            self._begin()

    @property
    def name(self) -> str:
        return self._terms.name

    def __repr__(self) -> str:
        return f"<Elector {self.name!r} {self.holder!r} {self._course.state.value}>"

    async def run(self, work: Work, *, signals: bool = False) -> None:
        """Stand by, lead, stand by again, until ``stop()``, or until the work returns or raises by itself; after that
        it may be called again.

        ``work(term)`` runs while we lead. When the lease is lost, on ``resign()`` and on ``stop()`` it is cancelled
        (without asyncio: ``term.stopping`` is set and ``term.check()`` raises), and the lease is released when it has
        ended. ``signals=True``: SIGTERM and SIGINT call ``stop()``.
        """
        check_work(work)
        self._check_free()
        self._running = True
        resource = AsyncResource(stop=self.stop, wait=self.leave, leave=self.let_expire)
        self._engine.register(resource)
        add_leased_work(self)
        got: list[AsyncLeaseGrant] = []
        try:
            with StopSignals(self.stop) if signals else nullcontext():
                while not self._course.is_over() and await self._stand_by(got):
                    await self._lead(got, work)
        finally:
            for grant in got:  # interrupted on the way to its work
                grant.abandon()
            self._running = False
            self._engine.unregister(resource)
            leased_work.discard(self)
            if self._teller is not None:
                await self._teller.finish(_FAREWELL)

    def _check_free(self) -> None:
        """Whether it can run now, and as whom."""
        self._notice_fork()
        if self._running:
            raise RuntimeError(f"{self!r} is running already")
        if self._course.state not in (State.STANDBY, State.ENDED):
            raise RuntimeError(f"{self!r} cannot run again: the work of a run that was interrupted has not ended")
        if self._course.state is State.ENDED:
            if self._stopped:
                raise RuntimeError(f"{self!r} was stopped, which is for good: make another one with client.elector(…)")
            self._course = AsyncCourse()

    def stop(self) -> None:
        """Stop the work if it runs here, release the lease, and let ``run`` return."""
        self._stopped = self._course.stopped = True
        self._course.bell.set()

    def resign(self) -> bool:
        """Stop the work and let another replica lead; True if we led. We stand by again after ``retry_every``."""
        self._notice_fork()
        leading = self._course.state is State.LEADING
        if leading:  # asked again while the work stops, the first time still counts
            self._course.resigned = True
            self._course.bell.set()
        return leading

    @property
    def busy(self) -> bool:
        """Whether the work runs here, in this process, and can still be told anything."""
        return self._grant is not None and self._era == forks.era and self._engine.owner.alive()

    async def leave(self) -> None:
        """Its client closes: wait until the work has ended and its lease is released, or until its grace is over."""
        over = AsyncWakeup()
        self._course.on_over(over.set)
        until = now() + self._terms.grace + _FAREWELL
        self.stop()
        while self._grant is not None and not self._course.overdue and (left := until - now()) > 0:
            await over.wait(left)

    def let_expire(self) -> None:
        """Whatever has not ended by now keeps its lease, and nobody renews it."""
        if self._grant is not None:
            self._grant.let_expire()

    def status(self) -> ElectorStatus:
        """What we know, for health endpoints; asks nobody."""
        self._notice_fork()
        grant = self._grant
        age = grant.age() if grant else None if self._renewed_at is None else now() - self._renewed_at
        return ElectorStatus(
            self.name, self.holder, self._course.state.value, self._leader, self._since, self._transitions, age,
            grant.fence if grant else None,
        )  # fmt: skip

    def gauges(self) -> Iterator[tuple[str, float]]:
        yield "electors_leading", float(self._course.state is State.LEADING)

    async def _stand_by(self, got: list[AsyncLeaseGrant]) -> bool:
        """Ask until we have got the lease; False when it is over. Woken by a release, and by ``stop()``."""
        if self._course.resigned:  # somebody else first; and not in their queue, where a wake-up would be lost on us
            self._course.resigned = False
            await self._course.pause(self._terms.retry_every)
        background, lease = self._background, AsyncLease(self._engine, self._lease_terms(), 0.0, {"elector": True})
        background.subscribe(self.name, self._course.bell.set)
        try:
            while not self._course.is_over():
                held = await self._ask(lease, got)
                if got:
                    return True
                await self._course.bell.wait(self._terms.until_next(held, kernel=self._kernel, chance=jitter(0.0, 1.0)))
            return False
        finally:
            background.unsubscribe(self.name, self._course.bell.set)

    async def _ask(self, lease: AsyncLease, got: list[AsyncLeaseGrant]) -> Refusal | None:
        """Who has it; None where that is us, or nobody answered."""
        try:
            held = await self._look() if self._kernel else None
            held = held or await lease.ask(got)
        except EngineError as error:
            if self._engine.closed or (isinstance(error, Refused) and not self._answered):
                raise  # what was never possible will not be
            log.warning(
                "elector %r: no answer, asks again: %s",
                self.name,
                error,
                extra={"event": "elector.unanswered", **self._fields()},
            )
            return None
        self._answered = True
        if held is not None:
            if held.session_key is not None:
                self._background.watch_session(self.name, held.session_key)
            if held.remaining is not None:
                self._renewed_at = now() - max(0.0, self._lease_terms().ttl - held.remaining)
            log.debug("elector %r: standing by, %s leads", self.name, held.holder, extra=self._fields(held.holder))
            self._see(held.holder)
        return held

    async def _look(self) -> Refusal | None:
        """Who has it, on one machine. To ask is to be ready to hold, which costs more than a standby should that looks
        as often as it does there."""
        rows = await self._engine.call("lease_held", {"name": self.name})
        return Refusal(self.name, rows[0]["holder"], rows[0]["remaining"], None) if rows else None

    async def _lead(self, got: list[AsyncLeaseGrant], work: Work) -> None:
        self._grant = grant = got[0]
        try:
            if not self._course.is_over() and self._course.turn(Event.GRANTED) is Action.START:
                log.info(
                    "elector %r: leading with fence %d",
                    self.name,
                    grant.fence,
                    extra={
                        "event": "elector.changed",
                        "to": "leading",
                        "fence": grant.fence,
                        **self._fields(self.holder),
                    },
                )
                telemetry.tell("elector.changed", to="leading")
                self._see(self.holder)
            await AsyncTenure(self._terms, self._course, got).serve(work)
            got.clear()
        finally:
            self._grant = self._leader = self._since = self._renewed_at = None
            self._course.tell_over()

    def _see(self, leader: str | None) -> None:
        if leader is None or leader == self._leader:
            return
        self._transitions += self._last_leader not in (None, leader)
        self._leader = self._last_leader = leader
        self._since = datetime.now(UTC)
        if self._teller is not None:
            self._teller.notify(leader)

    def _not_told(self, error: Exception) -> None:
        log.error(
            "elector %r: on_new_leader failed",
            self.name,
            exc_info=error,
            extra={"event": "elector.callback_failed", "elector": self.name},
        )

    def _lease_terms(self) -> LeaseTerms:
        terms = self._terms.lease(self.holder, kernel=self._kernel, on_beat=self._beaten)
        return terms._replace(on_recall=self._recalled)

    @property
    def _background(self) -> Background:
        return keeper_of(self._engine.database, brittle=self._lease_terms().brittle).background

    def _recalled(self) -> None:
        """In the keeper's thread: we hold the lease, and maybe do not know yet that we lead."""
        self._course.resigned = True
        self._course.bell.set()

    def _beaten(self, problem: HoldfastError | None, lost: bool) -> None:
        """In the keeper's thread."""
        if lost:
            self._course.bell.set()
        elif problem is None:
            log.info("elector %r: renewed", self.name, extra={"event": "elector.renewed", **self._fields(self.holder)})

    def _fields(self, holder: str | None = None) -> dict[str, Any]:
        """What a structured log can be searched by."""
        return {"elector": self.name, "replica": self.holder, "holder": holder}
