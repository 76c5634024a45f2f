# Generated from callers_transaction_async.py by scripts/unasync.py. Do not edit.
"""An operation in a transaction that the caller has open and will commit: a part of it, like its other writes.

A failed attempt is rolled back to a savepoint and recorded in the transaction: it counts if the caller goes on and
commits, and is gone with everything else if the caller rolls back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from holdfast.database.connections.connection import Connection
from holdfast.database.sessions import Row
from holdfast.errors import HoldfastError
from holdfast.operations.attempt import entered_attempts
from holdfast.operations.decide import (
    Decision,
    Prior,
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
    def __init__(self, spec: OperationSpec, connection: Connection) -> None:
        super().__init__(spec, connection)
        self._is_sqlite = spec.engine.database.dialect == "sqlite"
        self._savepoints: list[AbstractContextManager[Any]] = []

    @property
    def policy(self) -> PolicyChecks:
        """Reviews and related operations are in the caller's transaction, if only that sees them."""
        if self._policy is None:
            self._policy = PolicyChecks(self.spec, self.tries, self._connection)
        return self._policy

    def _claim(self) -> Op | Outcome[Any]:
        started, tries = now(), 0
        while True:
            asked_at = now()
            claim = self._parse_claim(self._connection.write("operation_begin", self._claim_parameters()))
            prior = claim.prior
            decision = self.decide(prior)
            self.policy.is_uncommitted = (
                decision in (Decision.REPLAY, Decision.EXPIRED, Decision.EXHAUSTED)
                and self._is_uncommitted(prior)
            )  # fmt: skip
            is_sure = claim.is_free or not refuses_dead(decision, prior)
            if is_sure and (outcome := self.settle(decision, prior)) is not None:
                return replace(outcome, committed=not self.policy.is_uncommitted)
            if claim.is_read_only:
                raise read_only_transaction(self.spec.key)
            if claim.is_free and decision is not Decision.RUNNING and self._lock_dataset():
                if self.is_nested(same_key=True):
                    self.report_locked_out("reentered")
                    raise in_progress(self.spec.key, why="it runs inside of itself")
                if self.spec.governed is not None:
                    self.policy.check_locked(prior)
                self.prior, self._began = prior, claim.began
                _defer_outer_places()
                self._set_savepoints()
                try:
                    return self._start(decision, prior, asked_at)
                except BaseException:
                    if self._undo() and self._failed_recovery is not None:
                        self._record(self._failed_recovery_row(began=self._began, late=True))
                    raise
            if claim.has_fixed_snapshot and self.spec.terms.when_locked in ("wait", "backoff"):
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
        return Outcome("success", False, op.attempt, committed=False, value=value)

    def _release_savepoint(self) -> None:
        self._savepoints.pop().__exit__(None, None, None)

    def fail(self, op: Op, error: BaseException) -> bool:
        has_ended = says_transaction_ended(error) or self._has_ended_transaction(error)
        is_undone = self._undo()
        if has_ended and not self._is_sqlite:  # on SQLite the caller may have a transaction open, which has the file
            self._write_outside(self._partial_row(op, error))
        elif is_undone and not has_ended and isinstance(error, Exception) and not self.is_uncounted(error):
            self._record(self._failure_row(op, error, began=self._began, late=True))
        return False

    def drop(self) -> None:
        super().drop()
        self._undo()

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
        return self._connection.in_transaction()

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
