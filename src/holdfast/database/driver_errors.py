"""Makes the user's own driver raise FencedOut out of the user's own COMMIT, where holdfast is not on the stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.errors import FencedOut
from holdfast.operations.decide import causes

SQLSTATE = "HF001"
IN_ERROR = 3
"""As libpq numbers it: the status of a transaction in which a statement has failed."""


def sqlstate(error: BaseException | None) -> str | None:
    """The SQLSTATE as the drivers call it, wherever SQLAlchemy has put it."""
    for each in _wrapped(error):
        for state in (getattr(each, "sqlstate", None), getattr(each, "pgcode", None), _fields(each).get("C")):
            if isinstance(state, str):
                return state
    return None


def raced(error: BaseException | None) -> bool:
    """A serialization failure on the lease's row, which only a takeover or a release writes. One among serializable
    transactions of the user's is another matter, and has a detail: the reason code."""
    if sqlstate(error) != "40001":
        return False
    for each in _wrapped(error):
        detail = getattr(getattr(each, "diag", each), "message_detail", None) or getattr(each, "detail", None)
        detail = detail or _fields(each).get("D")
        if detail and isinstance(detail, str):
            return False
    return True


def _wrapped(error: BaseException | None) -> Iterator[BaseException]:
    """It, and what it is about: SQLAlchemy calls that ``orig``, and so may others call something else."""

    def inner(each: BaseException) -> object:
        found = getattr(each, "orig", None)
        return found if isinstance(found, BaseException) else each.__cause__

    return causes(error, inner)


def message(error: BaseException) -> str:
    return str(_fields(error).get("M", error))


def _fields(error: BaseException) -> dict[str, Any]:
    """Of pg8000, whose errors are the server's message as it came: a letter for each field."""
    found = error.args[0] if error.args else None
    return found if isinstance(found, dict) else {}


def teach_psycopg() -> None:
    """psycopg looks the class of an error up by its SQLSTATE; ours becomes both a psycopg error and FencedOut."""
    from psycopg import errors

    known: dict[str, type[Exception]] = getattr(errors, "_sqlcodes", {})
    if SQLSTATE not in known:
        known[SQLSTATE] = type(
            "FencedOut", (FencedOut, errors.OperationalError), {"__module__": __name__, "sqlstate": SQLSTATE}
        )


class Secret(str):
    """A parameter for SQLAlchemy, which writes parameters into its log and its errors."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def speaks(connection: Any) -> str:
    """The database that this connection of SQLAlchemy is to: "postgresql", "sqlite", …"""
    name: str = _blocking(connection).dialect.name
    return name


def autocommits(connection: Any) -> bool:
    """Whether what SQLAlchemy calls a transaction is none. Asked after a statement that writes."""
    inner = _blocking(connection)
    if inner.dialect.name == "sqlite":
        return not driver_of(connection).in_transaction
    return bool(inner.connection.dbapi_connection.autocommit)


def driver_of(connection: Any) -> Any:
    """The driver's own connection, below one of SQLAlchemy's."""
    return _blocking(connection).connection.driver_connection


def failed(driver: Any) -> bool:
    """Whether a statement of its transaction has, where the driver tells: psycopg and psycopg2 do."""
    return getattr(getattr(driver, "info", None), "transaction_status", None) == IN_ERROR


def would_autocommit(connection: Any) -> bool:
    """The same, asked before anything is written."""
    inner = _blocking(connection)
    if inner.dialect.name != "sqlite":
        return autocommits(connection)
    driver = driver_of(connection)
    manual = driver.isolation_level is None or getattr(driver, "autocommit", -1) is True
    return manual and not driver.in_transaction


def _blocking(connection: Any) -> Any:
    return getattr(connection, "sync_connection", None) or connection


def commits(connection: Any) -> int:
    """How often a connection of SQLAlchemy was committed since this was first asked of it."""
    from sqlalchemy import event

    inner = _blocking(connection)
    if inner not in _commits:
        if not event.contains(inner.engine, "commit", _committed):
            event.listen(inner.engine, "commit", _committed)
        _commits[inner] = 0
    return _commits[inner]


def _committed(connection: Any) -> None:
    if connection in _commits:
        _commits[connection] += 1


_commits: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def teach_sqlalchemy(connection: Any) -> None:
    """Every engine whose transaction was protected once turns the database's refusal into FencedOut."""
    from sqlalchemy import event

    engine = _blocking(connection).engine
    if not event.contains(engine, "handle_error", _refused):
        event.listen(engine, "handle_error", _refused)


def _refused(context: Any) -> None:
    if sqlstate(context.original_exception) == SQLSTATE:  # even one that psycopg raised as FencedOut would be wrapped
        raise FencedOut(message(context.original_exception)) from context.original_exception
