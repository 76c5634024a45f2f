# Generated from sqlalchemy_async.py by scripts/unasync.py. Do not edit.
"""A connection or a session of SQLAlchemy, over any driver."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from holdfast.database import driver_errors as drivers
from holdfast.database.connections.placeholders import AUTOCOMMIT, FAILED, encodable, with_placeholders
from holdfast.database.connections.sqlite import check_file
from holdfast.database.sessions import Row
from holdfast.database.sqlite_calls import find, with_hashes
from holdfast.database.statements import statements
from holdfast.database.url import Database
from holdfast.errors import EngineError
from holdfast.runtime.concurrency import BLOCKS

_IN_AUTOCOMMIT = "this connection is in autocommit mode: there is no transaction to protect"
_IN_SAVEPOINT = (
    "a lease cannot protect a savepoint: if the driver has not begun a transaction before, SQLite commits when the "
    "savepoint is released. Protect the transaction before its first savepoint."
)


def subject_of(connection: Any) -> Any:
    """The session behind a scoped session, or the connection itself."""
    return connection.registry() if hasattr(connection, "registry") else connection


class SqlAlchemy:
    def __init__(self, database: Database, connection: Any, what: str) -> None:
        self._database, self._what = database, what
        self._connection = subject_of(connection)
        self._driver: Any = None
        self._used: tuple[Any, int] | None = None
        """The connection that was first written on, and how often it had been committed by then."""

    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction())

    def is_idle(self) -> bool:
        return not self.in_transaction()

    def begins_by_itself(self) -> bool:
        """False for a session with ``autobegin=False``."""
        return bool(getattr(getattr(self._connection, "sync_session", self._connection), "autobegin", True))

    def begin(self) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = self._connection.begin()
        return block

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Commit explicitly: when a flush fails, SQLAlchemy rolls the savepoint back and its context manager exits
        without an error."""
        with self._connection.begin_nested() as block:
            yield
            block.commit()

    def open(self) -> None: ...

    def rollback(self) -> None:
        self._connection.rollback()

    def flush(self) -> None:
        if hasattr(self._connection, "get_bind"):
            self._connection.flush()

    def mark(self) -> None: ...

    def broken(self) -> str | None:
        """SQLAlchemy itself refuses statements in a block whose transaction was ended."""
        return FAILED if drivers.failed(self._driver) else None

    def committed(self) -> bool:
        """Whether the transaction that was first written in has been committed."""
        return self._used is not None and drivers.commits(self._used[0]) > self._used[1]

    def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        from sqlalchemy import String, bindparam, text

        connection = self._checked()
        if drivers.dialect_of(connection) == "sqlite" and connection.in_nested_transaction():
            raise EngineError(_IN_SAVEPOINT)
        drivers.teach_sqlalchemy(connection)
        self._driver = drivers.driver_of(connection)
        if drivers.writes_parameters(connection):
            return self._fence_by_proof(connection, statement, **parameters)
        protecting = text(with_placeholders(self._database, statement, ":{}")).bindparams(
            bindparam("token", type_=String())
        )
        sent = with_hashes(parameters) if self._database.dialect == "sqlite" else parameters
        secret = {**sent, "token": drivers.Secret(sent["token"])}
        with encodable():
            result = connection.execute(protecting, secret)
        fence: int | None = result.scalar()
        if fence is not None and drivers.autocommits(connection):
            raise ValueError(_IN_AUTOCOMMIT)
        return fence

    def _fence_by_proof(self, connection: Any, statement: str, name: str, token: str) -> int | None:
        """With a proof for this transaction, because other sessions can read the text of a statement."""
        from sqlalchemy import text

        if drivers.autocommits(connection):
            raise ValueError(_IN_AUTOCOMMIT)
        transaction = (connection.execute(text(statements("postgres")["protect_transaction"].sql))).scalar()
        secret = bytes.fromhex(token.replace("-", ""))
        mask = hashlib.sha256(hashlib.sha256(secret).digest() + transaction.encode()).digest()
        proof = bytes(a ^ b for a, b in zip(secret, mask, strict=False)).hex()
        protecting = text(with_placeholders(self._database, f"{statement}_proven", ":{}"))
        with encodable():
            fence: int | None = (connection.execute(protecting, {"name": name, "proof": proof})).scalar()
        return fence

    def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        connection = self._checked()
        if drivers.would_autocommit(connection):
            raise ValueError(AUTOCOMMIT)
        if self._used is None:
            self._used = connection, drivers.commits(connection)
        perform = self._perform_on_sqlite if self._database.dialect == "sqlite" else self._run
        if BLOCKS:
            rows = perform(connection, statement, **parameters)
        else:
            rows = connection.run_sync(perform, statement, **parameters)
        return rows[0] if rows else {}

    def _perform_on_sqlite(self, connection: Any, name: str, /, **parameters: Any) -> list[Row]:
        call = find(name, statements("sqlite", self._database.schema))
        return call.perform(partial(self._run, connection), with_hashes(parameters))

    def _run(self, connection: Any, name: str, /, **parameters: Any) -> list[Row]:
        """On a connection that blocks, or seems to: ``run_sync`` makes one of an asynchronous connection."""
        from sqlalchemy import text

        with encodable():
            result = connection.execute(text(with_placeholders(self._database, name, ":{}")), parameters)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []

    def _checked(self) -> Any:
        """The connection. ValueError if it is to another database."""
        from sqlalchemy import text

        connection = self._connection
        if hasattr(connection, "get_bind"):  # a session
            connection = connection.connection()
        if not (dialect := drivers.dialect_of(connection)).startswith(self._database.dialect):
            raise ValueError(f"{self._what} in {self._database}: a transaction of {dialect} cannot be used with it")
        if dialect == "sqlite":
            listing = (connection.execute(text("pragma database_list"))).fetchall()
            check_file(self._database, listing, self._what)
        return connection
