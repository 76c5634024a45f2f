"""Every kind of user connection that a grant can protect, behind one interface, so that a test runs on all of them.

``settled`` and ``entered`` hide the difference between sync and async calls and blocks.
"""

from __future__ import annotations

import inspect
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psycopg
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_asyncio
from sqlalchemy.pool import NullPool

import holdfast
from holdfast.database.connections.sqlalchemy import subject_of
from tests.conftest import fresh


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def entered(block: Any) -> AsyncIterator[Any]:
    if hasattr(block, "__aenter__"):
        async with block as value:
            yield value
    else:
        with block as value:
            yield value


@cache
def shared_postgres() -> str:
    """A migrated database shared by the tests of a process, which use different names."""
    return fresh()


def ask(url: str, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Run one statement on a new connection."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as file:
            return file.execute(sql, parameters).fetchall()
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(sql.encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []


def make_table(url: str) -> str:
    table = f"work_{secrets.token_hex(4)}"
    ask(url, f"create table {table} (what text)")
    return table


@dataclass
class Subject:
    """A client, and a user's connection to the same database."""

    url: str
    client: Any
    connection: Any
    sql: Callable[[str], Any]
    other: holdfast.Client
    begin_with: str | None = None
    name: str = field(default_factory=lambda: f"lease-{secrets.token_hex(4)}")
    table: str = ""

    @property
    def on_postgres(self) -> bool:
        return self.url.startswith("postgres")

    async def acquire(self, **options: Any) -> Any:
        return await settled(self.client.lease(self.name, **options).acquire())

    async def begin(self) -> None:
        """Begin a transaction, with the database drivers that do not by themselves."""
        if self.begin_with:
            await self.run(self.begin_with)

    async def run(self, sql: str) -> Any:
        return await settled(self.connection.execute(self.sql(sql)))

    async def write(self, what: str) -> None:
        await self.run(f"insert into {self.table} values ('{what}')")

    async def write_within(self, grant: Any, at: str, what: str, then: Callable[[], object] = lambda: None) -> None:
        """Write in a transaction that holdfast begins and commits."""
        async with entered(grant.transaction(self.connection, at=at)):
            await self.write(what)
            then()

    async def commit(self) -> None:
        await settled(self.run("commit") if self.begin_with else self.connection.commit())

    async def rollback(self) -> None:
        if not self.begin_with:
            await settled(self.connection.rollback())
        elif self.in_transaction():
            await self.run("rollback")

    def in_transaction(self) -> bool:
        if isinstance(self.connection, psycopg.Connection | psycopg.AsyncConnection):
            return self.connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
        value = subject_of(self.connection).in_transaction
        return bool(value() if callable(value) else value)

    def rows(self) -> list[str]:
        return [row[0] for row in ask(self.url, f"select what from {self.table} order by 1")]

    def supersede(self) -> Any:
        """Make the other client the holder."""
        self.other.leases.force_release(self.name, actor="test", reason="superseded")
        return self.other.lease(self.name).acquire()


Opened = tuple[Any, Callable[[str], Any]]


@asynccontextmanager
async def _plain(connection: Any) -> AsyncIterator[Opened]:
    connection = await settled(connection)
    try:
        yield connection, str
    finally:
        await settled(connection.close())


def _sqlite3(url: str, **options: Any) -> AbstractAsyncContextManager[Opened]:
    return _plain(sqlite3.connect(url.removeprefix("sqlite:///"), **options))


@asynccontextmanager
async def _alchemy(url: str, make: Callable[[Any], Any]) -> AsyncIterator[Opened]:
    is_async = any(driver in url for driver in ("asyncpg", "aiosqlite", "psycopg_async"))
    engine: Any = (sa_asyncio.create_async_engine if is_async else sqlalchemy.create_engine)(url, poolclass=NullPool)
    connection = make(engine)
    if isinstance(connection, sa_asyncio.AsyncConnection):
        _ = await connection.start()
    try:
        yield connection, sqlalchemy.text
    finally:
        await settled((connection.remove if hasattr(connection, "remove") else connection.close)())
        await settled(engine.dispose())


def _over(driver: str, make: Callable[[Any], Any]) -> Callable[[str], AbstractAsyncContextManager[Opened]]:
    return lambda url: _alchemy(url.replace("://", f"+{driver}://", 1), make)


def _session(engine: Any) -> orm.Session:
    return orm.Session(engine)


def _scoped(engine: Any) -> Any:
    return orm.scoped_session(orm.sessionmaker(engine))


def _async_scoped(engine: Any) -> Any:
    return sa_asyncio.async_scoped_session(sa_asyncio.async_sessionmaker(engine), scopefunc=lambda: 1)


POSTGRES: dict[str, Callable[[str], AbstractAsyncContextManager[Opened]]] = {
    "psycopg": lambda url: _plain(psycopg.connect(url)),
    "psycopg-async": lambda url: _plain(psycopg.AsyncConnection.connect(url)),
    "psycopg-autocommit": lambda url: _plain(psycopg.connect(url, autocommit=True)),
    "psycopg-autocommit-async": lambda url: _plain(psycopg.AsyncConnection.connect(url, autocommit=True)),
}
SQLITE: dict[str, Callable[[str], AbstractAsyncContextManager[Opened]]] = {
    "sqlite3": _sqlite3,
    "sqlite3-async": lambda url: _sqlite3(url),
    "sqlite3-manual": lambda url: _sqlite3(url, isolation_level=None),
    "sqlite3-manual-async": lambda url: _sqlite3(url, isolation_level=None),
}
if hasattr(sqlite3, "LEGACY_TRANSACTION_CONTROL"):
    SQLITE["sqlite3-autocommit-off"] = lambda url: _sqlite3(url, autocommit=False)
    SQLITE["sqlite3-autocommit-on"] = lambda url: _sqlite3(url, autocommit=True)
ALCHEMY: dict[str, Callable[[str], AbstractAsyncContextManager[Opened]]] = {
    "connection-psycopg": _over("psycopg", lambda engine: engine.connect()),
    "session-psycopg": _over("psycopg", _session),
    "scoped-psycopg": _over("psycopg", _scoped),
    "connection-psycopg2": _over("psycopg2", lambda engine: engine.connect()),
    "session-pg8000": _over("pg8000", _session),
    "connection-pg8000": _over("pg8000", lambda engine: engine.connect()),
    "connection-psycopg-async": _over("psycopg_async", lambda engine: engine.connect()),
    "session-psycopg-async": _over("psycopg_async", sa_asyncio.AsyncSession),
    "connection-asyncpg-async": _over("asyncpg", lambda engine: engine.connect()),
    "session-asyncpg-async": _over("asyncpg", sa_asyncio.AsyncSession),
    "scoped-asyncpg-async": _over("asyncpg", _async_scoped),
}
ALCHEMY_SQLITE: dict[str, Callable[[str], AbstractAsyncContextManager[Opened]]] = {
    "session-pysqlite": _over("pysqlite", _session),
    "connection-pysqlite": _over("pysqlite", lambda engine: engine.connect()),
    "session-aiosqlite-async": _over("aiosqlite", sa_asyncio.AsyncSession),
}
_MODES = ("psycopg-autocommit", "sqlite3-manual", "sqlite3-autocommit-on")
AUTOCOMMIT = [kind for kind in [*POSTGRES, *SQLITE] if kind.startswith(_MODES)]
_ALL = POSTGRES | SQLITE | ALCHEMY | ALCHEMY_SQLITE


@asynccontextmanager
async def subject(kind: str, url: str) -> AsyncIterator[Subject]:
    """A Subject with this kind of connection. Closes everything at the end."""
    client: Any = (holdfast.AsyncClient if kind.endswith("-async") else holdfast.Client)(url)
    with holdfast.Client(url) as other:
        other.leases.list()  # SQLite creates its tables now
        try:
            async with _ALL[kind](url) as (connection, sql):
                begin_with = "begin" if kind in AUTOCOMMIT else None
                yield Subject(url, client, connection, sql, other, begin_with, table=make_table(url))
        finally:
            await settled(client.close())
