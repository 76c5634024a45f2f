# Generated from tenure_async.py by scripts/unasync.py. Do not edit.
"""One time of leading: the work beside its supervisor, told to stop, waited for, and the lease given back after it."""

from __future__ import annotations

import os
from collections.abc import Callable

from holdfast.errors import EngineError, FencedOut, LeaseLost, OwnershipUnknown
from holdfast.lease.grant import EXIT_STATUS, LeaseGrant
from holdfast.recipes.election import Action, ElectorTerms, Event, State, after
from holdfast.recipes.term import Term
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import Wakeup, Worker
from holdfast.runtime.log import logger

log = logger("holdfast.elector")

Work = Callable[[Term], object]
_EXPECTED = (LeaseLost, OwnershipUnknown, FencedOut)
"""How work may end that was told to stop."""


class Course:
    """Where an elector stands in its table, and what was wished of it meanwhile, from whatever thread."""

    def __init__(self) -> None:
        self.state = State.STANDBY
        self.stopped = self.resigned = self.overdue = False
        self.bell = Wakeup()
        self._waiting: list[Callable[[], None]] = []

    def turn(self, event: Event) -> Action:
        self.state, action = after(self.state, event)
        return action

    def is_over(self) -> bool:
        if self.stopped:
            self.turn(Event.STOP)
        return self.state is State.ENDED

    def on_over(self, told: Callable[[], None]) -> None:
        """Somebody else waits for the end of a term, or for the end of its grace."""
        self._waiting.append(told)

    def tell_over(self) -> None:
        for told in self._waiting:
            told()

    def pause(self, seconds: float) -> None:
        until = now() + seconds
        while not self.stopped and (left := until - now()) > 0:
            self.bell.wait(left)


class Tenure:
    def __init__(self, terms: ElectorTerms, course: Course, got: list[LeaseGrant]) -> None:
        """``got``: the lease, in there for as long as whoever made us may give it back when we are interrupted."""
        self._terms, self._course, self._got = terms, course, got
        self._grant = grant = got[0]
        self._term = Term(grant)
        self._told_at: float | None = None
        self._alone = False
        course.overdue = False
        self._fields = {"elector": terms.name, "replica": grant.holder, "holder": grant.holder}

    def serve(self, work: Work) -> None:
        """Run the work until it has ended, whatever that takes, and release the lease."""
        job = Worker(work, self._term, self._ended)
        try:
            if self._course.state is State.LEADING:
                job.start()
                self._supervise_anyhow(job)
        finally:
            if job.ended:
                self._release()
            else:  # interrupted twice: nobody waits for the work any more
                self._got.clear()
                self._grant.let_expire()
                self._alone = True
                if job.ended:  # this very moment
                    self._ended()
        self._judge(job.error)

    def _ended(self) -> None:
        """In the work's own thread. Where nobody waits for it, its lease goes with it."""
        self._course.bell.set()
        if self._alone:
            self._course.turn(Event.WORK_ENDED)
            self._grant.abandon()

    def _supervise_anyhow(self, job: Worker) -> None:
        try:
            self._supervise(job)
        except BaseException:  # run() itself is cancelled or interrupted: the work is stopped all the same
            self._course.stopped = True
            self._supervise(job)
            raise

    def _supervise(self, job: Worker) -> None:
        """Until the work has ended, however it is told to."""
        while not job.ended:
            event = self._event()
            if event is not None and self._course.turn(event) is Action.CANCEL:
                self._told_at = now()
                if event is Event.LOST:
                    self._tell_loss()
                self._term.stopping.set()
                job.cancel()
            elif event is Event.GRACE_OVER:
                self._overrun()
            else:
                self._course.bell.wait(self._until_event())

    def _event(self) -> Event | None:
        course = self._course
        if course.stopped and course.state in (State.LEADING, State.YIELDING):
            return Event.STOP
        if course.state is State.LEADING:
            if course.resigned:
                return Event.RESIGN
            return Event.LOST if self._term.remaining() <= self._terms.grace else None
        if not course.overdue and self._told_at is not None and now() >= self._told_at + self._terms.grace:
            return Event.GRACE_OVER
        return None

    def _until_event(self) -> float:
        if self._course.state is State.LEADING:
            return max(0.001, self._term.remaining() - self._terms.grace)
        if not self._course.overdue and self._told_at is not None:
            return max(0.001, self._told_at + self._terms.grace - now())
        return 1.0

    def _overrun(self) -> None:
        """It was told to stop, and has not: what cannot be stopped is not released. It ends with its TTL."""
        log.error(
            "elector %r: the work has not stopped in %g s; its lease is not released, and not renewed any more",
            self._terms.name, self._terms.grace, extra={"event": "elector.overrun", **self._fields},
        )  # fmt: skip
        if self._terms.overrun == "exit":
            log.critical(
                "elector %r: overrun='exit': this process ends now",
                self._terms.name,
                extra={"event": "elector.exits", **self._fields},
            )
            os._exit(EXIT_STATUS)
        if not self._term.lost:
            self._grant.let_expire()
        self._course.overdue = True
        self._course.tell_over()

    def _tell_loss(self) -> None:
        left = self._term.remaining()
        why = f"not renewed in time, {left:.1f} s are left for the work to stop" if left else "it is gone"
        log.info(
            "elector %r: lost the lease: %s",
            self._terms.name,
            why,
            extra={"event": "elector.changed", "to": "lost", **self._fields},
        )
        telemetry.tell("elector.changed", to="lost")

    def _release(self) -> None:
        self._course.turn(Event.WORK_ENDED)
        try:
            if self._grant.lost:
                self._grant.abandon()
                return
            self._grant.release(timeout=self._grant.limit())
        except EngineError as error:
            self._grant.abandon()
            log.info(
                "elector %r: released later: %s",
                self._terms.name,
                error,
                extra={"event": "elector.released_late", **self._fields},
            )
        else:
            log.info(
                "elector %r: released",
                self._terms.name,
                extra={"event": "elector.changed", "to": "released", **self._fields},
            )
            telemetry.tell("elector.changed", to="released")

    def _judge(self, error: BaseException | None) -> None:
        """What the work raised is the caller's to know; unless it was told to stop, and stopped."""
        if error is None or (self._told_at is not None and isinstance(error, _EXPECTED)):
            return
        if self._told_at is not None and type(error).__name__ == "CancelledError":
            return
        raise error
