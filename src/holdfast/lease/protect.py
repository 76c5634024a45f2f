# Generated from protect_async.py by scripts/unasync.py. Do not edit.
"""The promise nobody else makes: a holder that has been superseded cannot commit.

Runs one statement inside the user's own transaction, through the user's own connection, whatever driver that is. Never
opens a connection, and never commits a transaction it did not begin.
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
    """Protect the transaction that is open on ``connection``, or that this opens; returns the fence."""
    _check(at)
    known = recognise(database, connection)
    if not known.in_transaction() and not known.begins_by_itself():
        raise ValueError(
            "no transaction is open on this connection, in autocommit mode: use grant.transaction(connection)"
        )
    return _protect(database, name, token, known, connection, at)


@contextmanager
def transaction(database: Database, name: str, token: str, connection: Any, at: str) -> Iterator[None]:
    """Begin, protect, run the block, commit. FencedOut wherever the database refuses, and rolled back then."""
    _check(at)
    known = recognise(database, connection)
    if known.in_transaction():
        raise ValueError("a transaction is already open on this connection: use grant.protect(connection) inside it")
    try:
        with known.begin():
            _protect(database, name, token, known, connection, at)
            known.mark()
            yield
            if (why := known.broken()) is not None:
                raise RuntimeError(f"the transaction that lease {name!r} protects {why}")
    except Exception as error:
        if drivers.sqlstate(error) == drivers.SQLSTATE and not isinstance(error, FencedOut):
            raise fenced_out(name) from error
        raise


def _protect(database: Database, name: str, token: str, known: Connection, connection: Any, at: str) -> int:
    # On SQLite both forms are one: whoever protects is the only writer until it commits.
    statement = "protect_at_commit" if at == "commit" and database.dialect == "postgres" else "protect"
    try:
        fence = known.fence(statement, {"name": name, "token": token})
    except ValueError:
        raise
    except Exception as error:
        refusal = _refusal(name, error, _elsewhere(database, connection))
    else:
        if fence is not None:
            return fence
        refusal = fenced_out(name, _elsewhere(database, connection))
    try:
        raise refusal  # here, where the error of SQLAlchemy is not its context
    finally:
        del refusal  # it has this frame in its traceback, and with that the connection


def _refusal(name: str, error: Exception, where: str) -> EngineError | FencedOut:
    """The cause is the driver's own error: SQLAlchemy's shows the parameters, and the token is one."""
    reason = getattr(error, "orig", None) or error
    refusal = (
        fenced_out(name, where)
        if drivers.sqlstate(error) == drivers.SQLSTATE or drivers.raced(error)
        else EngineError(f"cannot protect the transaction with lease {name!r}: {drivers.message(reason)}")
    )
    refusal.__cause__ = reason
    return refusal


def _check(at: str) -> None:
    if at not in ("start", "commit"):
        raise ValueError(f"at must be 'start' or 'commit', not {at!r}")


def fenced_out(name: str, where: str = "") -> FencedOut:
    return FencedOut(
        f"lease {name!r} has passed on: this transaction cannot commit. Roll back; the work belongs to the next holder."
        f"{where}"
    )


def _elsewhere(database: Database, connection: Any) -> str:
    """A hint for whoever gave a connection to another database, where nobody has the lease. A hint is all that a name
    is good for: a pooler may have names of its own."""
    theirs = getattr(getattr(connection, "info", None), "dbname", None)
    if theirs is None:
        return ""
    from psycopg.conninfo import conninfo_to_dict

    ours = conninfo_to_dict(database.target).get("dbname")
    return (
        ""
        if ours in (None, theirs)
        else f" Or is it elsewhere? It is in {database}, and this connection to {theirs!r}."
    )
