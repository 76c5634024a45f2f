"""An operation whose effect is in the user's own database: claim, effect, result and entries are one transaction, so it
happens exactly once. Here the operation begins and commits that transaction.

While it runs, the transaction has the advisory lock of its dataset and operation (on SQLite, the file). Nothing is
visible before the commit, so a process that dies leaves nothing, and the next one simply runs the operation.

    psycopg             BEGIN; operation_begin   │ the function │   operation_end; COMMIT     (one message each)
    other drivers       BEGIN │ operation_begin  │ the function │   operation_end │ COMMIT

A psycopg COMMIT is on its way before the answer of ``operation_end`` is read, so there the statement raises when the
transaction must not be committed.
"""

from __future__ import annotations

import json
import re
from abc import ABC
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from holdfast.database import driver_errors
from holdfast.database.connections.connection_async import AsyncConnection
from holdfast.database.connections.placeholders_async import ENDED
from holdfast.database.connections.psycopg_async import AsyncPsycopg, reject_unreplicated_commit
from holdfast.database.connections.sqlalchemy_async import AsyncSqlAlchemy
from holdfast.database.connections.sqlite_async import AsyncSqlite3
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.database.statements import statements
from holdfast.database.url import Database
from holdfast.errors import HoldfastError, Refused
from holdfast.operations.attempt_async import AsyncAttempt, entered_attempts
from holdfast.operations.decide import (
    Decision,
    Prior,
    TransactionClaim,
    error_record,
    error_text,
    failure_detail,
    is_collision,
    read_only_transaction,
    refuses_dead,
)
from holdfast.operations.op_async import AsyncOp, Done
from holdfast.operations.outcome import Outcome
from holdfast.operations.spec_async import AsyncOperationSpec, encode_result, end_parameters
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import current_id

MAX_COLLISIONS = 10
"""How often a transaction is begun again after a collision with others."""
CHANGED, TRANSACTION_ENDED = "40001", "HF003"
_CLOSED = ("InvalidRequestError", "ResourceClosedError")
"""Errors of SQLAlchemy for a transaction that has ended."""


class AsyncTransactionAttempt(AsyncAttempt, ABC):
    """An attempt in a transaction on the user's connection."""

    gets_late_place = True
    """Its entries get their place in the order of the log inside COMMIT. False only when ``operation_end`` and COMMIT
    are one message, so that no other transaction can get in between."""
    _began: str | None = None
    """Identifies the transaction."""
    _failed_recovery: tuple[Decision, Prior, float, Exception] | None = None
    """A rollback or a probe has failed: recorded when the transaction was undone."""

    def __init__(self, spec: AsyncOperationSpec, connection: AsyncConnection, connection_id: int) -> None:
        super().__init__(spec)
        self._connection, self._connection_id, self._caller = connection, connection_id, current_id()

    def _use_connection(self) -> None:
        """RuntimeError when an operation of another thread or task has begun to use it."""
        attempt = _by_connection.setdefault(self._connection_id, self)
        if attempt is not self and not attempt.surrounds_caller():
            raise attempt.in_use_error()

    def _leave_connection(self) -> None:
        if _by_connection.get(self._connection_id) is self:
            del _by_connection[self._connection_id]

    def surrounds_caller(self) -> bool:
        """Whether the caller is inside of this attempt."""
        return self._caller == current_id() or self in entered_attempts()

    def in_use_error(self) -> RuntimeError:
        return RuntimeError(
            f"this connection is in use by operation {self.spec.key.label!r} of another thread or task, which would "
            "commit or roll back what is written here: use one connection for each"
        )

    def _claim_parameters(self) -> Row:
        key = self.spec.key
        return {"key": key.digest, "lock": key.lock_key, "lease": self.spec.lease_name}

    async def _parse_claim(self, row: Row) -> TransactionClaim:
        """ValueError when the connection is to another database than the client's: its log would not be found."""
        claim = TransactionClaim.from_row(row)
        self.check_policy_version(claim.policy)
        location = self.spec.engine.state(LogLocation)
        if claim.log_oid != location.oid:  # not fetched yet, or the tables were recreated
            [row] = await self.spec.engine.call("operation_begin", {"key": "", "lease": ""})
            location.oid = TransactionClaim.from_row(row).log_oid
            if location.oid != claim.log_oid:
                raise ValueError(
                    f"the connection is to another database than the client's, and the log of operations is in "
                    f"{self.spec.engine.database}: give tx a connection to that"
                )
        return claim

    async def _lock_dataset(self) -> bool:
        """Lock a sovereign dataset as a whole, under the lock of the operation. True also if it is not sovereign."""
        claim = self.spec.dataset_claim if self.spec.sovereign else None
        if claim is None:
            return True
        return TransactionClaim.from_row(await self._connection.write("operation_begin", claim)).is_free

    async def _start(self, decision: Decision, prior: Prior, answered_at: float) -> AsyncOp | Outcome[Any]:
        """The lock is ours: recover a dead attempt, and begin the next one."""
        spec = self.spec
        if self._policy is not None:
            self._policy.spend_approval()
        op = AsyncOp(spec.key, prior, answered_at, attempt=prior.attempt + 1)
        if decision is not Decision.EXECUTE:
            try:
                done = await self._recover(decision, prior, answered_at)
            except Exception as error:
                if not self.is_uncounted(error):
                    self._failed_recovery = decision, prior, answered_at, error
                raise
            if done is not None:
                op.attempt = prior.attempt
                op._add_entry("lock_acquired", spec.lock_detail())
                return await self.succeed(op, done.result)
        op._add_entry("lock_acquired", spec.lock_detail())
        if decision is Decision.ROLL_BACK:
            op._add_entry("rollback", {"attempt": prior.attempt, "name": spec.rollback_name})
        approval = None if self._policy is None else self._policy.approval
        key = spec.key
        op._add_claim(spec.claim_entries(spec.fingerprint, key.version, key.bucket, key._parts_digest, approval))
        op._has_begun = True  # not written before the end, and then it is true
        return op

    async def _recover(self, decision: Decision, prior: Prior, answered_at: float) -> Done | None:
        """Undo the dead attempt, or probe whether it is done. Done if it is; None when the operation is to be run."""
        if decision is Decision.ROLL_BACK:
            assert self.spec.rollback is not None  # checked with the terms: on_partial="rollback" needs one
            await self.roll_back(self.spec.rollback, prior, answered_at)
            return None
        assert decision is Decision.VERIFY
        assert self.spec.verify is not None
        return await self.probe(self.spec.verify, prior, answered_at)

    # Rows

    def _success(self, op: AsyncOp, value: Any) -> Row:
        """Parameters of ``operation_end``, which checks that it is in the transaction in which it began."""
        result = encode_result(value)
        op._chain.mark()
        keep = self.spec.terms.keep
        op._add_entry("success", None if keep is None else {"keep": keep}, payload_hash=result["result_hash"])
        op._add_release()
        late = self.gets_late_place or None
        return end_parameters(self.spec.row(op, "success", keep=keep, began=self._began, late=late, **result))

    def _failure_row(self, op: AsyncOp, error: Exception, **more: Any) -> Row:
        """For an attempt without an effect."""
        record = error_record(error, remembered=self.is_remembered(error))
        op._has_begun = False
        op._chain.discard_marked()  # a success that was not committed
        op._add_entry("failure", failure_detail(record))
        op._add_release()
        failures = self.prior.failed_attempts + 1
        return self.spec.row(op, "failure", error=json.dumps(record), failures=failures, **more)

    def _partial_row(self, op: AsyncOp, error: BaseException) -> Row:
        """For an attempt whose function has ended the transaction: its writes may have been committed."""
        op._chain.discard_marked()
        op._add_entry("effect_started")
        op._add_release()
        record = json.dumps(error_record(error, where="commit"))
        return self.spec.row(op, "partial", error=record, failures=self.prior.failed_attempts)

    def _failed_recovery_row(self, **more: Any) -> Row:
        """For a dead attempt that could not be recovered, which counts as an attempt."""
        assert self._failed_recovery is not None
        decision, prior, answered_at, error = self._failed_recovery
        op = AsyncOp(self.spec.key, prior, answered_at, attempt=prior.attempt)
        op._has_begun = True
        op._add_entry("lock_acquired", self.spec.lock_detail())
        op._add_release()
        record = json.dumps(error_record(error, where=decision.name.lower()))
        return self.spec.row(op, "partial", error=record, failures=prior.failed_attempts, **more)

    async def _write_outside(self, row: Row) -> None:
        """Write a row on a session of our own. An error is logged: the user's own error is the one to raise."""
        try:
            await self.spec.engine.call("operation_write", row)
        except HoldfastError as error:
            self.log_unrecorded(error)

    async def _has_ended_transaction(self, error: BaseException) -> bool:
        """Whether the function ended the transaction before it raised ``error``, so that its writes may be committed.

        A function may roll back before it raises, which leaves nothing: SQLAlchemy distinguishes the two, sqlite3 does
        not. psycopg refuses commit() and rollback(), so only a statement can do it; in a failed transaction that cannot
        be detected.
        """
        connection = self._connection
        if not isinstance(error, Exception) or isinstance(connection, AsyncSqlite3):
            return False
        if isinstance(connection, AsyncSqlAlchemy):
            return connection.committed()
        if connection.broken() == ENDED:
            return True
        try:
            row = await connection.write("operation_begin", {"key": "", "lock": None, "lease": ""})
        except Exception:
            return False
        return TransactionClaim.from_row(row).began != self._began


class AsyncOwnTransaction(AsyncTransactionAttempt):
    """In a transaction that the operation begins and commits."""

    def __init__(
        self, spec: AsyncOperationSpec, connection: AsyncConnection, driver_connection: Any, connection_id: int
    ) -> None:
        super().__init__(spec, connection, connection_id)
        self._transaction = user_transaction(spec.engine.database, connection, driver_connection)
        self._is_ending = False
        """``operation_end`` was sent: an error from here on is not one of the function."""
        self._collisions = 0

    async def _claim(self) -> AsyncOp | Outcome[Any]:
        started, tries = now(), 0
        while True:
            self._use_connection()
            try:
                row = await self._transaction.begin("operation_begin", self._claim_parameters())
                answered_at = now()
                claim = await self._parse_claim(row)
                prior = claim.prior
                decision = self.decide(prior)
                is_sure = claim.is_free or not refuses_dead(decision, prior)
                if is_sure and (outcome := self.settle(decision, prior)) is not None:
                    await self._roll_back()
                    return outcome
                if claim.is_read_only:
                    raise read_only_transaction(self.spec.key)
                if claim.is_free and decision is not Decision.RUNNING and await self._lock_dataset():
                    if self.spec.governed is not None:
                        await self.policy.check_locked(prior)
                    self.prior, self._began = prior, claim.began
                    self.gets_late_place = claim.has_fixed_snapshot or not self._transaction.ends_with_commit
                    return await self._start(decision, prior, answered_at)
            except BaseException:
                await self._undo()
                if self._failed_recovery is not None:
                    await self._write_outside(self._failed_recovery_row())
                raise
            await self._roll_back()
            if (outcome := await self.wait_for_lock(prior, tries, started)) is not None:
                return outcome
            tries += 1

    async def succeed(self, op: AsyncOp, value: Any) -> Outcome[Any]:
        parameters = self._success(op, value)
        self._is_ending = True
        await self._transaction.commit("operation_end", parameters)
        del _by_connection[self._connection_id]
        return Outcome("success", False, op.attempt, value=value)

    async def fail(self, op: AsyncOp, error: BaseException) -> bool:
        has_ended = says_transaction_ended(error) or (not self._is_ending and await self._has_ended_transaction(error))
        self._is_ending = False
        await self._undo()
        if has_ended:
            await self._write_outside(self._partial_row(op, error))
        elif self.is_uncounted(error):
            self._collisions += 1
            return is_collision(error, driver_errors.sqlstate(error)) and self._collisions <= MAX_COLLISIONS
        elif isinstance(error, Exception):
            await self._write_outside(self._failure_row(op, error))
        return False

    async def drop(self) -> None:
        await super().drop()
        if _by_connection.get(self._connection_id) is self:
            await self._undo()

    async def _undo(self) -> None:
        with suppress(Exception):  # the connection is lost, or the first error is the one to raise
            await self._transaction.rollback()
        _by_connection.pop(self._connection_id, None)

    async def _roll_back(self) -> None:
        await self._transaction.rollback()
        del _by_connection[self._connection_id]


_by_connection: dict[int, AsyncTransactionAttempt] = {}
"""The attempts in progress, by the id of their connection."""


def check_unused(connection_id: int) -> None:
    """RuntimeError when an operation of another thread or task runs on this connection."""
    attempt = _by_connection.get(connection_id)
    if attempt is not None and not attempt.surrounds_caller():
        raise attempt.in_use_error()


class LogLocation:
    """The oid of the log table that the client's own sessions see. One for each engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.oid: int | None = None


# The transaction on the user's connection


class AsyncUserTransaction(Protocol):
    """A transaction on the user's connection that the operation begins and ends."""

    ends_with_commit: bool
    """Whether ``operation_end`` and COMMIT are one message."""

    async def begin(self, statement: str, parameters: Row) -> Row:
        """BEGIN and a statement, whose row is returned. Call ``rollback`` if it fails."""

    async def commit(self, statement: str, parameters: Row) -> None:
        """A statement and COMMIT. Call ``rollback`` if it fails."""

    async def rollback(self) -> None:
        """May be called again after it was interrupted."""


def user_transaction(database: Database, connection: AsyncConnection, driver_connection: Any) -> AsyncUserTransaction:
    if isinstance(connection, AsyncPsycopg) and not driver_connection.pgconn.pipeline_status:
        return AsyncPsycopgTransaction(database, driver_connection)
    return AsyncBlockTransaction(connection, with_savepoint=database.dialect == "sqlite")


class RollBack(Exception):
    """Passed to the exit of a block to roll it back. Not the user's error: psycopg commits if that is falsy."""


class TransactionEnded(RuntimeError):
    """The function has committed or rolled back the transaction of its operation."""


def transaction_ended(label: str) -> TransactionEnded:
    return TransactionEnded(
        f"operation {label!r}: its function has ended the transaction that it runs in, so its writes and its record "
        "are not one transaction any more. Leave commit and rollback to run()"
    )


def says_transaction_ended(error: BaseException) -> bool:
    """Whether the error is ours, or the one of ``operation_end``."""
    return isinstance(error, TransactionEnded) or driver_errors.sqlstate(error) == TRANSACTION_ENDED


@contextmanager
def detect_ended_transaction(label: str) -> Iterator[None]:
    """Raise TransactionEnded for what a database driver raises when the transaction or the savepoint is gone."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ in _CLOSED or "no such savepoint" in error_text(error):
            raise transaction_ended(label) from error
        raise


class AsyncBlockTransaction:
    """For every driver: one statement after the other.

    ``with_savepoint``: SQLite cannot identify a transaction, so the release of a savepoint proves that the function has
    not ended it."""

    ends_with_commit = False

    def __init__(self, connection: AsyncConnection, *, with_savepoint: bool) -> None:
        self._connection, self._with_savepoint = connection, with_savepoint
        self._block: AbstractAsyncContextManager[Any] | None = None
        self._savepoint: AbstractAsyncContextManager[Any] | None = None

    async def begin(self, statement: str, parameters: Row) -> Row:
        self._block = self._connection.begin()
        await self._block.__aenter__()
        row = await self._connection.write(statement, parameters)
        if self._with_savepoint:
            self._savepoint = self._connection.nested()
            await self._savepoint.__aenter__()
        return row

    async def commit(self, statement: str, parameters: Row) -> None:
        label = parameters["label"]
        # A connection that begins by itself runs the statement in a new transaction, which the statement detects.
        if not self._connection.in_transaction() and not self._connection.begins_by_itself():
            raise transaction_ended(label)
        with detect_ended_transaction(label):
            if self._savepoint is not None:
                await self._savepoint.__aexit__(None, None, None)
            self._savepoint = None
            row = await self._connection.write(statement, parameters)
        if row["state"] != "done":
            raise Refused(f"operation {label!r} was changed by another process meanwhile", CHANGED)
        if self._block is not None:
            await self._block.__aexit__(None, None, None)
        self._block = None

    async def rollback(self) -> None:
        if self._savepoint is not None:
            with suppress(Exception):  # it ended with the transaction, or does so now
                await self._savepoint.__aexit__(RollBack, RollBack(), None)
        self._savepoint = None
        if self._block is not None:
            with suppress(RollBack):
                await self._block.__aexit__(RollBack, RollBack(), None)
        self._block = None


class AsyncPsycopgTransaction:
    """For psycopg: BEGIN and the claim are one message to the server, and so are the end and COMMIT.

    hot: two round trips instead of four (bench operation). Written on ``pgconn``, because a cursor sends one statement
    at a time."""

    ends_with_commit = True

    def __init__(self, database: Database, connection: Any) -> None:
        self._database, self._connection = database, connection
        # private: psycopg.Connection._num_transactions, tested in tests/test_private_names.py
        self._outer_blocks: int | None = getattr(connection, "_num_transactions", None)

    async def begin(self, statement: str, parameters: Row) -> Row:
        """The row has one column, ``answer``."""
        results = await self._send(self._begin_statement() + b"; " + self._fill(statement, parameters))
        self._set_blocks(1)
        return {"answer": results[-1].get_value(0, 0)}

    async def commit(self, statement: str, parameters: Row) -> None:
        with reject_unreplicated_commit(self._connection):
            await self._send(self._fill(statement, parameters) + b"; commit")
        self._set_blocks(0)

    async def rollback(self) -> None:
        from psycopg.pq import TransactionStatus

        status = self._connection.pgconn.transaction_status
        self._set_blocks(0)
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            await self._send(b"rollback")

    def _set_blocks(self, inner: int) -> None:
        """As ``connection.transaction()`` does: psycopg then refuses commit() and rollback(), and nested blocks are
        savepoints."""
        if self._outer_blocks is not None:
            self._connection._num_transactions = self._outer_blocks + inner

    def _begin_statement(self) -> bytes:
        connection, words = self._connection, ["begin"]
        if connection.isolation_level is not None:
            words.append("isolation level " + connection.isolation_level.name.replace("_", " "))
        if connection.read_only is not None:
            words.append("read only" if connection.read_only else "read write")
        if connection.deferrable is not None:
            words.append("deferrable" if connection.deferrable else "not deferrable")
        return " ".join(words).encode()

    def _fill(self, statement: str, parameters: Row) -> bytes:
        """The statement with literals in place of its parameters: several statements in one message take none."""
        texts, names = _split_statement(self._database.schema, statement)
        parts = [texts[0]]
        for text, name in zip(texts[1:], names, strict=True):
            value = parameters.get(name)
            if value is None:
                parts.append(b"null")
            elif isinstance(value, str):
                encoded = value.encode("ascii")
                # hot: most need no escaping
                parts.append(self._escape(encoded) if b"'" in encoded or b"\\" in encoded else b"'%b'" % encoded)
            else:
                parts.append(str(value).encode())  # true, false, and numbers
            parts.append(text)
        return b"".join(parts)

    def _escape(self, value: bytes) -> bytes:
        return bytes(_psycopg_names().escaping(self._connection.pgconn).escape_literal(value))

    async def _send(self, text: bytes) -> list[Any]:
        names, connection = _psycopg_names(), self._connection
        async with connection.lock:
            try:
                connection.pgconn.send_query(text)
                results: list[Any] = await connection.wait(names.execute(connection.pgconn))
            except BaseException:  # read the answer first: otherwise the connection stays busy for ever
                if connection.pgconn.transaction_status == names.active:
                    await connection.wait(names.execute(connection.pgconn))
                raise
        if results[-1].status == names.fatal_error:  # the results end with the first error
            raise names.error_from_result(results[-1], encoding=connection.info.encoding)
        return results


class _PsycopgNames(NamedTuple):
    """What is used of psycopg, looked up once."""

    execute: Any
    error_from_result: Any
    escaping: Any
    fatal_error: Any
    active: Any


@lru_cache
def _psycopg_names() -> _PsycopgNames:
    # private: psycopg.generators.execute, tested in tests/test_private_names.py
    # private: psycopg.errors.error_from_result, tested in tests/test_private_names.py
    from psycopg import errors, generators
    from psycopg.pq import Escaping, ExecStatus, TransactionStatus

    execute, from_result = generators.execute, errors.error_from_result
    return _PsycopgNames(execute, from_result, Escaping, ExecStatus.FATAL_ERROR, TransactionStatus.ACTIVE)


@lru_cache
def _split_statement(schema: str, statement: str) -> tuple[list[bytes], list[str]]:
    """The texts between the parameters, and the names of the parameters in this order."""
    parsed = statements("postgres", schema)[statement]
    pieces = re.split(r"\$(\d+)", parsed.sql)
    return [text.encode() for text in pieces[::2]], [parsed.parameters[int(number) - 1] for number in pieces[1::2]]
