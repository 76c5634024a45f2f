"""What cannot be protected is said before anything happens; however a connection is set up, what can be is."""

from __future__ import annotations

import logging
import secrets
import sqlite3
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg import rows
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import holdfast
from holdfast import EngineError, FencedOut
from tests.conftest import fresh, server
from tests.user_connections import ask, make_table

FORMS = pytest.mark.parametrize("at", ["start", "commit"])


@pytest.fixture
def grant(url: str) -> Iterator[Any]:
    with holdfast.Client(url) as client:
        yield client.lease(f"lease-{secrets.token_hex(4)}").acquire()


@pytest.fixture
def sqlite_grant(sqlite_url: str) -> Iterator[Any]:
    with holdfast.Client(sqlite_url) as client:
        yield client.lease("job").acquire()


def refused(grant: Any, connection: Any, error: type[Exception] | tuple[type[Exception], ...], match: str) -> None:
    """Both ways of protecting, both forms."""
    for at in ("start", "commit"):
        with pytest.raises(error, match=match):
            grant.protect(connection, at=at)
        if isinstance(connection, sqlalchemy.Connection | psycopg.Connection) and not connection.closed:
            connection.rollback()
        with pytest.raises(error, match=match), grant.transaction(connection, at=at):
            raise AssertionError


@dataclass
class Record:
    """For class_row: it takes nothing that is called fence."""

    what: str


@FORMS
@pytest.mark.parametrize(
    "factory",
    [rows.tuple_row, rows.dict_row, rows.scalar_row, rows.namedtuple_row, rows.class_row(Record)],
    ids=lambda factory: factory.__name__,
)
def test_any_row_factory_will_do(url: str, grant: Any, at: Any, factory: Any) -> None:
    with psycopg.connect(url, row_factory=factory) as connection:
        assert grant.protect(connection, at=at) == grant.fence


@FORMS
@pytest.mark.parametrize("factory", [psycopg.ClientCursor, psycopg.RawCursor])
def test_any_cursor_factory_will_do(url: str, grant: Any, at: Any, factory: Any) -> None:
    with psycopg.connect(url, cursor_factory=factory) as connection:
        assert grant.protect(connection, at=at) == grant.fence


def test_any_row_factory_of_sqlite_will_do(sqlite_url: str, sqlite_grant: Any) -> None:
    connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    connection.row_factory = lambda cursor, row: {cursor.description[0][0]: row[0]}
    assert sqlite_grant.protect(connection) == sqlite_grant.fence
    connection.close()


@FORMS
def test_a_pipeline_is_protected_as_anything_else(url: str, grant: Any, at: Any) -> None:
    table = make_table(url)
    with psycopg.connect(url) as connection, connection.pipeline():
        connection.execute(f"insert into {table} values ('first')".encode())
        assert grant.protect(connection, at=at) == grant.fence
    with psycopg.connect(url, autocommit=True) as other, other.pipeline(), grant.transaction(other, at=at):
        other.execute(f"insert into {table} values ('second')".encode())
    assert len(ask(url, f"select * from {table}")) == 2


@FORMS
def test_an_autocommit_connection_needs_a_transaction(url: str, grant: Any, at: Any) -> None:
    """In a pipeline too, where statements that commit themselves are still under way."""
    with psycopg.connect(url, autocommit=True) as connection:
        with pytest.raises(ValueError, match=r"no transaction is open.*grant\.transaction"):
            grant.protect(connection, at=at)
        with connection.pipeline():
            connection.execute("select 1")
            with pytest.raises(ValueError, match="no transaction is open"):
                grant.protect(connection, at=at)
        with connection.transaction():
            assert grant.protect(connection, at=at) == grant.fence
        with grant.transaction(connection, at=at):
            connection.execute("select 1")


def test_a_sqlite_connection_without_transactions_needs_one(sqlite_url: str, sqlite_grant: Any) -> None:
    connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    with pytest.raises(ValueError, match=r"no transaction is open.*grant\.transaction"):
        sqlite_grant.protect(connection)
    connection.close()


def test_a_statement_that_ends_the_transaction_of_a_block_is_told(url: str, grant: Any) -> None:
    with (
        psycopg.connect(url, autocommit=True) as connection,
        pytest.raises(RuntimeError, match="ended inside its block"),
        grant.transaction(connection),
    ):
        connection.execute("commit")
    grant.check()


def test_a_block_in_which_a_statement_has_failed_is_not_told_as_committed(url: str, grant: Any) -> None:
    """Whoever swallows the error would be told that all went well: the server answers that COMMIT, and rolls back."""
    broken, table = pytest.raises(RuntimeError, match=r"has failed.*savepoint"), make_table(url)
    with psycopg.connect(url) as connection, broken, grant.transaction(connection):
        connection.execute(f"insert into {table} values ('lost')".encode())
        with suppress(psycopg.Error):
            connection.execute("select 1 / 0")
    engine = sqlalchemy.create_engine(driver(url, "psycopg"), poolclass=NullPool)
    with engine.connect() as alchemy, broken, grant.transaction(alchemy), suppress(sqlalchemy.exc.DataError):
        alchemy.execute(sqlalchemy.text("select 1 / 0"))
    with psycopg.connect(url) as connection, grant.transaction(connection):
        connection.execute(f"insert into {table} values ('kept')".encode())
        with suppress(psycopg.Error), connection.transaction():
            connection.execute("select 1 / 0")
    assert ask(url, f"select * from {table}") == [("kept",)]


@pytest.mark.parametrize(
    "end",
    [
        sqlite3.Connection.commit,
        lambda file: file.executescript("select 1"),
        lambda file: file.__exit__(None, None, None),
    ],
    ids=["commit", "executescript", "with"],
)
def test_a_block_that_has_ended_its_transaction_on_sqlite_commits_nothing_more(
    sqlite_url: str, sqlite_grant: Any, end: Callable[[sqlite3.Connection], object]
) -> None:
    """What came after the end was protected by nobody."""
    table = make_table(sqlite_url)

    def write_after_the_end() -> None:
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as file, sqlite_grant.transaction(file):
            end(file)
            file.execute(f"insert into {table} values ('unprotected')")

    with pytest.raises(RuntimeError, match="ended inside its block"):
        write_after_the_end()
    assert ask(sqlite_url, f"select * from {table}") == []
    sqlite_grant.check()


def test_autocommit_of_sqlalchemy_is_no_transaction(url: str, grant: Any) -> None:
    """It says that one is open, and commits every statement by itself: nothing would be protected."""
    for engine in (
        sqlalchemy.create_engine(driver(url, "psycopg"), poolclass=NullPool, isolation_level="AUTOCOMMIT"),
        sqlalchemy.create_engine(driver(url, "psycopg"), poolclass=NullPool).execution_options(
            isolation_level="AUTOCOMMIT"
        ),
    ):
        with engine.connect() as connection:
            refused(grant, connection, ValueError, "autocommit")


def test_autocommit_of_sqlalchemy_on_sqlite_is_no_transaction(sqlite_url: str, sqlite_grant: Any) -> None:
    engine = sqlalchemy.create_engine(sqlite_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        refused(sqlite_grant, connection, ValueError, "autocommit")


async def test_autocommit_of_asyncpg_is_no_transaction(url: str) -> None:
    engine = create_async_engine(driver(url, "asyncpg"), poolclass=NullPool, isolation_level="AUTOCOMMIT")
    async with holdfast.AsyncClient(url) as client, engine.connect() as connection:
        grant = await client.lease(f"lease-{secrets.token_hex(4)}").acquire()
        with pytest.raises(ValueError, match="autocommit"):
            await grant.protect(connection)


def test_what_is_no_connection_is_told_what_would_be_one(url: str, grant: Any) -> None:
    for wrong in (None, url, object(), 7):
        refused(grant, wrong, TypeError, r"give a Connection of psycopg.*SQLAlchemy.*sqlite3\.Connection")
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        refused(grant, cursor, TypeError, r"psycopg.*Cursor: give a Connection")
    refused(grant, sqlalchemy.create_engine(driver(url, "psycopg")), TypeError, r"Engine: give a Connection")


async def test_each_flavour_takes_the_connections_of_its_own(url: str, grant: Any) -> None:
    connection, later = psycopg.connect(url), await psycopg.AsyncConnection.connect(url)
    refused(grant, later, TypeError, "AsyncConnection: give a Connection")
    async_engine = create_async_engine(driver(url, "asyncpg"), poolclass=NullPool)
    async with async_engine.connect() as theirs, holdfast.AsyncClient(url) as client:
        refused(grant, theirs, TypeError, "AsyncConnection: give a Connection")
        async_grant = await client.lease(f"lease-{secrets.token_hex(4)}").acquire()
        with pytest.raises(TypeError, match="Connection: give an AsyncConnection"):
            await async_grant.protect(connection)
        with pytest.raises(TypeError, match="Connection: give an AsyncConnection"):
            async with async_grant.transaction(connection):
                raise AssertionError
    connection.close()
    await later.close()


def test_a_closed_connection_is_told_as_such(url: str, grant: Any, sqlite_url: str, sqlite_grant: Any) -> None:
    connection = psycopg.connect(url)
    connection.close()
    refused(grant, connection, (EngineError, psycopg.OperationalError), "closed")
    file = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    file.close()
    refused(sqlite_grant, file, (EngineError, sqlite3.ProgrammingError), "closed")


def test_a_transaction_in_another_kind_of_database_is_refused(
    url: str, grant: Any, sqlite_url: str, sqlite_grant: Any
) -> None:
    with psycopg.connect(url) as connection:
        refused(sqlite_grant, connection, ValueError, "the lease is in sqlite")
    file = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    refused(grant, file, ValueError, "the lease is in postgres")
    file.close()
    with sqlalchemy.create_engine(sqlite_url, poolclass=NullPool).connect() as alchemy:
        refused(grant, alchemy, ValueError, "a transaction of sqlite cannot")


def test_a_transaction_in_another_file_is_refused(tmp_path: Path, sqlite_grant: Any) -> None:
    other = f"sqlite:///{tmp_path / 'other.db'}"
    with holdfast.Client(other) as client:
        client.leases.list()
    for path in (str(tmp_path / "other.db"), ":memory:"):
        file = sqlite3.connect(path)
        refused(sqlite_grant, file, ValueError, "only a transaction in the same file")
        file.close()
    with sqlalchemy.create_engine(other, poolclass=NullPool).connect() as alchemy:
        refused(sqlite_grant, alchemy, ValueError, "only a transaction in the same file")


def test_a_transaction_in_another_database_is_refused(grant: Any) -> None:
    """With holdfast's tables or without them."""
    for other in (fresh(), server().database()):
        with psycopg.connect(other) as connection:
            with pytest.raises((FencedOut, EngineError), match=grant.name):
                grant.protect(connection)
            connection.rollback()


def aborted(connection: sqlalchemy.Connection) -> None:
    with pytest.raises(sqlalchemy.exc.DBAPIError):
        connection.execute(sqlalchemy.text("select 1 / 0"))


def in_savepoint(connection: sqlalchemy.Connection) -> None:
    connection.begin()
    connection.begin_nested()


@FORMS
@pytest.mark.parametrize("name", ["psycopg", "psycopg2", "pg8000"])
@pytest.mark.parametrize("spoil", [aborted, in_savepoint, None], ids=["aborted", "savepoint", "no tables"])
def test_no_traceback_shows_the_token(url: str, grant: Any, at: Any, name: str, spoil: Any) -> None:
    """It is a secret, and SQLAlchemy likes to show parameters; whatever a log prints of the error is free of it."""
    engine = sqlalchemy.create_engine(driver(url if spoil else server().database(), name), poolclass=NullPool)
    with engine.connect() as connection:
        if spoil:
            spoil(connection)
        with pytest.raises(EngineError, match=f"cannot protect the transaction with lease {grant.name!r}") as told:
            grant.protect(connection, at=at)
    assert grant.token not in "".join(traceback.format_exception(told.value))
    assert told.value.__context__ is None
    assert type(told.value.__cause__).__module__.partition(".")[0] == name


@pytest.mark.parametrize("name", ["psycopg", "psycopg2", "pg8000"])
def test_no_log_of_sqlalchemy_shows_the_token(
    url: str, grant: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = sqlalchemy.create_engine(driver(url, name), poolclass=NullPool, echo="debug")
    with engine.connect() as connection, grant.transaction(connection):
        connection.execute(sqlalchemy.text("select 1"))
    assert grant.name in caplog.text
    assert grant.token not in caplog.text


def test_no_traceback_of_a_race_shows_the_token(url: str, grant: Any) -> None:
    """Refused by a serialization failure, because the lease has passed on since the snapshot was taken."""
    engine = sqlalchemy.create_engine(driver(url, "psycopg"), poolclass=NullPool, isolation_level="REPEATABLE READ")
    with engine.connect() as connection, holdfast.Client(url) as operator:
        connection.execute(sqlalchemy.text("select 1 from holdfast.lease limit 1"))
        operator.leases.force_release(grant.name, actor="test", reason="superseded")
        with pytest.raises(FencedOut) as told:
            grant.protect(connection)
    assert grant.token not in "".join(traceback.format_exception(told.value))
    assert isinstance(told.value.__cause__, psycopg.errors.SerializationFailure)


@FORMS
def test_a_role_that_may_only_use_and_execute_can_protect(url: str, at: Any) -> None:
    """And without that it is told what it needs."""
    role, table = f"role_{secrets.token_hex(4)}", make_table(url)
    ask(url, f"create role {role} login")
    ask(url, f"grant insert on {table} to {role}")
    theirs = url.replace("postgres@", f"{role}@")
    with holdfast.Client(theirs) as client, psycopg.connect(theirs) as connection:
        with pytest.raises(EngineError, match="GRANT USAGE ON SCHEMA holdfast"):
            client.lease(role).acquire()
        ask(url, f"grant usage on schema holdfast to {role}")
        ask(url, f"grant execute on all functions in schema holdfast to {role}")
        grant = client.lease(role).acquire()
        with grant.transaction(connection, at=at):
            connection.execute(f"insert into {table} values ('done')".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select * from holdfast.lease")
        connection.rollback()
        with holdfast.Client(url) as operator:
            operator.leases.force_release(role, actor="test", reason="over")
        refused(grant, connection, FencedOut, role)
        connection.rollback()
    assert ask(url, f"select * from {table}") == [("done",)]


def driver(url: str, name: str) -> str:
    return url.replace("://", f"+{name}://", 1)
