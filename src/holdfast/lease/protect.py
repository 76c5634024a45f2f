# Generated from protect_async.py by scripts/unasync.py. Do not edit.
"""A holder that has been superseded cannot commit.

Runs one statement inside the user's own transaction, through the user's own connection and database driver. Never opens
a connection, and never commits a transaction that it did not begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.database import driver_errors as drivers
from holdfast.database.connections.connection import Connection, recognise
from holdfast.database.url import Database
from holdfast.errors import EngineError, FencedOut


def protect(database: Database, name: str, token: str, connection: Any, at: str) -> int:
    """Protect the open transaction of ``connection``, or the one that this statement opens; returns the fence."""
    _check(at)
    adapter = recognise(database, connection)
    if not adapter.in_transaction() and not adapter.begins_by_itself():
        raise ValueError(
            "no transaction is open on this connection, in autocommit mode: use grant.transaction(connection)"
        )
    return _protect(database, name, token, adapter, connection, at)


@contextmanager
def transaction(database: Database, name: str, token: str, connection: Any, at: str) -> Iterator[None]:
    """Begin, protect, run the block, commit. FencedOut when the database refuses; then it is rolled back."""
    _check(at)
    adapter = recognise(database, connection)
    if adapter.in_transaction():
        raise ValueError("a transaction is already open on this connection: use grant.protect(connection) inside it")
    try:
        with adapter.begin():
            _protect(database, name, token, adapter, connection, at)
            adapter.mark()
            yield
            if (why := adapter.broken()) is not None:
                raise RuntimeError(f"the transaction that lease {name!r} protects {why}")
    except FencedOut as refusal:
        if drivers.sqlstate(refusal.__cause__) == drivers.SQLSTATE:
            refusal.__cause__ = None  # it says the same again: one refusal shows one traceback
        raise


def _protect(database: Database, name: str, token: str, adapter: Connection, connection: Any, at: str) -> int:
    # On SQLite both forms are the same: the protected transaction is the only writer until it commits.
    statement = "protect_at_commit" if at == "commit" and database.dialect == "postgres" else "protect"
    try:
        fence = adapter.fence(statement, {"name": name, "token": token})
    except ValueError:
        raise
    except Exception as error:
        refusal = _refusal(name, error, _elsewhere(database, connection))
    else:
        if fence is not None:
            return fence
        refusal = FencedOut.from_lease(name, _elsewhere(database, connection))
    try:
        raise refusal  # outside the except block: SQLAlchemy's error shows the token, and must not be its context
    finally:
        del refusal  # breaks the cycle through this frame, which keeps the connection alive


def _refusal(name: str, error: Exception, where: str) -> EngineError | FencedOut:
    """FencedOut if the database refused because the lease has passed on, else EngineError. The cause of an error with
    another SQLSTATE is the database driver's own: that of SQLAlchemy shows the parameters, and the token is one."""
    if drivers.sqlstate(error) == drivers.SQLSTATE:
        return FencedOut.from_lease(name, where)
    reason = getattr(error, "orig", None) or error
    refusal: EngineError | FencedOut = (
        FencedOut.from_lease(name, where)
        if drivers.raced(error)
        else EngineError(f"cannot protect the transaction with lease {name!r}: {drivers.message(reason)}")
    )
    refusal.__cause__ = reason
    return refusal


def _check(at: str) -> None:
    if at not in ("start", "commit"):
        raise ValueError(f"at must be 'start' or 'commit', not {at!r}")


def _elsewhere(database: Database, connection: Any) -> str:
    """A hint if the connection seems to be to another database. Only a hint: a pooler may rename databases."""
    theirs = getattr(getattr(connection, "info", None), "dbname", None)
    if theirs is None:
        return ""
    from psycopg.conninfo import conninfo_to_dict

    ours = conninfo_to_dict(database.target).get("dbname")
    return (
        ""
        if ours in (None, theirs)
        else f" Or is this the wrong database? The lease is in {database}, this connection is to {theirs!r}."
    )
