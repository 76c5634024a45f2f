# Generated from leased_attempt_async.py by scripts/unasync.py. Do not edit.
"""An operation whose effect is outside of the database: at most one live attempt, under a lease and not under a lock of
the database.

    operation_claim │ the function │ operation_finish

These are two statements: the first looks, takes the lease and writes the claim; the second writes the end and releases
the lease. A retry, and an operation under a policy or on a sovereign dataset, takes the lease first:

    operation_get → operation_acquire → operation_write(partial) │ the function │ operation_finish

A process that dies leaves ``partial`` in the log, and its lease says whether it is alive. The end is written only while
the lease is held, so a late owner is refused (FencedOut).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Self

from holdfast.database import driver_errors
from holdfast.database.background import background_of
from holdfast.database.engine import Engine
from holdfast.database.sessions import Row
from holdfast.errors import AcquireTimeout, EngineError, HoldfastError, Refused
from holdfast.lease.grant import LeaseGrant
from holdfast.lease.handle import PATIENT, Lease
from holdfast.lease.keeper import Beat
from holdfast.lease.terms import LeaseTerms
from holdfast.names import OnLost
from holdfast.operations.attempt import Attempt, has_lost_owner
from holdfast.operations.decide import (
    NO_PRIOR,
    Decision,
    Key,
    Prior,
    TransactionClaim,
    error_record,
    failure_detail,
    fenced_out,
    in_progress,
    refuses_dead,
)
from holdfast.operations.log import Chain
from holdfast.operations.op import Op
from holdfast.operations.outcome import Outcome
from holdfast.operations.spec import OperationSpec, encode_result
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import CancelScope, Wakeup
from holdfast.runtime.log import WARNING, logger

log = logger("holdfast.operation")

LOCKED = "55P03"
RELEASE_TIMEOUT = 5.0
"""Seconds that a finished operation waits for the release of its lease, which would expire anyway."""


def _fenced_out(key: Key) -> HoldfastError:
    return fenced_out(f"operation {key.label!r}")


class OperationLease(Lease):
    """The lease of a new operation: the statement that takes it writes the claim, too."""

    _statement = "operation_claim"

    def __init__(self, engine: Engine, terms: LeaseTerms, claim: Row) -> None:
        super().__init__(engine, terms, 0.0)
        self._more = claim
        self.answer: Row = {}

    def _call(
        self, token: str, beat: Beat | None, session_key: int | None, timeout: float
    ) -> tuple[dict[str, Any], float]:
        self.answer, asked_at = super()._call(token, beat, session_key, timeout)
        return self.answer, asked_at


class LatestLook:
    """Whether the operation that was looked at last had a row. One for each engine."""

    def __init__(self, engine: Engine) -> None:
        self.found_row = False


class LeasedAttempt(Attempt):
    """``changed_error``: raised when the log has changed since it was read, although the lease is held."""

    def __init__(self, spec: OperationSpec, changed_error: Callable[[Key], HoldfastError] = _fenced_out) -> None:
        super().__init__(spec)
        self.changed_error = changed_error
        self.grant: LeaseGrant | None = None
        self._dataset_grant: LeaseGrant | None = None
        """Of the whole dataset, if that is sovereign."""
        self._scopes: list[CancelScope] = []
        """Of the function, while that runs and ``on_lost="cancel"``."""
        self._op: Op | None = None
        self._unreported = [True]
        """Empty when ``on_lost`` was called. A list, because ``pop`` is atomic: a thread reports each loss."""
        self.answered_at = 0.0
        """When the row was fetched, after the answer: an entry is never later than the database's clock."""
        self._released: Wakeup | None = None
        """Set by a release of the lease, while this attempt is in the line of those that wait for it."""

    @classmethod
    def under(cls, spec: OperationSpec, grant: LeaseGrant) -> Self:
        """Part of a batch, which holds the lease and releases it."""
        attempt = cls(spec._replace(lease=grant.name))
        attempt.grant, attempt.prior = grant, NO_PRIOR
        return attempt

    def _lease(self, name: str) -> Lease:
        return Lease(self.spec.engine, self._lease_terms(name), 0.0)

    def _lease_terms(self, name: str) -> LeaseTerms:
        terms = self.spec.terms
        on_lost: OnLost[LeaseGrant] = self._report_loss if callable(terms.on_lost) else terms.on_lost
        return LeaseTerms.check(name, ttl=terms.ttl, on_lost=on_lost, kind="operation")._replace(failover="owner")

    def _report_loss(self, _grant: LeaseGrant) -> object:
        """Call the user's ``on_lost`` with ``op``, once: two leases may be lost. Returns what it returns, which may
        have to be awaited. A loss before there is an ``op`` is reported by ``_start``."""
        on_lost = self.spec.terms.on_lost
        if self._op is None or not callable(on_lost):
            return None
        try:
            self._unreported.pop()
        except IndexError:
            return None
        return on_lost(self._op)

    def grants(self) -> tuple[LeaseGrant, ...]:
        return tuple([grant for grant in (self.grant, self._dataset_grant) if grant is not None])

    @property
    def held_grant(self) -> LeaseGrant:
        if self.grant is None:
            raise RuntimeError(f"operation {self.spec.key.label!r} has ended: nothing can be recorded for it any more")
        return self.grant

    @property
    def fence(self) -> int:  # type: ignore[override]
        return self.held_grant.fence

    # Claim

    def begin(self) -> Op | Outcome[Any]:
        try:
            return super().begin()
        finally:
            self._leave_line()

    def _wait_in_line(self, seconds: float) -> None:
        """Wait for a release, in the same line as ``when_locked="wait"``. Polling is the net, as it is there."""
        name, background = self.spec.lease_name, background_of(self.spec.engine.database)
        if self._released is None:
            self._released = Wakeup()
            background.subscribe(name, self._released.set)
        net = self.spec.engine.poll * background.listener.count(name) * jitter(0.5, 1.5)
        self._released.wait(min(seconds, net))

    def _leave_line(self) -> None:
        released, self._released = self._released, None
        if released is not None:
            background_of(self.spec.engine.database).unsubscribe(self.spec.lease_name, released.set)

    def _claim(self) -> Op | Outcome[Any]:
        started, tries = now(), 0
        claimed = self._claim_new() if self.spec.governed is None and self.spec.dataset_claim is None else None
        if isinstance(claimed, Op):
            return claimed
        while True:
            prior, claimed = claimed or self.fetch_prior(), None
            decision = self.decide(prior)
            if not refuses_dead(decision, prior) and (outcome := self.settle(decision, prior)) is not None:
                return outcome
            if decision is not Decision.RUNNING and self.acquire(started):
                if refuses_dead(decision, prior):  # once more, under the lease: its owner may have ended it since
                    prior = self.fetch_prior()
                    decision = self.decide(prior)
                op = self._claim_under_lease(prior, decision)
                if op is not None:
                    return op
            if (outcome := self.wait_for_lock(prior, tries, started)) is not None:
                return outcome
            tries += 1

    def _claim_new(self) -> Op | Prior | None:
        """Claim an operation that has no row, with one statement; or return its row. None: another attempt is
        beginning, or a transaction has the lock."""
        spec = self.spec
        latest = spec.engine.state(LatestLook)
        if latest.found_row:  # hot: replays mostly follow each other, and a look alone takes half the time
            prior = self.fetch_prior()
            if prior.status is not None:
                return prior
            latest.found_row = False
        has_begun = not spec.checks.before and not spec.terms.options.marks_effect
        handle = OperationLease(spec.engine, self._lease_terms(spec.lease_name), spec.claim_row(has_begun))
        grants: list[LeaseGrant] = []
        try:
            refusal = handle._ask(grants)
            self.answered_at = now()
            if refusal is None:
                self.grant = grants[0]
        except BaseException as error:
            if grants:
                grants[0]._abandon()
            if (denied := self.refusal_of(error)) is not None:
                raise denied from error
            raise
        answer = handle.answer
        if self.grant is None:
            if answer["known"] is None:
                return None
            latest.found_row = True
            return Prior.from_row({**json.loads(answer["known"]), "now": answer["now"]})
        self.prior, grants = Prior.none(answer["now"]), [self.grant]
        op = self._op = Op(
            spec.key, self.prior, self.answered_at, attempt=1, fence=self.grant.fence, grants=grants,
            chain=Chain(spec.key.digest, answer["pointer"]), save=self.save,
        )  # fmt: skip
        op._has_begun = has_begun
        if op.lost:
            spec.engine.owner.notify(self._report_loss, self.grant)
        return op

    def fetch_prior(self) -> Prior:
        [row] = self.spec.engine.call("operation_get", {"key": self.spec.key.digest})
        self.answered_at = now()
        return Prior.from_row(row)

    def acquire(self, started: float) -> bool:
        """Acquire the lease, waiting for it if the terms say so; False when it is taken. OperationInProgress when the
        time is over."""
        spec, lease = self.spec, self._lease(self.spec.lease_name)
        # A policy decides what to do when the lease is taken, so it must not be waited for here.
        if spec.terms.when_locked != "wait" or spec.governed is not None or self.is_nested():
            self.grant = lease.try_acquire()
            return self.grant is not None and self.lock_dataset()
        try:
            self.grant = lease.acquire(timeout=max(0.0, started + spec.terms.timeout - now()))
        except AcquireTimeout as error:
            self.report_locked_out("timeout")
            why = f"its lock is held by {error.holder or 'another owner'}"
            raise in_progress(spec.key, now() - started, why) from error
        return True

    def try_acquire(self) -> bool:
        """Acquire the lease, and that of a sovereign dataset, without waiting for an owner that lives."""
        has_lost_owner(self.spec.engine, self.spec.owner_names)
        lease = self._lease(self.spec.lease_name)
        lease._busy_patience = PATIENT  # another takeover from the same dead process makes a purge begin
        self.grant = lease.try_acquire()
        return self.grant is not None and self.lock_dataset()

    def lock_dataset(self) -> bool:
        """Lock a sovereign dataset as a whole; releases everything when it is taken. True also if it is not sovereign.

        The lease first, then the lock of transactions: those ask in the reverse order, so one of two sees the other.
        """
        claim = self.spec.dataset_claim
        if claim is None:
            return True
        try:
            self._dataset_grant = self._lease(claim["lease"]).try_acquire()
            if self._dataset_grant is not None:
                [row] = self.spec.engine.call("operation_begin", {**claim, "lease": ""})
                if TransactionClaim.from_row(row).is_free:
                    return True
        except BaseException:
            self.release()
            raise
        self.release()
        return False

    def _claim_under_lease(self, prior: Prior, decision: Decision) -> Op | Outcome[Any] | None:
        """Write the claim, or fetch the row again if it has changed. None: a transaction has the lock."""
        try:
            while True:
                if (outcome := self.settle(decision, prior)) is not None:
                    self.release()
                    return outcome
                state: str | None = None
                if decision is not Decision.RUNNING:
                    claimed, state = self._start(prior, decision)
                    if claimed is not None:
                        return claimed
                if decision is Decision.RUNNING or state == "busy":
                    self.release()
                    return None
                prior = self.fetch_prior()
                decision = self.decide(prior)
        except BaseException:
            self.release()
            raise

    def _start(self, prior: Prior, decision: Decision) -> tuple[Op | Outcome[Any] | None, str]:
        """Recover a dead attempt and begin the next one; or None and the state of a claim that was refused."""
        spec, self.prior = self.spec, prior
        if spec.governed is not None:
            self.policy.check_locked(prior)
        is_sensitive = spec.governed is not None and self.policy.is_sensitive
        grants = self.grants()
        op = self._op = Op(
            spec.key, prior, self.answered_at, attempt=prior.attempt + 1, fence=self.held_grant.fence, grants=grants
        )
        if op.lost:
            spec.engine.owner.notify(self._report_loss, grants[0])
        self.prior = prior._replace(failures=prior.failed_attempts)
        if decision is not Decision.EXECUTE:
            op.attempt, op._has_begun = prior.attempt, True
            op._add_entry("lock_acquired", self.lock_detail())
            if (state := self.write(op, "partial", lock=spec.key.lock_key)) != "done":
                return None, state
            if self._policy is not None:
                self._policy.spend_approval()
            outcome = self._recover(op, prior, decision)
            if outcome is not None:
                return outcome, "done"
            op.attempt, op._has_begun = prior.attempt + 1, False
        else:
            op._add_entry("lock_acquired", self.lock_detail())
        approval = None if self._policy is None else self._policy.approval
        key = spec.key
        op._add_claim(spec.claim_entries(spec.fingerprint, key.version, key.bucket, key._parts_digest, approval))
        if not spec.checks.before and not spec.terms.options.marks_effect and not is_sensitive:
            op._has_begun = True
            op._add_entry("effect_started")
        state = self.write(op, "partial", lock=spec.key.lock_key)
        op._save = self.save
        if state != "done":
            return None, state
        if is_sensitive:
            self._check_again(op, prior)
        if self._policy is not None:
            self._policy.spend_approval()
        return op, state

    def _check_again(self, op: Op, prior: Prior) -> None:
        """A transaction that had the lock during the check may have committed the same since. None can from here on,
        and there is no effect yet."""
        try:
            self.policy.check_held(prior)
        except Exception as error:
            self.fail(op, error)
            raise

    def _recover(self, op: Op, prior: Prior, decision: Decision) -> Outcome[Any] | None:
        """Roll the dead attempt back, or ask the probe; the outcome if that says that it is done."""
        spec = self.spec
        try:
            if decision is Decision.ROLL_BACK and spec.rollback is not None:
                self.roll_back(spec.rollback, prior, self.answered_at)
                op._add_entry("rollback", {"attempt": prior.attempt, "name": spec.rollback_name})
            elif spec.verify is not None:
                done = self.probe(spec.verify, prior, self.answered_at)
                if done is not None:
                    return self.succeed(op, done.result)
            op._add_release()
            op.attempt += 1
            op._add_entry("lock_acquired", {**self.lock_detail(), "mended": True})
            op.attempt -= 1
            return None
        except Exception as error:
            if self.grant is not None:  # else the end is written already, or was refused
                self._close_partial(op, error_record(error, where=decision.name.lower()))
            raise

    # Around the function

    def enter(self) -> None:
        super().enter()
        if self.spec.terms.on_lost == "cancel":
            for grant in self.grants():
                grant._scope.enter()
                self._scopes.append(grant._scope)

    def leave(self, error: BaseException | None = None) -> BaseException | None:
        """LeaseLost or OwnershipUnknown in place of the cancellation that ``on_lost="cancel"`` has caused."""
        super().leave()
        while self._scopes:
            try:
                self._scopes.pop().exit(None if error is None else type(error), error, None)
            except HoldfastError as problem:
                error = problem
        return error

    # End

    def succeed(self, op: Op, value: Any) -> Outcome[Any]:
        op._close()
        try:
            result = encode_result(value)
        except ValueError as error:
            self._close_partial(op, error_record(error, where="result"))
            raise
        keep = self.spec.terms.keep
        op._add_entry("success", None if keep is None else {"keep": keep}, payload_hash=result["result_hash"])
        self.close(op, "success", keep=keep, failures=0, **result)
        return Outcome("success", False, op.attempt, value=value)

    def fail(self, op: Op, error: BaseException) -> bool:
        """After an interrupt the effect is unknown: the row stays partial."""
        if self.grant is None:
            return False  # the end is written already, or was refused
        if not isinstance(error, Exception):
            self.release()
            return False
        record = error_record(error, remembered=self.is_remembered(error))
        op._close()
        op._add_entry("failure", failure_detail(record))
        try:
            self.close(op, "failure", error=json.dumps(record), failures=self.prior.failures + 1)
        except HoldfastError as problem:
            self.log_unrecorded(problem)
        return False

    def _close_partial(self, op: Op, record: dict[str, Any]) -> None:
        """The effect is unknown, or its result cannot be stored: leave it to a recovery."""
        self.close(op, "partial", error=json.dumps(record))

    def close(self, op: Op, status: str, **more: Any) -> None:
        """Write the end and release the lease. ``changed_error`` when the log has changed."""
        op._add_release()
        grant = self.held_grant
        grant._releasing = True
        try:
            try:
                state = self.write(op, status, "operation_finish", tell=grant._beat is None, **more)
                if state == "done":
                    grant._finish()
            except Refused as error:
                if error.sqlstate != LOCKED:
                    raise
                state = self.write(op, status, **more)  # the release waits, the end must not
            if state != "done":
                raise self.changed_error(self.spec.key)
        finally:
            self.release()

    def correct(self, op: Op, status: str, actor: str, reason: str, **more: Any) -> None:
        """Write what an operator has decided, with an entry in the audit, and release the lease. ``changed_error`` when
        the log has changed."""
        op._add_release()
        try:
            if self.write(op, status, "operation_correct", actor=actor, reason=reason, **more) != "done":
                raise self.changed_error(self.spec.key)
        finally:
            self.release()

    def save(self, op: Op) -> None:
        """Write the pending entries of a running attempt."""
        if self.write(op, "partial") != "done":
            raise self.changed_error(self.spec.key)

    def lock_detail(self) -> dict[str, Any]:
        return self.spec.lock_detail(self.held_grant.name) or {}

    def write(self, op: Op, status: str, statement: str = "operation_write", /, **more: Any) -> str:
        """Write the row and the pending entries: "done"; "changed" when the chain has another end than expected; "busy"
        when a transaction has the lock. FencedOut when the lease is lost."""
        grant = self.held_grant
        more = {"failures": self.prior.failures, "owner": grant.name, "token": grant.token, **more}
        row = self.spec.row(op, status, **more)
        try:
            [answer] = self.spec.engine.call(statement, row, again={"again": True})
        except Refused as error:
            if (denied := self.refusal_of(error)) is not None:
                raise denied from error
            if error.sqlstate != driver_errors.SQLSTATE:
                raise
            raise _fenced_out(op.key) from error
        state: str = answer["state"]
        if state == "fenced":
            raise _fenced_out(op.key)
        if state == "changed" and (self.fetch_prior()).pointer == row["pointer"]:
            state = "done"  # written twice, because the first answer was lost
        if state == "done":
            op._chain.confirm()
        return state

    def drop(self) -> None:
        self._leave_line()
        super().drop()
        self.release()

    def release(self) -> None:
        """Release both leases even if interrupted: one that stays would be renewed as long as the process lives."""
        try:
            if self.grant is not None:
                self._release(self.grant)
        finally:
            self.grant = None
            try:
                if self._dataset_grant is not None:
                    self._release(self._dataset_grant)
            finally:
                self._dataset_grant = None

    def _release(self, grant: LeaseGrant) -> None:
        try:
            grant.release(timeout=RELEASE_TIMEOUT)
        except EngineError as error:
            log.event(
                "operation.released_late", WARNING,
                "operation %(operation)r has ended; its lease is released later, or expires: %(error)s",
                operation=self.spec.key.label, error=str(error),
            )  # fmt: skip
            grant._abandon()
