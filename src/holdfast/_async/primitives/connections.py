"""The user's own connection, whatever driver it belongs to: the little that protecting a transaction needs of it.

Drivers are recognised by name, so that none is imported that the user has not imported already.
"""

from __future__ import annotations

import sqlite3
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from holdfast._wire import drivers
from holdfast._wire.database import Database
from holdfast.sql import statements


class AsyncConnection(Protocol):
    def in_transaction(self) -> bool: ...

    def begins_by_itself(self) -> bool:
        """Does the next statement open a transaction, if none is open?"""

    def begin(self) -> AbstractAsyncContextManager[Any]:
        """A transaction around a block, committed at its end."""

    async def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        """Run a protecting statement in the open transaction; None when it found nothing to protect."""


def recognise(database: Database, connection: Any) -> AsyncConnection:
    adapters: dict[tuple[str, str], Any] = {
        ("psycopg", "AsyncConnection"): AsyncPsycopg,
        ("sqlite3", "Connection"): AsyncSqlite3,
        ("sqlalchemy", "AsyncConnection"): AsyncSqlAlchemy,
        ("sqlalchemy", "AsyncSession"): AsyncSqlAlchemy,
        ("sqlalchemy", "async_scoped_session"): AsyncSqlAlchemy,
    }
    for ancestor in type(connection).__mro__:
        adapter = adapters.get((ancestor.__module__.partition(".")[0], ancestor.__name__))
        if adapter is not None:
            found: AsyncConnection = adapter(database, connection)
            return found
    raise TypeError(
        f"cannot protect a {type(connection).__module__}.{type(connection).__qualname__}: give an AsyncConnection of "
        "psycopg, an AsyncConnection or AsyncSession of SQLAlchemy, or a sqlite3.Connection"
    )


def _sql(database: Database, name: str, style: str) -> str:
    """The statement with its parameters as the driver writes them."""
    statement = statements(database.dialect, database.schema)[name]
    sql = statement.steps[0].sql
    for number, parameter in enumerate(statement.parameters, 1):
        sql = sql.replace(f"${number}", f":{parameter}").replace(f":{parameter}", style.format(parameter))
    return sql


class AsyncPsycopg:
    def __init__(self, database: Database, connection: Any) -> None:
        if database.dialect != "postgres":
            raise ValueError(f"the lease is in {database}: a transaction of PostgreSQL cannot be protected by it")
        self._database, self._connection = database, connection

    def in_transaction(self) -> bool:
        return bool(self._connection.info.transaction_status.value)

    def begins_by_itself(self) -> bool:
        return not self._connection.autocommit

    def begin(self) -> AbstractAsyncContextManager[Any]:
        block: AbstractAsyncContextManager[Any] = self._connection.transaction()
        return block

    async def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        from psycopg.rows import scalar_row

        drivers.teach_psycopg()
        async with self._connection.cursor(row_factory=scalar_row) as cursor:
            await cursor.execute(_sql(self._database, statement, "%({})s"), parameters)
            found: int | None = await cursor.fetchone()
            return found


class AsyncSqlAlchemy:
    def __init__(self, database: Database, connection: Any) -> None:
        self._database, self._connection = database, connection

    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction())

    def begins_by_itself(self) -> bool:
        return True

    def begin(self) -> AbstractAsyncContextManager[Any]:
        block: AbstractAsyncContextManager[Any] = self._connection.begin()
        return block

    async def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        from sqlalchemy import text

        drivers.teach_sqlalchemy(self._connection)
        result = await self._connection.execute(text(_sql(self._database, statement, ":{}")), parameters)
        found: int | None = result.scalar()
        return found


class AsyncSqlite3:
    def __init__(self, database: Database, connection: sqlite3.Connection) -> None:
        if database.dialect != "sqlite":
            raise ValueError(f"the lease is in {database}: a transaction of SQLite cannot be protected by it")
        [path] = [row[2] for row in connection.execute("pragma database_list") if row[1] == "main"]
        if not path or not Path(path).samefile(database.target):
            raise ValueError(
                f"the connection is to {path or 'a database in memory'} and the lease is in {database}: "
                "only a transaction in the same file can be protected"
            )
        self._database, self._connection = database, connection

    def in_transaction(self) -> bool:
        return self._connection.in_transaction and getattr(self._connection, "autocommit", -1) is not False

    def begins_by_itself(self) -> bool:
        return self._connection.isolation_level is not None or getattr(self._connection, "autocommit", -1) is False

    def begin(self) -> AsyncSqliteTransaction:
        return AsyncSqliteTransaction(self._connection)

    async def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        row = self._connection.execute(_sql(self._database, statement, ":{}"), parameters).fetchone()
        return row and int(row[0])


class AsyncSqliteTransaction:
    """BEGIN IMMEDIATE … COMMIT, whichever of sqlite3's transaction modes the connection is in."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def __aenter__(self) -> None:
        if not self._connection.in_transaction:
            self._connection.execute("begin immediate")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._connection.commit()
        else:
            self._connection.rollback()
