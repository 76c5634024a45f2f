# Generated from external_async.py by scripts/unasync.py. Do not edit.
"""An operation whose effect is outside: at most one live attempt, under a lease and never under a database lock.

The claim is a short transaction that leaves ``partial`` in the log, and so does a process that dies: whether its owner
lives is for the lease to say. The end is written only while the lease is held, so a late owner is refused.
"""

from __future__ import annotations

import json
from typing import Any, Self

from holdfast.database import driver_errors as drivers
from holdfast.errors import AcquireTimeout, EngineError, HoldfastError, Refused
from holdfast.lease.grant import LeaseGrant
from holdfast.lease.handle import Lease
from holdfast.lease.terms import LeaseTerms
from holdfast.operations.attempt import Attempt
from holdfast.operations.decide import NOTHING, Act, Begun, Prior, failed, in_progress, late, told
from holdfast.operations.notes import claim_noted
from holdfast.operations.outcome import Outcome
from holdfast.operations.plan import Plan, kept, kept_for
from holdfast.operations.running import Running
from holdfast.runtime.clock import now
from holdfast.runtime.log import logger

log = logger("holdfast.operation")

PAUSE = 5.0
"""Seconds for which a finished operation waits for its lease to be released; it would expire by itself."""


class External(Attempt):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._lease = self._lease_called(plan.lease)
        self._grant: LeaseGrant | None = None
        self._whole: LeaseGrant | None = None
        """Of the dataset, if that is sovereign."""
        self._asked_at = 0.0

    @classmethod
    def part(cls, plan: Plan, grant: LeaseGrant) -> Self:
        """Of something that has the lease already, and ends it."""
        made = cls(plan._replace(owner=grant.name))
        made._grant, made.prior = grant, NOTHING
        return made

    def _lease_called(self, name: str) -> Lease:
        return Lease(self.plan.engine, LeaseTerms.check(name, ttl=self.plan.terms.ttl), 0.0)

    def _begin(self) -> Running | Outcome:
        started, asked = now(), 0
        while True:
            prior = self._look()
            act = self.decide(prior)
            if (outcome := self.settled(act, prior)) is not None:
                return outcome
            if act is not Act.RUNNING and self.acquire(started):
                found = self._claim(prior, act)
                if found is not None:
                    return found
            if (outcome := self.locked(prior, asked, started)) is not None:
                return outcome
            asked += 1

    def succeed(self, op: Running, value: Any) -> Outcome:
        op.over()
        try:
            result = kept(value)
        except ValueError as error:
            self._leave(op, {**told(error), "where": "result"})
            raise
        keep = self.plan.terms.keep
        op.note("success", kept_for(keep), payload_hash=result["result_hash"])
        self._close(op, "success", keep=keep, failures=0, **result)
        return Outcome("success", False, op.attempt, value=value)

    def fail(self, op: Running, error: BaseException) -> bool:
        """Whoever was interrupted does not know what it has done: that stays partial."""
        if self._grant is None:
            return False  # it is written down already, or refused
        if not isinstance(error, Exception):
            self.let_go()
            return False
        said = told(error, remembered=self.remembers(error))
        op.over()
        op.note("failure", failed(said))
        try:
            self._close(op, "failure", error=json.dumps(said), failures=self.prior.failures + 1)
        except HoldfastError as problem:
            self.unrecorded(problem)
        return False

    def _look(self) -> Prior:
        self._asked_at = now()
        [row] = self.plan.engine.call("operation_get", {"key": self.plan.key.digest})
        return Prior.of(row)

    def acquire(self, started: float) -> bool:
        """The lease, waited for if that is what was asked for."""
        terms = self.plan.terms
        asks = self.plan.governed is not None  # the policy, what it means that somebody else has it
        if terms.when_locked != "wait" or asks or self.in_its_own_way():
            self._grant = self._lease.try_acquire()
            return self._grant is not None and self._undivided()
        try:
            self._grant = self._lease.acquire(timeout=max(0.0, started + terms.timeout - now()))
        except AcquireTimeout as error:
            self.locked_out("timeout")
            raise in_progress(self.plan.key, now() - started, f"{error.holder or 'somebody else'} is at it") from error
        return True

    def _undivided(self) -> bool:
        """Whether a sovereign dataset is ours as a whole. The lease first, then whether a transaction has the lock:
        those ask the other way round, so of two one sees the other."""
        if (whole := self.plan.whole) is None:
            return True
        try:
            self._whole = self._lease_called(whole["lease"]).try_acquire()
            if self._whole is not None:
                [row] = self.plan.engine.call("operation_begin", {**whole, "lease": ""})
                if Begun.of(row).free:
                    return True
        except BaseException:
            self.let_go()
            raise
        self.let_go()
        return False

    def _claim(self, prior: Prior, act: Act) -> Running | Outcome | None:
        """Under the lease: what was seen must still be so, or it is looked at again. None: a transaction is at it."""
        try:
            while True:
                if (outcome := self.settled(act, prior)) is not None:
                    self.let_go()
                    return outcome
                state: str | None = None
                if act is not Act.RUNNING:
                    found, state = self._take(prior, act)
                    if found is not None:
                        return found
                if act is Act.RUNNING or state == "busy":
                    self.let_go()
                    return None
                prior = self._look()
                act = self.decide(prior)
        except BaseException:
            self.let_go()
            raise

    def _take(self, prior: Prior, act: Act) -> tuple[Running | Outcome | None, str]:
        """Make it ours; then mend what a dead attempt left, and begin the next one."""
        plan, self.prior = self.plan, prior
        self.permit_locked(prior)
        op = Running(plan.key, prior, self._asked_at, attempt=prior.attempt + 1, fence=self.held.fence)
        self.prior = prior._replace(failures=prior.failed)
        if act in (Act.ROLL_BACK, Act.VERIFY):
            op.attempt, op.began = prior.attempt, True
            op.note("lock_acquired", self._lock())
            if (state := self._write(op, "partial", lock=plan.key.lock_key)) != "done":
                return None, state
            self.spend()
            outcome = self._mend(op, prior, act)
            if outcome is not None:
                return outcome, "done"
            op.attempt, op.began = prior.attempt + 1, False
        else:
            op.note("lock_acquired", self._lock())
        claim_noted(op, plan)
        if not plan.preconditions and not plan.terms.marks_effect and not self.is_sensitive:
            op.began = True
            op.note("effect_started")
        state = self._write(op, "partial", lock=plan.key.lock_key)
        op._save = self.save
        if state != "done":
            return None, state
        if self.is_sensitive:
            self._confirm(op, prior)
        self.spend()
        return op, state

    def _confirm(self, op: Running, prior: Prior) -> None:
        """A transaction that had the lock when the policy was asked may have committed the same since. From here on
        none can, and nothing was done yet: it is asked once more."""
        try:
            self.permit_held(prior)
        except Exception as error:
            self.fail(op, error)
            raise

    def _mend(self, op: Running, prior: Prior, act: Act) -> Outcome | None:
        plan = self.plan
        try:
            if act is Act.ROLL_BACK and plan.rollback is not None:
                self.undo(plan.rollback, prior, self._asked_at)
                op.note("rollback", {"attempt": prior.attempt, "name": plan.handler})
            elif plan.verify is not None:
                done = self.probe(plan.verify, prior, self._asked_at)
                if done is not None:
                    return self.succeed(op, done.result)
            op.released()
            op.attempt += 1
            op.note("lock_acquired", {**self._lock(), "mended": True})
            op.attempt -= 1
            return None
        except Exception as error:
            if self._grant is not None:  # else it is written down already, or refused
                self._leave(op, {**told(error), "where": act.name.lower()})
            raise

    def _lock(self) -> dict[str, Any]:
        return self.plan.locked(self.held.name) or {}

    def save(self, op: Running) -> None:
        """What it has noted."""
        if self._write(op, "partial") != "done":
            raise self._overtaken()

    def _leave(self, op: Running, said: dict[str, Any]) -> None:
        """What it has done is not known, or cannot be kept: that stays to be mended."""
        self._close(op, "partial", error=json.dumps(said))

    def _close(self, op: Running, status: str, **more: Any) -> None:
        op.released()
        try:
            state = self._write(op, status, **more)
            if state != "done":
                raise self._overtaken()
        finally:
            self.let_go()

    def _overtaken(self) -> HoldfastError:
        return late(f"operation {self.plan.key.label!r}")

    def _write(self, op: Running, status: str, **more: Any) -> str:
        """One that was sent twice because its answer was lost finds the end of the chain to be its own."""
        held = self.held
        more = {"failures": self.prior.failures, "owner": held.name, "token": held.token, **more}
        parameters = self.plan.parameters(op, status, **more)
        try:
            [row] = self.plan.engine.call("operation_write", parameters)
        except Refused as error:
            if error.sqlstate != drivers.SQLSTATE:
                raise
            raise late(f"operation {op.key.label!r}") from error
        state: str = row["state"]
        if state == "fenced":
            raise late(f"operation {op.key.label!r}")
        if state == "changed" and (self._look()).pointer == parameters["pointer"]:
            state = "done"
        if state == "done":
            op.chain.written()
        return state

    @property
    def fence(self) -> int:  # type: ignore[override]
        return self.held.fence

    @property
    def held(self) -> LeaseGrant:
        if self._grant is None:
            raise RuntimeError(f"operation {self.plan.key.label!r} is over: nothing can be noted of it any more")
        return self._grant

    def drop(self) -> None:
        super().drop()
        self.let_go()

    def let_go(self) -> None:
        """Of both, whoever is interrupted here: one that stays is renewed for as long as the process lives."""
        try:
            if self._grant is not None:
                self._release(self._grant)
        finally:
            self._grant = None
            try:
                if self._whole is not None:
                    self._release(self._whole)
            finally:
                self._whole = None

    def _release(self, grant: LeaseGrant) -> None:
        try:
            grant.release(timeout=PAUSE)
        except EngineError as error:
            log.warning(
                "the lease of operation %r is released later: %s",
                self.plan.key.label,
                error,
                extra={"event": "operation.released_late", "operation": self.plan.key.label, "error": str(error)},
            )
            grant.abandon()
