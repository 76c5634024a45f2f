# Generated from psycopg_async.py by scripts/unasync.py. Do not edit.
"""A connection of psycopg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from holdfast.database import driver_errors as drivers
from holdfast.database.connections.placeholders import ENDED, FAILED, encodable, with_placeholders
from holdfast.database.sessions import Row
from holdfast.database.url import Database
from holdfast.errors import Unanswered

_IDLE, _ACTIVE, _IN_TRANSACTION = 0, 1, (2, drivers.IN_ERROR)
"""libpq's transaction status: idle; active; in a transaction, or in a failed one."""


@contextmanager
def reject_unreplicated_commit(connection: Any) -> Iterator[None]:
    """Unanswered for a commit whose wait for the synchronous standby was cancelled: the server reports success, with a
    warning."""
    warnings: list[str] = []

    def on_notice(notice: Any) -> None:
        if notice.source_function == "SyncRepWaitForLSN":
            warnings.append(notice.message_primary)

    connection.add_notice_handler(on_notice)
    try:
        yield
    finally:
        connection.remove_notice_handler(on_notice)
    if warnings:
        raise Unanswered(f"the transaction was committed on this server only, and may be lost with it: {warnings[0]}")


class Psycopg:
    def __init__(self, database: Database, connection: Any, what: str) -> None:
        if database.dialect != "postgres":
            raise ValueError(f"{what} in {database}: a transaction of PostgreSQL cannot be used with it")
        self._database, self._connection = database, connection

    def in_transaction(self) -> bool:
        status: int = self._connection.pgconn.transaction_status
        if status != _ACTIVE:
            return status in _IN_TRANSACTION
        # In a pipeline the status lags behind: a statement in flight may commit by itself, outside of a block.
        # private: psycopg.Connection._num_transactions, tested in tests/test_private_names.py
        return not self._connection.autocommit or getattr(self._connection, "_num_transactions", 0) > 0

    def is_idle(self) -> bool:
        return bool(self._connection.pgconn.transaction_status == _IDLE)

    def begins_by_itself(self) -> bool:
        return not self._connection.autocommit

    @contextmanager
    def begin(self) -> Iterator[None]:
        with reject_unreplicated_commit(self._connection):
            with self._connection.transaction():
                yield

    def nested(self) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = self._connection.transaction()
        return block

    def open(self) -> None: ...

    def rollback(self) -> None:
        self._connection.rollback()

    def flush(self) -> None: ...

    def mark(self) -> None: ...

    def broken(self) -> str | None:
        """psycopg refuses commit() and rollback() in a block, but not a COMMIT that is executed as a statement."""
        status: int = self._connection.pgconn.transaction_status
        return ENDED if status == _IDLE else FAILED if status == drivers.IN_ERROR else None

    def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        from psycopg import Cursor
        from psycopg.rows import scalar_row

        drivers.teach_psycopg()
        with Cursor(self._connection, row_factory=scalar_row) as cursor:  # independent of the user's row factory
            with encodable():
                cursor.execute(with_placeholders(self._database, statement, "%({})s"), parameters)
            fence: int | None = cursor.fetchone()
            return fence

    def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        from psycopg import Cursor
        from psycopg.rows import dict_row

        with Cursor(self._connection, row_factory=dict_row) as cursor:
            with encodable():
                cursor.execute(with_placeholders(self._database, statement, "%({})s"), parameters)
            return cursor.fetchone() or {}
