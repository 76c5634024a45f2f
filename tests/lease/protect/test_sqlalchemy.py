"""What is peculiar to SQLAlchemy; that its connections and sessions are protected at all is shown in test_protect."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import event, orm, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

import holdfast
from holdfast import FencedOut
from tests.user_connections import ask, make_table


@pytest.fixture
def engine(url: str) -> Iterator[sqlalchemy.Engine]:
    """With a pool of one connection: whatever is left on it meets the next."""
    made = sqlalchemy.create_engine(url.replace("://", "+psycopg://", 1), pool_size=1, max_overflow=0)
    yield made
    made.dispose()


def supersede(client: holdfast.Client, name: str) -> None:
    assert client.leases.force_release(name, actor="test", reason="superseded")


def new_name() -> str:
    return f"lease-{secrets.token_hex(4)}"


def mapped(table: str) -> Any:
    class Base(orm.DeclarativeBase):
        pass

    class Work(Base):
        __tablename__ = table
        what: orm.Mapped[str] = orm.mapped_column(primary_key=True)

    return Work


def test_what_a_session_flushes_when_it_commits_is_refused(
    url: str, client: holdfast.Client, engine: sqlalchemy.Engine
) -> None:
    """Its writes reach the database only inside commit(); and the pool gets a clean connection back."""
    table = make_table(url)
    work = mapped(table)
    grant = client.lease(new_name()).acquire()
    with orm.Session(engine) as session:
        grant.protect(session, at="commit")
        session.add(work(what="stale"))
        supersede(client, grant.name)
        with pytest.raises(FencedOut, match=grant.name):
            session.commit()
    grant = client.lease(grant.name).acquire()
    with orm.Session(engine) as session, grant.transaction(session, at="commit"):
        session.add(work(what="done"))
    assert ask(url, f"select what from {table}") == [("done",)]


def test_sessionmaker_begin_is_protected_inside(url: str, client: holdfast.Client, engine: sqlalchemy.Engine) -> None:
    """The block that commits is SQLAlchemy's own."""
    table = make_table(url)
    grant = client.lease(new_name()).acquire()

    def work() -> None:
        with orm.sessionmaker(engine).begin() as session:
            grant.protect(session, at="commit")
            session.execute(text(f"insert into {table} values ('stale')"))
            supersede(client, grant.name)

    with pytest.raises(FencedOut, match=grant.name):
        work()
    assert ask(url, f"select what from {table}") == []


def test_the_refusal_is_the_same_after_psycopg_was_used_directly(
    url: str, client: holdfast.Client, engine: sqlalchemy.Engine
) -> None:
    """There psycopg itself raises FencedOut, which SQLAlchemy would wrap into an error of its own."""
    grant = client.lease(new_name()).acquire()
    with psycopg.connect(url) as connection:
        grant.protect(connection, at="commit")
    with engine.connect() as alchemy:
        grant.protect(alchemy, at="commit")
        supersede(client, grant.name)
        with pytest.raises(FencedOut, match=grant.name):
            alchemy.commit()


def test_other_errors_of_the_engine_stay_what_they_were(client: holdfast.Client, engine: sqlalchemy.Engine) -> None:
    grant = client.lease(new_name()).acquire()
    with engine.connect() as connection:
        grant.protect(connection)
        with pytest.raises(sqlalchemy.exc.DataError, match="division"):
            connection.execute(text("select 1 / 0"))


def test_an_engine_is_taught_once(client: holdfast.Client, engine: sqlalchemy.Engine) -> None:
    """A listener for each transaction would make every engine slower for ever."""
    grant = client.lease(new_name()).acquire()

    def listeners() -> int:
        return len(list(engine.dialect.dispatch.handle_error))

    counts = []
    for _ in range(3):
        with engine.connect() as connection, grant.transaction(connection):
            counts.append(listeners())
    assert counts == [1, 1, 1]


def test_an_engine_with_options_of_its_own_is_taught_too(
    url: str, client: holdfast.Client, engine: sqlalchemy.Engine
) -> None:
    table = make_table(url)
    grant = client.lease(new_name()).acquire()
    with engine.execution_options(isolation_level="SERIALIZABLE").connect() as connection:
        grant.protect(connection, at="commit")
        connection.execute(text(f"insert into {table} values ('stale')"))
        supersede(client, grant.name)
        with pytest.raises(FencedOut):
            connection.commit()
    assert ask(url, f"select what from {table}") == []


def test_sqlite_whose_transactions_are_begun_by_hand_is_protected(sqlite_url: str) -> None:
    """The way SQLAlchemy's manual teaches: the driver in autocommit mode, and a BEGIN of one's own."""
    engine = sqlalchemy.create_engine(sqlite_url, poolclass=NullPool)
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("begin"))
    with holdfast.Client(sqlite_url) as client:
        grant = client.lease("job").acquire()
        table = make_table(sqlite_url)
        with engine.connect() as connection, grant.transaction(connection):
            connection.execute(text(f"insert into {table} values ('done')"))
        supersede(client, "job")
        with engine.connect() as connection, pytest.raises(FencedOut):
            grant.protect(connection)
    assert ask(sqlite_url, f"select what from {table}") == [("done",)]


async def test_run_sync_inside_an_async_session_is_part_of_the_transaction(url: str) -> None:
    table = make_table(url)
    work = mapped(table)
    engine = create_async_engine(url.replace("://", "+asyncpg://", 1), poolclass=NullPool)
    async with holdfast.AsyncClient(url) as client, AsyncSession(engine) as session:
        grant = await client.lease(new_name()).acquire()
        await grant.protect(session, at="commit")
        await session.run_sync(lambda inner: inner.add(work(what="stale")))
        await client.leases.force_release(grant.name, actor="test", reason="superseded")
        with pytest.raises(FencedOut, match=grant.name):
            await session.commit()
    assert ask(url, f"select what from {table}") == []


@pytest.mark.parametrize("at", ["start", "commit"])
def test_a_driver_that_writes_parameters_into_statements_writes_no_token(
    url: str, client: holdfast.Client, at: Any
) -> None:
    """Other sessions of the role can read the statement; in their transactions it proves nothing."""
    grant = client.lease(new_name()).acquire()
    engine = sqlalchemy.create_engine(url.replace("://", "+psycopg2://", 1), poolclass=NullPool)
    with engine.connect() as mine, psycopg.connect(url, autocommit=True) as other:
        assert grant.protect(mine, at=at) == grant.fence
        pid = mine.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
        [(statement,)] = other.execute("select query from pg_stat_activity where pid = %s", [pid]).fetchall()
        assert "lease_protect" in statement
        assert grant.token not in statement
        with pytest.raises(FencedOut), other.transaction():
            other.execute(statement.encode())
    engine.dispose()
