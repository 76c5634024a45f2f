"""An operation whose effect is outside: at most one live attempt, under a lease and never under a database lock.

The claim is a short transaction that leaves ``partial`` in the log, and so does a process that dies: whether its owner
lives is for the lease to say. The end is written only while the lease is held, so a late owner is refused.
"""

from __future__ import annotations

import json
from typing import Any, Self

from holdfast.database import driver_errors as drivers
from holdfast.errors import AcquireTimeout, EngineError, HoldfastError, Refused
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.lease.handle_async import AsyncLease
from holdfast.lease.terms import LeaseTerms
from holdfast.operations.attempt_async import AsyncAttempt
from holdfast.operations.decide import NOTHING, Act, Begun, Prior, failed, in_progress, late, told
from holdfast.operations.notes_async import claim_noted
from holdfast.operations.outcome import Outcome
from holdfast.operations.plan_async import AsyncPlan, kept, kept_for
from holdfast.operations.running_async import AsyncRunning
from holdfast.runtime.clock import now
from holdfast.runtime.log import logger

log = logger("holdfast.operation")

PAUSE = 5.0
"""Seconds for which a finished operation waits for its lease to be released; it would expire by itself."""


class AsyncExternal(AsyncAttempt):
    def __init__(self, plan: AsyncPlan) -> None:
        super().__init__(plan)
        self._lease = self._lease_called(plan.lease)
        self._grant: AsyncLeaseGrant | None = None
        self._whole: AsyncLeaseGrant | None = None
        """Of the dataset, if that is sovereign."""
        self._asked_at = 0.0

    @classmethod
    def part(cls, plan: AsyncPlan, grant: AsyncLeaseGrant) -> Self:
        """Of something that has the lease already, and ends it."""
        made = cls(plan._replace(owner=grant.name))
        made._grant, made.prior = grant, NOTHING
        return made

    def _lease_called(self, name: str) -> AsyncLease:
        return AsyncLease(self.plan.engine, LeaseTerms.check(name, ttl=self.plan.terms.ttl), 0.0)

    async def _begin(self) -> AsyncRunning | Outcome:
        started, asked = now(), 0
        while True:
            prior = await self._look()
            act = self.decide(prior)
            if (outcome := self.settled(act, prior)) is not None:
                return outcome
            if act is not Act.RUNNING and await self.acquire(started):
                found = await self._claim(prior, act)
                if found is not None:
                    return found
            if (outcome := await self.locked(prior, asked, started)) is not None:
                return outcome
            asked += 1

    async def succeed(self, op: AsyncRunning, value: Any) -> Outcome:
        await op.over()
        try:
            result = kept(value)
        except ValueError as error:
            await self._leave(op, {**told(error), "where": "result"})
            raise
        keep = self.plan.terms.keep
        op.note("success", kept_for(keep), payload_hash=result["result_hash"])
        await self._close(op, "success", keep=keep, failures=0, **result)
        return Outcome("success", False, op.attempt, value=value)

    async def fail(self, op: AsyncRunning, error: BaseException) -> bool:
        """Whoever was interrupted does not know what it has done: that stays partial."""
        if self._grant is None:
            return False  # it is written down already, or refused
        if not isinstance(error, Exception):
            await self.let_go()
            return False
        said = told(error, remembered=self.remembers(error))
        await op.over()
        op.note("failure", failed(said))
        try:
            await self._close(op, "failure", error=json.dumps(said), failures=self.prior.failures + 1)
        except HoldfastError as problem:
            self.unrecorded(problem)
        return False

    async def _look(self) -> Prior:
        self._asked_at = now()
        [row] = await self.plan.engine.call("operation_get", {"key": self.plan.key.digest})
        return Prior.of(row)

    async def acquire(self, started: float) -> bool:
        """The lease, waited for if that is what was asked for."""
        terms = self.plan.terms
        asks = self.plan.governed is not None  # the policy, what it means that somebody else has it
        if terms.when_locked != "wait" or asks or self.in_its_own_way():
            self._grant = await self._lease.try_acquire()
            return self._grant is not None and await self._undivided()
        try:
            self._grant = await self._lease.acquire(timeout=max(0.0, started + terms.timeout - now()))
        except AcquireTimeout as error:
            self.locked_out("timeout")
            raise in_progress(self.plan.key, now() - started, f"{error.holder or 'somebody else'} is at it") from error
        return True

    async def _undivided(self) -> bool:
        """Whether a sovereign dataset is ours as a whole. The lease first, then whether a transaction has the lock:
        those ask the other way round, so of two one sees the other."""
        if (whole := self.plan.whole) is None:
            return True
        try:
            self._whole = await self._lease_called(whole["lease"]).try_acquire()
            if self._whole is not None:
                [row] = await self.plan.engine.call("operation_begin", {**whole, "lease": ""})
                if Begun.of(row).free:
                    return True
        except BaseException:
            await self.let_go()
            raise
        await self.let_go()
        return False

    async def _claim(self, prior: Prior, act: Act) -> AsyncRunning | Outcome | None:
        """Under the lease: what was seen must still be so, or it is looked at again. None: a transaction is at it."""
        try:
            while True:
                if (outcome := self.settled(act, prior)) is not None:
                    await self.let_go()
                    return outcome
                state: str | None = None
                if act is not Act.RUNNING:
                    found, state = await self._take(prior, act)
                    if found is not None:
                        return found
                if act is Act.RUNNING or state == "busy":
                    await self.let_go()
                    return None
                prior = await self._look()
                act = self.decide(prior)
        except BaseException:
            await self.let_go()
            raise

    async def _take(self, prior: Prior, act: Act) -> tuple[AsyncRunning | Outcome | None, str]:
        """Make it ours; then mend what a dead attempt left, and begin the next one."""
        plan, self.prior = self.plan, prior
        await self.permit_locked(prior)
        op = AsyncRunning(plan.key, prior, self._asked_at, attempt=prior.attempt + 1, fence=self.held.fence)
        self.prior = prior._replace(failures=prior.failed)
        if act in (Act.ROLL_BACK, Act.VERIFY):
            op.attempt, op.began = prior.attempt, True
            op.note("lock_acquired", self._lock())
            if (state := await self._write(op, "partial", lock=plan.key.lock_key)) != "done":
                return None, state
            self.spend()
            outcome = await self._mend(op, prior, act)
            if outcome is not None:
                return outcome, "done"
            op.attempt, op.began = prior.attempt + 1, False
        else:
            op.note("lock_acquired", self._lock())
        claim_noted(op, plan)
        if not plan.preconditions and not plan.terms.marks_effect and not self.is_sensitive:
            op.began = True
            op.note("effect_started")
        state = await self._write(op, "partial", lock=plan.key.lock_key)
        op._save = self.save
        if state != "done":
            return None, state
        if self.is_sensitive:
            await self._confirm(op, prior)
        self.spend()
        return op, state

    async def _confirm(self, op: AsyncRunning, prior: Prior) -> None:
        """A transaction that had the lock when the policy was asked may have committed the same since. From here on
        none can, and nothing was done yet: it is asked once more."""
        try:
            await self.permit_held(prior)
        except Exception as error:
            await self.fail(op, error)
            raise

    async def _mend(self, op: AsyncRunning, prior: Prior, act: Act) -> Outcome | None:
        plan = self.plan
        try:
            if act is Act.ROLL_BACK and plan.rollback is not None:
                await self.undo(plan.rollback, prior, self._asked_at)
                op.note("rollback", {"attempt": prior.attempt, "name": plan.handler})
            elif plan.verify is not None:
                done = await self.probe(plan.verify, prior, self._asked_at)
                if done is not None:
                    return await self.succeed(op, done.result)
            op.released()
            op.attempt += 1
            op.note("lock_acquired", {**self._lock(), "mended": True})
            op.attempt -= 1
            return None
        except Exception as error:
            if self._grant is not None:  # else it is written down already, or refused
                await self._leave(op, {**told(error), "where": act.name.lower()})
            raise

    def _lock(self) -> dict[str, Any]:
        return self.plan.locked(self.held.name) or {}

    async def save(self, op: AsyncRunning) -> None:
        """What it has noted."""
        if await self._write(op, "partial") != "done":
            raise self._overtaken()

    async def _leave(self, op: AsyncRunning, said: dict[str, Any]) -> None:
        """What it has done is not known, or cannot be kept: that stays to be mended."""
        await self._close(op, "partial", error=json.dumps(said))

    async def _close(self, op: AsyncRunning, status: str, **more: Any) -> None:
        op.released()
        try:
            state = await self._write(op, status, **more)
            if state != "done":
                raise self._overtaken()
        finally:
            await self.let_go()

    def _overtaken(self) -> HoldfastError:
        return late(f"operation {self.plan.key.label!r}")

    async def _write(self, op: AsyncRunning, status: str, **more: Any) -> str:
        """One that was sent twice because its answer was lost finds the end of the chain to be its own."""
        held = self.held
        more = {"failures": self.prior.failures, "owner": held.name, "token": held.token, **more}
        parameters = self.plan.parameters(op, status, **more)
        try:
            [row] = await self.plan.engine.call("operation_write", parameters)
        except Refused as error:
            if error.sqlstate != drivers.SQLSTATE:
                raise
            raise late(f"operation {op.key.label!r}") from error
        state: str = row["state"]
        if state == "fenced":
            raise late(f"operation {op.key.label!r}")
        if state == "changed" and (await self._look()).pointer == parameters["pointer"]:
            state = "done"
        if state == "done":
            op.chain.written()
        return state

    @property
    def fence(self) -> int:  # type: ignore[override]
        return self.held.fence

    @property
    def held(self) -> AsyncLeaseGrant:
        if self._grant is None:
            raise RuntimeError(f"operation {self.plan.key.label!r} is over: nothing can be noted of it any more")
        return self._grant

    async def drop(self) -> None:
        await super().drop()
        await self.let_go()

    async def let_go(self) -> None:
        """Of both, whoever is interrupted here: one that stays is renewed for as long as the process lives."""
        try:
            if self._grant is not None:
                await self._release(self._grant)
        finally:
            self._grant = None
            try:
                if self._whole is not None:
                    await self._release(self._whole)
            finally:
                self._whole = None

    async def _release(self, grant: AsyncLeaseGrant) -> None:
        try:
            await grant.release(timeout=PAUSE)
        except EngineError as error:
            log.warning(
                "the lease of operation %r is released later: %s",
                self.plan.key.label,
                error,
                extra={"event": "operation.released_late", "operation": self.plan.key.label, "error": str(error)},
            )
            grant.abandon()
