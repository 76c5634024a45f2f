"""The user's own connection: what protecting a transaction, or writing in it, needs of any database driver.

Drivers are recognised by name, so that none is imported that the user has not imported already.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import Any, Protocol

from holdfast.database.connections.psycopg_async import AsyncPsycopg
from holdfast.database.connections.sqlalchemy_async import AsyncSqlAlchemy
from holdfast.database.connections.sqlite_async import AsyncSqlite3
from holdfast.database.sessions import Row
from holdfast.database.url import Database


class AsyncConnection(Protocol):
    def in_transaction(self) -> bool: ...

    def is_idle(self) -> bool:
        """Whether certainly nothing was written that is not committed, so that ``rollback`` undoes nothing."""

    def begins_by_itself(self) -> bool:
        """Whether the next statement opens a transaction, if none is open."""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """A transaction around a block, committed at its end."""

    def nested(self) -> AbstractAsyncContextManager[Any]:
        """A savepoint around a block, in the open transaction: an error in the block rolls back to it."""

    async def open(self) -> None:
        """Open a transaction, where the statement that would do it must not wait for others."""

    async def rollback(self) -> None:
        """Roll back the open transaction, if there is one."""

    async def flush(self) -> None:
        """Send what was added to it, and not to the database yet."""

    def mark(self) -> None:
        """Begin to watch whether the transaction is ended and another one begun."""

    def broken(self) -> str | None:
        """Why a COMMIT would not commit everything since ``mark``, as far as the client side knows; else None."""

    async def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        """Run a protecting statement in the open transaction: the fence, or None when the lease is not held."""

    async def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        """Run a statement that writes and returns one row, in the open transaction."""


def recognise(database: Database, connection: Any, what: str = "the lease is") -> AsyncConnection:
    """The adapter for ``connection``. TypeError for an unknown driver; ValueError for a connection to another database,
    with ``what`` (is in ours) in the message."""
    kind: Any = type(connection)
    adapter: AsyncConnection = _adapter(kind)(database, connection, what)
    return adapter


@lru_cache
def _adapter(kind: type) -> Any:
    adapter = adapter_for(kind, _ADAPTERS)
    if adapter is None:
        raise TypeError(
            f"cannot use the transaction of a {kind.__module__}.{kind.__qualname__}: give an AsyncConnection of "
            "psycopg, an AsyncConnection or AsyncSession of SQLAlchemy, or a sqlite3.Connection"
        )
    return adapter


def adapter_for(kind: type, adapters: Mapping[tuple[str, str], Any]) -> Any:
    """The entry for a class or one of its bases, by package and name; else None."""
    names = ((each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__)
    return next((adapters[name] for name in names if name in adapters), None)


_ADAPTERS: dict[tuple[str, str], Any] = {
    ("psycopg", "AsyncConnection"): AsyncPsycopg,
    ("sqlite3", "Connection"): AsyncSqlite3,
    ("sqlalchemy", "AsyncConnection"): AsyncSqlAlchemy,
    ("sqlalchemy", "AsyncSession"): AsyncSqlAlchemy,
    ("sqlalchemy", "async_scoped_session"): AsyncSqlAlchemy,
}
