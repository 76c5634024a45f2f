# Generated from connection_async.py by scripts/unasync.py. Do not edit.
"""The user's own connection: what protecting a transaction, or writing in it, needs of any database driver.

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

    def is_idle(self) -> bool:
        """Whether certainly nothing was written that is not committed, so that ``rollback`` undoes nothing."""

    def begins_by_itself(self) -> bool:
        """Whether the next statement opens a transaction, if none is open."""

    def begin(self) -> AbstractContextManager[Any]:
        """A transaction around a block, committed at its end."""

    def nested(self) -> AbstractContextManager[Any]:
        """A savepoint around a block, in the open transaction: an error in the block rolls back to it."""

    def open(self) -> None:
        """Open a transaction, where the statement that would do it must not wait for others."""

    def rollback(self) -> None:
        """Roll back the open transaction, if there is one."""

    def flush(self) -> None:
        """Send what was added to it, and not to the database yet."""

    def mark(self) -> None:
        """Begin to watch whether the transaction is ended and another one begun."""

    def broken(self) -> str | None:
        """Why a COMMIT would not commit everything since ``mark``, as far as the client side knows; else None."""

    def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        """Run a protecting statement in the open transaction: the fence, or None when the lease is not held."""

    def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        """Run a statement that writes and returns one row, in the open transaction."""


def recognise(database: Database, connection: Any, what: str = "the lease is") -> Connection:
    """The adapter for ``connection``. TypeError for an unknown driver; ValueError for a connection to another database,
    with ``what`` (is in ours) in the message."""
    kind: Any = type(connection)
    adapter: Connection = _adapter(kind)(database, connection, what)
    return adapter


@lru_cache
def _adapter(kind: type) -> Any:
    adapter = adapter_for(kind, _ADAPTERS)
    if adapter is None:
        raise TypeError(
            f"cannot use the transaction of a {kind.__module__}.{kind.__qualname__}: give a Connection of "
            "psycopg, a Connection or Session of SQLAlchemy, or a sqlite3.Connection"
        )
    return adapter


def adapter_for(kind: type, adapters: Mapping[tuple[str, str], Any]) -> Any:
    """The entry for a class or one of its bases, by package and name; else None."""
    names = ((each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__)
    return next((adapters[name] for name in names if name in adapters), None)


_ADAPTERS: dict[tuple[str, str], Any] = {
    ("psycopg", "Connection"): Psycopg,
    ("sqlite3", "Connection"): Sqlite3,
    ("sqlalchemy", "Connection"): SqlAlchemy,
    ("sqlalchemy", "Session"): SqlAlchemy,
    ("sqlalchemy", "scoped_session"): SqlAlchemy,
}
