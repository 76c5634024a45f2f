"""Whose the commit is, for every kind of connection and block: a row of the table in docs/howto/operations.md each."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import django
import django.conf
import django.db
import django.db.transaction
import psycopg
import psycopg2
import psycopg_pool
import pytest
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import orm
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext import asyncio as sa_asyncio
from sqlalchemy.pool import NullPool

import holdfast
from tests.migrated_file import migrated_file
from tests.operations.user_connections import key, logged
from tests.user_connections import ask, make_table, settled, shared_postgres

DOCS = Path(__file__).parents[2] / "docs" / "howto" / "operations.md"
Block = Callable[[str], AbstractAsyncContextManager[Any]]
JOINS, OWN = "joins", "begins and commits"


def _file(url: str, **options: Any) -> Any:
    return sqlite3.connect(url.removeprefix("sqlite:///"), **options)


def _alchemy(url: str, driver: str, **options: Any) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(_with_driver(url, driver), poolclass=NullPool, **options)


def _async_alchemy(url: str, driver: str) -> sa_asyncio.AsyncEngine:
    return sa_asyncio.create_async_engine(_with_driver(url, driver), poolclass=NullPool)


def _with_driver(url: str, driver: str) -> URL:
    parsed = make_url(url)
    return parsed.set(drivername=f"{parsed.drivername}+{driver}")


def _block(make: Callable[[str], Any], inner: Callable[[Any], Any] | None = None) -> Block:
    """``with make(url) as tx`` and, inside it, ``with inner(tx)``."""

    @asynccontextmanager
    async def block(url: str) -> AsyncIterator[Any]:
        with make(url) as tx:
            if inner is None:
                yield tx
            else:
                with inner(tx):
                    yield tx

    return block


def _async_block(make: Callable[[str], Any], inner: Callable[[Any], Any] | None = None) -> Block:
    @asynccontextmanager
    async def block(url: str) -> AsyncIterator[Any]:
        async with await settled(make(url)) as tx:
            if inner is None:
                yield tx
            else:
                async with inner(tx):
                    yield tx

    return block


def _in_file(connection: Any) -> Any:
    return connection  # ``with`` on a connection of sqlite3 ends its transaction, and does not close it


def _begun(connection: Any) -> Any:
    connection.execute("begin")
    return closing(connection)


@asynccontextmanager
async def _closing(connecting: Any) -> AsyncIterator[Any]:
    connection = await connecting
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _pool(url: str) -> AsyncIterator[Any]:
    with psycopg_pool.ConnectionPool(url, min_size=1) as pool, pool.connection() as connection:
        yield connection


@asynccontextmanager
async def _pg8000(url: str) -> AsyncIterator[Any]:
    with closing(_alchemy(url, "pg8000").raw_connection()) as connection:
        yield connection.driver_connection


def _django(*, atomic: bool) -> Block:
    @asynccontextmanager
    async def block(url: str) -> AsyncIterator[Any]:
        if not django.conf.settings.configured:
            django.conf.settings.configure(USE_TZ=True)
            django.setup()
        if url.startswith("sqlite"):
            options: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///")}
        else:
            parts = {name.upper(): value for name, value in conninfo_to_dict(url).items()}
            options = {"ENGINE": "django.db.backends.postgresql", "NAME": parts.pop("DBNAME"), **parts}
        connections = django.db.connections
        connections.settings = connections.configure_settings({"default": options})
        connection = connections["default"]
        try:
            if atomic:
                with django.db.transaction.atomic():
                    connection.ensure_connection()
                    yield connection.connection
            else:
                connection.ensure_connection()
                yield connection.connection
        finally:
            connection.close()
            with suppress(AttributeError):
                del connections["default"]

    return block


POSTGRES: dict[str, tuple[Block, str]] = {
    "psycopg: `with psycopg.connect(url) as tx:`": (_block(psycopg.connect), JOINS),
    "psycopg: `with pool.connection() as tx:`": (_pool, JOINS),
    "psycopg: `autocommit=True`, `with tx.transaction():`": (
        _block(lambda url: psycopg.connect(url, autocommit=True), lambda tx: tx.transaction()),
        JOINS,
    ),
    "psycopg: `autocommit=True`": (_block(lambda url: psycopg.connect(url, autocommit=True)), OWN),
    "psycopg, async: `async with await psycopg.AsyncConnection.connect(url) as tx:`": (
        _async_block(psycopg.AsyncConnection.connect),
        JOINS,
    ),
    "psycopg, async: `autocommit=True`": (
        _async_block(lambda url: psycopg.AsyncConnection.connect(url, autocommit=True)),
        OWN,
    ),
    "SQLAlchemy: `with engine.begin() as tx:`": (_block(lambda url: _alchemy(url, "psycopg").begin()), JOINS),
    "SQLAlchemy: `with engine.connect() as tx:`": (_block(lambda url: _alchemy(url, "psycopg2").connect()), JOINS),
    "SQLAlchemy: `with Session(engine) as tx:`": (_block(lambda url: orm.Session(_alchemy(url, "pg8000"))), JOINS),
    "SQLAlchemy: `with sessionmaker(engine).begin() as tx:`": (
        _block(lambda url: orm.sessionmaker(_alchemy(url, "psycopg")).begin()),
        JOINS,
    ),
    "SQLAlchemy: `Session(engine, autobegin=False)`": (
        _block(lambda url: orm.Session(_alchemy(url, "psycopg"), autobegin=False)),
        OWN,
    ),
    'SQLAlchemy: `isolation_level="AUTOCOMMIT"`': (
        _block(lambda url: _alchemy(url, "psycopg", isolation_level="AUTOCOMMIT").connect()),
        "ValueError",
    ),
    "SQLAlchemy, async: `async with engine.begin() as tx:`": (
        _async_block(lambda url: _async_alchemy(url, "asyncpg").begin()),
        JOINS,
    ),
    "SQLAlchemy, async: `async with AsyncSession(engine) as tx:`": (
        _async_block(lambda url: sa_asyncio.AsyncSession(_async_alchemy(url, "asyncpg"))),
        JOINS,
    ),
    "Django: `with atomic():`, `tx=connection.connection`": (_django(atomic=True), JOINS),
    "Django: `tx=connection.connection`": (_django(atomic=False), OWN),
    "`psycopg2.connect(url)`": (_block(psycopg2.connect), "TypeError"),
    "`pg8000.connect(…)`": (
        _pg8000,
        "TypeError",
    ),
    "`asyncpg.connect(url)`": (_async_block(lambda url: _closing(asyncpg.connect(url))), "TypeError"),
}
SQLITE: dict[str, tuple[Block, str]] = {
    "sqlite3: `with sqlite3.connect(path) as tx:`": (_block(lambda url: closing(_file(url)), _in_file), JOINS),
    "sqlite3: `isolation_level=None`, after `begin`": (
        _block(lambda url: _begun(_file(url, isolation_level=None)), _in_file),
        JOINS,
    ),
    "sqlite3: `isolation_level=None`": (_block(lambda url: closing(_file(url, isolation_level=None))), OWN),
    "SQLAlchemy: `with Session(engine) as tx:`": (_block(lambda url: orm.Session(_alchemy(url, "pysqlite"))), JOINS),
    "SQLAlchemy, async: `async with AsyncSession(engine) as tx:`": (
        _async_block(lambda url: sa_asyncio.AsyncSession(_async_alchemy(url, "aiosqlite"))),
        JOINS,
    ),
    "Django: `with atomic():`, `tx=connection.connection`": (_django(atomic=True), JOINS),
    "Django: `tx=connection.connection`": (_django(atomic=False), OWN),
    "`aiosqlite.connect(path)`": (_async_block(lambda url: _closing(aiosqlite.connect(url[10:]))), "TypeError"),
}
if hasattr(sqlite3, "LEGACY_TRANSACTION_CONTROL"):  # since Python 3.12
    SQLITE["sqlite3: `with sqlite3.connect(path, autocommit=False) as tx:`"] = (
        _block(lambda url: closing(_file(url, autocommit=False)), _in_file),
        JOINS,
    )
    SQLITE["sqlite3: `autocommit=True`"] = (_block(lambda url: closing(_file(url, autocommit=True))), OWN)
NEW_IN_312 = ("sqlite3: `with sqlite3.connect(path, autocommit=False) as tx:`", "sqlite3: `autocommit=True`")
ROWS = [("postgres", row) for row in POSTGRES] + [("sqlite", row) for row in SQLITE]


class Broken(Exception):
    pass


@pytest.mark.parametrize(("engine", "row"), ROWS, ids=[f"{engine}-{row}" for engine, row in ROWS])
async def test_an_error_after_the_operation_undoes_it_exactly_where_the_block_owns_the_commit(
    engine: str, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # the test runs on a loop, also where nothing is awaited
    block, expected = (POSTGRES if engine == "postgres" else SQLITE)[row]
    url = shared_postgres() if engine == "postgres" else migrated_file(tmp_path / "app.db")
    table, is_async = make_table(url), ", async" in row or row.startswith(("`asyncpg", "`aiosqlite"))
    client: Any = (holdfast.AsyncClient if is_async else holdfast.Client)(url)

    async def run(name: str, tx: Any) -> Any:
        sql: Any = f"insert into {table} values ('{name}')"
        sql = sqlalchemy.text(sql) if row.startswith("SQLAlchemy") else sql

        async def awaited() -> None:
            await tx.execute(sql)

        function = awaited if is_async else lambda: tx.execute(sql) and None
        return await settled(client.operation(name, tx=tx).run(function))

    try:
        failed, done = key(), key()
        if expected not in (JOINS, OWN):
            async with block(url) as tx:
                with pytest.raises({"TypeError": TypeError, "ValueError": ValueError}[expected]):
                    await run(failed, tx)
            assert logged(url, failed) == []
            return
        with suppress(Broken):
            async with block(url) as tx:
                assert (await run(failed, tx)).committed == (expected == OWN)
                raise Broken
        assert bool(logged(url, failed)) == bool(ask(url, f"select * from {table}")) == (expected == OWN)
        async with block(url) as tx:
            assert (await run(done, tx)).committed == (expected == OWN)
            if any(plain in row for plain in (".connect() as tx", "Session(engine) as tx")):
                await settled(tx.commit())  # these blocks do not commit
        assert logged(url, done) == [("success", 1)]
        assert ask(url, f"select count(*) from {table} where what = '{done}'") == [(1,)]
    finally:
        await settled(client.close())


def test_the_table_of_the_docs_has_these_rows() -> None:
    lines = DOCS.read_text().partition("| Connection and block |")[2].partition("\n\n")[0].splitlines()[2:]
    table = dict(line.strip("| ").split(" | ", 1) for line in lines)
    rows = {row: expected for kinds in (POSTGRES, SQLITE) for row, (_, expected) in kinds.items()}
    rows |= {NEW_IN_312[0]: JOINS, NEW_IN_312[1]: OWN}
    assert {name: effect.split(",")[0].split(":")[0].strip("`") for name, effect in table.items()} == rows
