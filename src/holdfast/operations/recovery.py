# Generated from recovery_async.py by scripts/unasync.py. Do not edit.
"""What is done to an operation from outside of a run: recovery after a dead owner; rollback, completion and reset by an
operator.

Each works under the lease of the operation, and leaves an operation with a live owner alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from holdfast.errors import HoldfastError, OperationFailed, PolicyDenied
from holdfast.operations.decide import ORIGIN, Key, Prior, correction_error, error_record, in_progress
from holdfast.operations.leased_attempt import LeasedAttempt
from holdfast.operations.log import has_effect
from holdfast.operations.op import Op
from holdfast.operations.outcome import RecoveryRecord
from holdfast.operations.spec import OperationSpec


class Recovery:
    """Use it once: each method acquires the lease and releases it."""

    def __init__(self, spec: OperationSpec) -> None:
        self._attempt = LeasedAttempt(spec, _changed_error)

    def recover(self, permit: Callable[[], None]) -> RecoveryRecord | None:
        """Finish or roll back what a dead owner left; None when there is nothing to recover any more. Left partial when
        another process has its lock. ``permit`` raises PolicyDenied when it must not be rolled back."""
        attempt = self._attempt
        try:
            prior = self._take_over()
            if attempt.grant is None:
                current = attempt.fetch_prior()
                is_left = current.status == "partial" and not current.alive
                return self._record("partial", "another process has its lock: recover it later") if is_left else None
            if prior is None or prior.status != "partial":
                return None
            op, spec = self._op(prior), attempt.spec
            if prior.effect_started:
                if not self._claim(op, prior):
                    return None
                if self._finish_or_undo(op, prior, permit):
                    return self._record("success", "its verify function found the effect")
            detail = {"attempt": prior.attempt, "name": spec.rollback_name}
            op._add_entry("rollback", detail)
            op._has_begun = False
            error = json.dumps(correction_error("rollback", detail))
            attempt.close(op, "undone", error=error, failures=prior.failed_attempts)
            if not prior.effect_started:
                reason = "its effect had not started"
            elif spec.rollback is None:
                reason = "its verify function found no effect"
            else:
                reason = f"its rollback {spec.rollback_name!r} was called"
            return self._record("undone", reason)
        finally:
            attempt.release()

    def roll_back(self, actor: str, reason: str, expected: str | None) -> None:
        """Undo the operation, whatever its status. ``expected``: the end of its chain must be this pointer.
        OperationInProgress when it is running or has changed, LookupError when there is nothing to undo,
        OperationFailed when its rollback is not registered here."""
        attempt = self._attempt
        try:
            prior = self._take_over_or_raise()
            spec = attempt.spec
            if expected is not None and prior.pointer != expected:
                raise _changed_error(spec.key)
            if not has_effect(prior):
                raise LookupError(f"operation {spec.key.label!r} leaves nothing to undo: it is {prior.status}")
            if spec.rollback is None:
                raise _no_rollback(spec, prior)
            op = self._op(prior)
            if prior.status == "success":  # is never run again, so no claim is needed
                attempt.roll_back(spec.rollback, prior, attempt.answered_at)
            else:
                attempt.spec = spec._replace(verify=None)
                if not self._claim(op, prior):
                    raise _changed_error(spec.key)
                self._finish_or_undo(op, prior, lambda: None)
            self._correct(op, "rollback", actor, reason, prior.failed_attempts)
        finally:
            attempt.release()

    def complete(self, result: dict[str, str], actor: str, reason: str) -> None:
        """Record a success with this result, see ``encode_result``, in the name of the last attempt.
        OperationInProgress when it is running or has changed, LookupError when there is nothing to complete."""
        attempt = self._attempt
        try:
            prior = self._take_over_or_raise()
            label = attempt.spec.key.label
            if prior.status == "success":
                raise LookupError(f"operation {label!r} has succeeded already: callers get its recorded result")
            if prior.status != "partial" and not prior.effect_started:
                raise LookupError(f"operation {label!r} is {prior.status} and left no effect: run it again instead")
            op = self._op(prior)
            op._has_begun = True
            op._add_entry("success", {"actor": actor, "reason": reason}, payload_hash=result["result_hash"])
            attempt.correct(op, "success", actor, reason, failures=0, **result)
        finally:
            attempt.release()

    def reset(self, actor: str, reason: str) -> None:
        """Let the operation be run as if it were new; its entries stay in the log. OperationInProgress while it is
        running."""
        try:
            prior = self._take_over_or_raise()
            self._correct(self._op(prior), "reset", actor, reason, 0)
        finally:
            self._attempt.release()

    def _record(self, status: Literal["success", "undone", "partial"], reason: str) -> RecoveryRecord:
        key = self._attempt.spec.key
        return RecoveryRecord(key.digest, key.label, status, reason)

    def _take_over_or_raise(self) -> Prior:
        prior = self._take_over()
        if prior is None:
            raise in_progress(self._attempt.spec.key)
        return prior

    def _take_over(self) -> Prior | None:
        """Acquire the lease and fetch the row; None when the operation has a live owner, or no row."""
        attempt = self._attempt
        if not attempt.try_acquire():
            return None
        prior = attempt.fetch_prior()
        if prior.status is None or prior.alive:
            return None
        attempt.prior = prior
        spec = attempt.spec
        key = replace(spec.key, **dict(zip(ORIGIN, json.loads(prior.origin or "[]"), strict=True)))
        attempt.spec = spec._replace(key=key, fingerprint=prior.fingerprint)
        return prior

    def _op(self, prior: Prior) -> Op:
        """The operation in its last attempt: nothing here is a new one."""
        attempt = self._attempt
        op = Op(attempt.spec.key, prior, attempt.answered_at, attempt=prior.attempt, fence=attempt.held_grant.fence)
        op._add_entry("lock_acquired", {**attempt.lock_detail(), "outside": True})
        return op

    def _claim(self, op: Op, prior: Prior) -> bool:
        """Mark the row as an attempt under way, before a probe or rollback is called. False when another run has
        changed the row meanwhile.

        The lease alone does not exclude other runs: those in a transaction (``tx=``) take no lease, and a batch takes
        one of its own. With the row marked they see a running operation, or their commit is refused.
        """
        op._has_begun = True
        return self._attempt.write(op, "partial", error=prior.error) == "done"

    def _finish_or_undo(self, op: Op, prior: Prior, permit: Callable[[], None]) -> bool:
        """True when the probe found the effect: then the success is recorded. Otherwise the rollback is called, because
        part of the effect may be there; without a rollback, the probe has shown that there is none."""
        attempt = self._attempt
        spec = attempt.spec
        try:
            if spec.verify is not None:
                done = attempt.probe(spec.verify, prior, attempt.answered_at)
                if done is not None:
                    attempt.succeed(op, done.result)
                    return True
            if spec.rollback is not None:
                permit()
                attempt.roll_back(spec.rollback, prior, attempt.answered_at)
        except Exception as error:
            if attempt.grant is not None:  # no grant: succeed() has ended the attempt, or was refused
                record = prior.error if isinstance(error, PolicyDenied) else json.dumps(error_record(error))
                attempt.close(op, "partial", error=record)
            raise
        return False

    def _correct(self, op: Op, kind: Literal["rollback", "reset"], actor: str, reason: str, failures: int) -> None:
        named = {"name": self._attempt.spec.rollback_name} if kind == "rollback" else {}
        detail: dict[str, Any] = {**named, "actor": actor, "reason": reason}
        op._add_entry(kind, detail)
        op._has_begun = False
        error = json.dumps(correction_error(kind, detail))
        status = "undone" if kind == "rollback" else "failure"  # the row has no status of its own for a reset
        self._attempt.correct(op, status, actor, reason, error=error, failures=failures)


def _changed_error(key: Key) -> HoldfastError:
    """Transactions do not ask for the lease, and may commit while it is held."""
    return in_progress(key, why="another process has run it meanwhile: check its status and try again")


def _no_rollback(spec: OperationSpec, prior: Prior) -> OperationFailed:
    key, name = spec.key, spec.rollback_name
    why = "nothing is registered to undo it: it was run without the name of a rollback"
    if name is not None:
        why = f"its rollback {name!r} is not registered here: client.operations.register({name!r}, rollback=…)"
    message = f"operation {key.label!r}: {why}"
    return OperationFailed(message, key=key.digest, label=key.label, status=prior.status or "failure", error=None)
