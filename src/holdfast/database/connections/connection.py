# Generated from connection_async.py by scripts/unasync.py. Do not edit.
"""The user's own connection, whatever driver it belongs to: the little that protecting a transaction, or writing in it,
needs of it.

Drivers are recognised by name, so that none is imported that the user has not imported already.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol

from holdfast.database.connections.psycopg import Psycopg
from holdfast.database.connections.sqlalchemy import SqlAlchemy
from holdfast.database.connections.sqlite import Sqlite3
from holdfast.database.sessions import Row
from holdfast.database.url import Database


class Connection(Protocol):
    def in_transaction(self) -> bool: ...

    def begins_by_itself(self) -> bool:
        """Does the next statement open a transaction, if none is open?"""

    def begin(self) -> AbstractContextManager[Any]:
        """A transaction around a block, committed at its end."""

    def nested(self) -> AbstractContextManager[Any]:
        """A savepoint around a block, in the transaction that is open: what fails in it leaves nothing there."""

    def flush(self) -> None:
        """Whatever was said to it, and not to the database yet."""

    def mark(self) -> None:
        """From here on the transaction must stay the one it is."""

    def broken(self) -> str | None:
        """Why its COMMIT would not be that of all that was done in it, as far as can be known without asking the
        server."""

    def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        """Run a protecting statement in the open transaction; None when it found nothing to protect."""

    def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        """Run a statement that writes and answers with one row, in the open transaction."""


def recognise(database: Database, connection: Any, what: str = "the lease is") -> Connection:
    """``what`` is in the database, for the message when the connection is to another one."""
    kind: Any = type(connection)
    found: Connection = _adapter(kind)(database, connection, what)
    return found


@lru_cache
def _adapter(kind: type) -> Any:
    adapter = known_as(kind, _ADAPTERS)
    if adapter is None:
        raise TypeError(
            f"cannot use the transaction of a {kind.__module__}.{kind.__qualname__}: give a Connection of "
            "psycopg, a Connection or Session of SQLAlchemy, or a sqlite3.Connection"
        )
    return adapter


def known_as(kind: type, adapters: Mapping[tuple[str, str], Any]) -> Any:
    """What there is for a class, by the package and the name of it, or of one that it comes from; else None."""
    names = ((each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__)
    return next((adapters[name] for name in names if name in adapters), None)


_ADAPTERS: dict[tuple[str, str], Any] = {
    ("psycopg", "Connection"): Psycopg,
    ("sqlite3", "Connection"): Sqlite3,
    ("sqlalchemy", "Connection"): SqlAlchemy,
    ("sqlalchemy", "Session"): SqlAlchemy,
    ("sqlalchemy", "scoped_session"): SqlAlchemy,
}
