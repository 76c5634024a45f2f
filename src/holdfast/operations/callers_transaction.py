# Generated from callers_transaction_async.py by scripts/unasync.py. Do not edit.
"""An operation in a transaction that the caller will commit: a part of it, like its other writes. It is open already,
or the first statement of the claim opens it, as any statement on that connection would.

A failed attempt is rolled back to a savepoint and recorded in the transaction: it counts if the caller goes on and
commits, and is gone with everything else if the caller rolls back. If the claim opened the transaction and no attempt
begins, it is rolled back: waiting holds no locks, and a replay leaves nothing to commit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from holdfast.database.background import background_of
from holdfast.database.connections.connection import Connection
from holdfast.database.sessions import Row
from holdfast.errors import HoldfastError
from holdfast.operations.attempt import entered_attempts
from holdfast.operations.decide import (
    Decision,
    Prior,
    TransactionClaim,
    chain_length,
    in_progress,
    read_only_transaction,
    refuses_dead,
)
from holdfast.operations.op import Op
from holdfast.operations.outcome import Outcome
from holdfast.operations.own_transaction import (
    RollBack,
    TransactionAttempt,
    detect_ended_transaction,
    says_transaction_ended,
)
from holdfast.operations.policy_checks import PolicyChecks
from holdfast.operations.spec import OperationSpec, end_parameters
from holdfast.runtime.clock import now


class CallersTransaction(TransactionAttempt):
    def __init__(self, spec: OperationSpec, connection: Connection, connection_id: int) -> None:
        super().__init__(spec, connection, connection_id)
        self._is_sqlite = spec.engine.database.dialect == "sqlite"
        self._opens = connection.is_idle()
        """The claim opens the transaction, so that nothing of the caller's is in it."""
        self._savepoints: list[AbstractContextManager[Any]] = []

    @property
    def policy(self) -> PolicyChecks:
        """Reviews and related operations are in the caller's transaction, if only that sees them."""
        if self._policy is None:
            self._policy = PolicyChecks(self.spec, self.tries, None if self._opens else self._connection)
        return self._policy

    def _claim(self) -> Op | Outcome[Any]:
        started, tries = now(), 0
        while True:
            self._use_connection()
            try:
                if self._opens:
                    self._connection.open()
                claim = self._parse_claim(self._connection.write("operation_begin", self._claim_parameters()))
                answered_at = now()
                prior, decision = claim.prior, self.decide(claim.prior)
                is_sure = claim.is_free or not refuses_dead(decision, prior)
                outcome = self._settle_joined(decision, prior) if is_sure else None
                if outcome is None and claim.is_read_only:
                    raise read_only_transaction(self.spec.key)
                is_ours = outcome is None and decision is not Decision.RUNNING and claim.is_free
                is_ours = is_ours and self._lock_dataset()
                if is_ours and self.is_nested(same_key=True):
                    self.report_locked_out("reentered")
                    raise in_progress(self.spec.key, why="it runs inside of itself")
                if is_ours and self.spec.governed is not None:
                    self.policy.check_locked(prior)
            except BaseException:
                with suppress(Exception):  # the first error is the one to raise
                    self._close()
                raise
            if is_ours:
                return self._begin(claim, decision, answered_at)
            self._close()
            if outcome is not None:
                return outcome
            if claim.has_fixed_snapshot and not self._opens:
                self._look_later()
            if claim.has_fixed_snapshot and not self._opens and self.spec.terms.when_locked in ("wait", "backoff"):
                self.escalate(prior)
                self.report_locked_out("snapshot")
                raise in_progress(
                    self.spec.key,
                    why="it is already running, and the snapshot of this transaction would not show its result: roll "
                    "back and try again",
                )
            if (outcome := self.wait_for_lock(prior, tries, started)) is not None:
                return outcome
            tries += 1

    def _look_later(self) -> None:
        """Look for the owner in the background: this transaction would not see that it is dead, and on SQLite keeps
        others from recording it, but the next one sees it."""
        self._looks_for_owner = False
        background = background_of(self.spec.engine.database)
        background.retry("operation_look", self.spec.owner_names, patience=self.spec.terms.ttl, until=False)

    def _settle_joined(self, decision: Decision, prior: Prior) -> Outcome[Any] | None:
        self.policy.is_uncommitted = (
            not self._opens
            and decision in (Decision.REPLAY, Decision.EXPIRED, Decision.EXHAUSTED)
            and self._is_uncommitted(prior)
        )
        outcome = self.settle(decision, prior)
        return None if outcome is None else replace(outcome, committed=not self.policy.is_uncommitted)

    def _close(self) -> None:
        """Roll back the transaction if the claim has opened it."""
        try:
            if self._opens:
                self._connection.rollback()
        finally:
            self._leave_connection()

    def _begin(self, claim: TransactionClaim, decision: Decision, answered_at: float) -> Op | Outcome[Any]:
        self.prior, self._began = claim.prior, claim.began
        _defer_outer_places()
        self._set_savepoints()
        try:
            return self._start(decision, claim.prior, answered_at)
        except BaseException:
            if self._undo() and self._failed_recovery is not None:
                self._record(self._failed_recovery_row(began=self._began, late=True))
            raise

    def _set_savepoints(self) -> None:
        """One; on SQLite two. There the release of the inner one proves that the function has not ended the
        transaction, and the outer one can still undo everything if the recording is interrupted."""
        for _ in range(1 + self._is_sqlite):
            self._savepoints.append(self._connection.nested())
            self._savepoints[-1].__enter__()

    def succeed(self, op: Op, value: Any) -> Outcome[Any]:
        parameters = self._success(op, value)
        with detect_ended_transaction(op.key.label):
            self._connection.flush()
            if self._is_sqlite:
                self._release_savepoint()
            row = self._connection.write("operation_end", parameters)
        if row["state"] != "done":
            raise self._changed_error()
        with detect_ended_transaction(op.key.label):
            self._release_savepoint()
        self._leave_connection()
        return Outcome("success", False, op.attempt, committed=False, value=value)

    def _release_savepoint(self) -> None:
        self._savepoints.pop().__exit__(None, None, None)

    def fail(self, op: Op, error: BaseException) -> bool:
        try:
            self._record_failure(op, error)
        finally:
            self._leave_connection()
        return False

    def _record_failure(self, op: Op, error: BaseException) -> None:
        has_ended = says_transaction_ended(error) or self._has_ended_transaction(error)
        is_undone = self._undo()
        if has_ended:
            self._close()
        if has_ended and not (self._is_sqlite and self._connection.in_transaction()):  # then it has the file
            self._write_outside(self._partial_row(op, error))
        elif is_undone and not has_ended and isinstance(error, Exception) and not self.is_uncounted(error):
            self._record(self._failure_row(op, error, began=self._began, late=True))

    def drop(self) -> None:
        super().drop()
        self._undo()
        self._leave_connection()

    def _undo(self) -> bool:
        """Roll back to the savepoint. False when that is impossible: the transaction or the connection has ended."""
        if not self._savepoints:
            return False
        try:
            while self._savepoints:
                self._savepoints[-1].__exit__(RollBack, RollBack(), None)
                self._savepoints.pop()
        except Exception:
            self._savepoints.clear()
            return False
        return not self._connection.is_idle()

    def _record(self, row: Row) -> None:
        """Record the failure in the transaction. Raises if that fails: the caller must not commit the transaction as
        if there had been no attempt."""
        with self._connection.nested() if self._is_sqlite else nullcontext():  # several statements on SQLite
            answer = self._connection.write("operation_end", end_parameters(row))
        if answer["state"] != "done":
            raise self._changed_error()

    def _is_uncommitted(self, prior: Prior) -> bool:
        """Whether this transaction sees more entries of the operation than others do."""
        [row] = self.spec.engine.call("operation_get", {"key": self.spec.key.digest})
        return chain_length(row["pointer"]) < chain_length(prior.pointer)

    def _changed_error(self) -> HoldfastError:
        return in_progress(self.spec.key, why="another process has run it meanwhile: roll back and try again")


def _defer_outer_places() -> None:
    """The entries of the operations around this one are written after it in the same transaction, and must get their
    place in the log after it, too."""
    for attempt in entered_attempts():
        if isinstance(attempt, TransactionAttempt):
            attempt.gets_late_place = True
