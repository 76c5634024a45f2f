"""What database drivers do not say in the same way: SQLSTATE, serialization failures, autocommit, failed transactions.

It also makes psycopg and SQLAlchemy raise FencedOut out of the user's own COMMIT, where no code of ours runs. It never
runs a statement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.errors import FencedOut, walk_causes

SQLSTATE = "HF001"
IN_ERROR = 3
"""libpq's status of a transaction in which a statement has failed."""


def sqlstate(error: BaseException | None) -> str | None:
    """The SQLSTATE of a driver's error, also inside an error of SQLAlchemy."""
    for each in _wrapped(error):
        for state in (getattr(each, "sqlstate", None), getattr(each, "pgcode", None), _fields(each).get("C")):
            if isinstance(state, str):
                return state
    return None


def raced(error: BaseException | None) -> bool:
    """Whether the error of a protecting statement, which touches the lease's row alone, is a serialization failure: a
    takeover or a release has changed that row. A conflict among the user's serializable transactions gives False: the
    server adds a DETAIL, the reason code, to that."""
    if sqlstate(error) != "40001":
        return False
    for each in _wrapped(error):
        detail = getattr(getattr(each, "diag", each), "message_detail", None) or getattr(each, "detail", None)
        detail = detail or _fields(each).get("D")
        if detail and isinstance(detail, str):
            return False
    return True


def _wrapped(error: BaseException | None) -> Iterator[BaseException]:
    """The error and the errors inside it, which SQLAlchemy calls ``orig``."""

    def inner(each: BaseException) -> object:
        original = getattr(each, "orig", None)
        return original if isinstance(original, BaseException) else each.__cause__

    return walk_causes(error, inner)


def message(error: BaseException) -> str:
    return str(_fields(error).get("M", error))


def _fields(error: BaseException) -> dict[str, Any]:
    """The fields of a pg8000 error, which are keyed by the letters of the protocol."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, dict) else {}


def teach_psycopg() -> None:
    """Register the class for our SQLSTATE with psycopg: both a psycopg error and FencedOut."""
    from psycopg import errors

    # private: psycopg.errors._sqlcodes, tested in tests/test_private_names.py
    classes: dict[str, type[Exception]] = getattr(errors, "_sqlcodes", {})
    if SQLSTATE not in classes:
        members = {"__module__": "holdfast", "sqlstate": SQLSTATE, "__reduce__": lambda self: (FencedOut, self.args)}
        classes[SQLSTATE] = type("FencedOut", (FencedOut, errors.OperationalError), members)


class Secret(str):
    """A parameter that SQLAlchemy must not show in its log and its errors."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def dialect_of(connection: Any) -> str:
    """The dialect of a SQLAlchemy connection: "postgresql", "sqlite", …"""
    name: str = _blocking(connection).dialect.name
    return name


def writes_parameters(connection: Any) -> bool:
    """Whether the driver of a SQLAlchemy connection writes parameters into the text of a statement."""
    return bool(_blocking(connection).dialect.driver.startswith("psycopg2"))


def autocommits(connection: Any) -> bool:
    """Whether a SQLAlchemy connection is in autocommit mode. To be called after a statement that writes, because
    sqlite3 begins a transaction only then; before it, call ``would_autocommit``."""
    inner = _blocking(connection)
    if inner.dialect.name == "sqlite":
        return not driver_of(connection).in_transaction
    return bool(inner.connection.dbapi_connection.autocommit)


def driver_of(connection: Any) -> Any:
    """The driver's connection below a SQLAlchemy connection."""
    return _blocking(connection).connection.driver_connection


def failed(driver: Any) -> bool:
    """Whether a statement of the open transaction has failed; only psycopg and psycopg2 know."""
    return getattr(getattr(driver, "info", None), "transaction_status", None) == IN_ERROR


def would_autocommit(connection: Any) -> bool:
    """As ``autocommits``, but to be called before anything is written."""
    inner = _blocking(connection)
    if inner.dialect.name != "sqlite":
        return autocommits(connection)
    driver = driver_of(connection)
    manual = driver.isolation_level is None or getattr(driver, "autocommit", -1) is True
    return manual and not driver.in_transaction


def _blocking(connection: Any) -> Any:
    return getattr(connection, "sync_connection", None) or connection


def commits(connection: Any) -> int:
    """How often a SQLAlchemy connection was committed since the first call of this."""
    from sqlalchemy import event

    inner = _blocking(connection)
    if inner not in _commits:
        if not event.contains(inner.engine, "commit", _count_commit):
            event.listen(inner.engine, "commit", _count_commit)
        _commits[inner] = 0
    return _commits[inner]


def _count_commit(connection: Any) -> None:
    if connection in _commits:
        _commits[connection] += 1


_commits: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def teach_sqlalchemy(connection: Any) -> None:
    """Make this SQLAlchemy engine raise FencedOut for our SQLSTATE."""
    from sqlalchemy import event

    engine = _blocking(connection).engine
    if not event.contains(engine, "handle_error", _raise_fenced_out):
        event.listen(engine, "handle_error", _raise_fenced_out)


def _raise_fenced_out(context: Any) -> None:
    """Raise psycopg's own FencedOut again instead of having SQLAlchemy wrap it, which then is its own cause: one
    traceback. Errors of other drivers become the cause of ours."""
    error = context.original_exception
    if isinstance(error, FencedOut):
        raise error
    if sqlstate(error) == SQLSTATE:
        raise FencedOut(message(error)) from error
