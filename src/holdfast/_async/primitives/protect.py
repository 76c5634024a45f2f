"""The promise nobody else makes: a holder that has been superseded cannot commit.

Runs one statement inside the user's own transaction, through the user's own connection, whatever driver that is. Never
opens a connection and never commits a transaction it did not begin.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from holdfast._wire import drivers
from holdfast._wire.database import Database
from holdfast.core.errors import EngineError, FencedOut
from holdfast.sql import statements

_RACED = "40001"
"""Only a takeover or a release writes the row, so a serialization failure on it is one of these."""

Kind = Literal["psycopg", "sqlite3", "sqlalchemy"]


async def protect(database: Database, name: str, token: str, connection: Any, at: str) -> int:
    """Protect the transaction that is open on ``connection``; returns the fence."""
    if at not in ("start", "commit"):
        raise ValueError(f"at must be 'start' or 'commit', not {at!r}")
    kind = _kind(database, connection)
    if not _in_transaction(kind, connection):
        raise ValueError(
            "no transaction is open on this connection, so there is nothing to protect: use grant.transaction(connection)"
        )
    statement = "protect_at_commit" if at == "commit" and database.dialect == "postgres" else "protect"
    try:
        row = await _execute(database, kind, connection, statement, {"name": name, "token": token})
    except Exception as error:
        state = drivers.sqlstate(error)
        if state in (drivers.SQLSTATE, _RACED):
            raise _fenced_out(name) from error
        raise EngineError(f"cannot protect the transaction with lease {name!r}: {error}") from error
    if row is None:
        raise _fenced_out(name)
    fence: int = row[0]
    return fence


@asynccontextmanager
async def transaction(database: Database, name: str, token: str, connection: Any, at: str) -> AsyncIterator[None]:
    """Begin, protect, run the block, commit. FencedOut wherever the database refuses; rolled back then."""
    kind = _kind(database, connection)
    if _in_transaction(kind, connection) and getattr(connection, "autocommit", True) is not False:
        raise ValueError("a transaction is already open on this connection: use grant.protect(connection) inside it")
    try:
        async with _begin(kind, connection):
            await protect(database, name, token, connection, at)
            yield
    except Exception as error:
        if drivers.sqlstate(error) == drivers.SQLSTATE and not isinstance(error, FencedOut):
            raise _fenced_out(name) from error
        raise


def _fenced_out(name: str) -> FencedOut:
    return FencedOut(
        f"lease {name!r} has passed on: this transaction cannot commit. Roll back; the work belongs to the next holder."
    )


def _kind(database: Database, connection: Any) -> Kind:
    kinds: dict[tuple[str, str], Kind] = {
        ("psycopg", "AsyncConnection"): "psycopg",
        ("sqlite3", "Connection"): "sqlite3",
        ("sqlalchemy", "AsyncConnection"): "sqlalchemy",
        ("sqlalchemy", "AsyncSession"): "sqlalchemy",
        ("sqlalchemy", "async_scoped_session"): "sqlalchemy",
    }
    for ancestor in type(connection).__mro__:
        kind = kinds.get((ancestor.__module__.partition(".")[0], ancestor.__name__))
        if kind is not None:
            break
    else:
        raise TypeError(
            f"cannot protect a {type(connection).__module__}.{type(connection).__qualname__}: "
            "give an AsyncConnection of psycopg, an AsyncConnection or AsyncSession of SQLAlchemy, or a sqlite3.Connection"
        )
    if kind != "sqlalchemy" and (kind == "sqlite3") != (database.dialect == "sqlite"):
        raise ValueError(
            f"the lease is in {database}: only a transaction in that very database can be protected by it, not one of {kind}"
        )
    return kind


def _in_transaction(kind: Kind, connection: Any) -> bool:
    if kind == "psycopg":
        return bool(connection.info.transaction_status.value)
    if kind == "sqlite3":
        return bool(connection.in_transaction)
    return bool(connection.in_transaction())


@asynccontextmanager
async def _begin(kind: Kind, connection: Any) -> AsyncIterator[None]:
    if kind == "psycopg":
        async with connection.transaction():
            yield
    elif kind == "sqlalchemy":
        async with connection.begin():
            yield
    else:
        with _sqlite_transaction(connection):
            yield


class _sqlite_transaction:  # noqa: N801 - reads like a function
    """BEGIN IMMEDIATE … COMMIT on the user's connection, whichever of sqlite3's transaction modes it is in."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        if not self._connection.in_transaction:
            self._connection.execute("begin immediate")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._connection.commit()
        else:
            self._connection.rollback()


async def _execute(database: Database, kind: Kind, connection: Any, name: str, parameters: dict[str, str]) -> Any:
    if kind == "sqlite3":
        _same_file(database, connection)
        return connection.execute(_sql(database, name), parameters).fetchone()
    if kind == "sqlalchemy":
        drivers.teach_sqlalchemy(connection)
        from sqlalchemy import text

        return (await connection.execute(text(_sql(database, name)), parameters)).fetchone()
    drivers.teach_psycopg()
    cursor = await connection.execute(
        _sql(database, name).replace(":name", "%(name)s").replace(":token", "%(token)s"), parameters
    )
    row = await cursor.fetchone()
    return tuple(row.values()) if isinstance(row, dict) else row


def _sql(database: Database, name: str) -> str:
    statement = statements(database.dialect, database.schema)[name]
    sql = statement.steps[0].sql
    for number, parameter in enumerate(statement.parameters, 1):
        sql = sql.replace(f"${number}", f":{parameter}")
    return sql


def _same_file(database: Database, connection: sqlite3.Connection) -> None:
    [path] = [row[2] for row in connection.execute("pragma database_list") if row[1] == "main"]
    if not path or not os.path.samefile(path, database.target):
        raise ValueError(
            f"the connection is to {path or 'a database in memory'}, the lease is in {database}: only the same file can be protected"
        )
