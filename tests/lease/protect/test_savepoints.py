"""A savepoint rolled back must not take the protection with it: refused inside one, kept through one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import holdfast
from holdfast import EngineError, FencedOut
from tests.conftest import MAJORS, NEWEST, fresh
from tests.user_connections import ask, make_table, shared_postgres

FORMS = pytest.mark.parametrize("at", ["start", "commit"])
EXPIRE = """
update holdfast.beat set expires_at = clock_timestamp() where id = (select beat from holdfast.lease where name = %s)
"""
_urls: dict[int, str] = {}


PLACES = [
    (NEWEST, psycopg.IsolationLevel.READ_COMMITTED),
    (MAJORS[0], psycopg.IsolationLevel.REPEATABLE_READ),
    (NEWEST, psycopg.IsolationLevel.SERIALIZABLE),
]
"""Every isolation level, because what a takeover is told apart by differs in each; and every version, because how a row
shows who has locked it is the server's own business."""


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{place[1].name.lower()}")
def place(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def url(place: tuple[int, psycopg.IsolationLevel]) -> str:
    if place[0] not in _urls:
        _urls[place[0]] = fresh(place[0])
    return _urls[place[0]]


@pytest.fixture
def grant(url: str) -> Iterator[Any]:
    with holdfast.Client(url) as client:
        yield client.lease(f"lease-{secrets.token_hex(4)}").acquire()


@pytest.fixture
def connection(place: tuple[int, psycopg.IsolationLevel], url: str, grant: Any) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url) as made:
        made.isolation_level = place[1]
        yield made
        made.rollback()


def supersede(url: str, grant: Any) -> bool:
    """Whether somebody else could have it at once."""
    with psycopg.connect(url, autocommit=True) as operator:
        operator.execute(EXPIRE, [grant.name])
        row = operator.execute("select status from holdfast.lease_acquire(%s, 'thief', 30)", [grant.name]).fetchone()
        assert row is not None
        return bool(row[0] == "taken_over")


@FORMS
def test_protect_is_refused_inside_a_savepoint(connection: psycopg.Connection[Any], grant: Any, at: Any) -> None:
    """And taken once the savepoint is gone."""
    connection.execute("savepoint a")
    with pytest.raises(EngineError, match="savepoint"):
        grant.protect(connection, at=at)
    connection.execute("rollback to a")
    connection.execute("release a")
    assert grant.protect(connection, at=at) == grant.fence


@FORMS
def test_protect_is_refused_inside_a_savepoint_that_has_written(
    connection: psycopg.Connection[Any], grant: Any, at: Any
) -> None:
    connection.execute("create temp table a (b int)")
    connection.execute("savepoint a")
    connection.execute("insert into a values (1)")
    connection.execute("savepoint b")
    with pytest.raises(EngineError, match="savepoint"):
        grant.protect(connection, at=at)


@FORMS
def test_protect_is_refused_inside_a_savepoint_while_others_protect_the_same_lease(
    url: str, connection: psycopg.Connection[Any], grant: Any, at: Any
) -> None:
    """The row then shows a group of lockers instead of one; each of them may still protect outside of savepoints."""
    with ExitStack() as others:
        for _ in range(3):
            grant.protect(others.enter_context(psycopg.connect(url)))
        connection.execute("savepoint a")
        with pytest.raises(EngineError, match="savepoint"):
            grant.protect(connection, at=at)
        connection.rollback()
        assert grant.protect(connection, at=at) == grant.fence


def test_the_lock_taken_at_start_survives_a_savepoint_rolled_back(
    url: str, connection: psycopg.Connection[Any], grant: Any
) -> None:
    grant.protect(connection)
    connection.execute("savepoint a")
    connection.execute("rollback to a")
    assert not supersede(url, grant)
    connection.commit()
    assert supersede(url, grant)


def test_the_check_at_commit_survives_a_savepoint_rolled_back(
    url: str, connection: psycopg.Connection[Any], grant: Any
) -> None:
    table = make_table(url)
    grant.protect(connection, at="commit")
    connection.execute("savepoint a")
    connection.execute("rollback to a")
    connection.execute(f"insert into {table} values ('stale')".encode())
    assert supersede(url, grant)
    with pytest.raises(FencedOut):
        connection.commit()
    assert ask(url, f"select * from {table}") == []


@FORMS
def test_constraints_made_immediate_do_not_lift_the_check(
    url: str, connection: psycopg.Connection[Any], grant: Any, at: Any
) -> None:
    """SET CONSTRAINTS runs the check before its time: then the lock it took stays until the end."""
    grant.protect(connection, at=at)
    connection.execute("set constraints all immediate")
    assert not supersede(url, grant)
    connection.commit()


def test_constraints_made_immediate_in_a_savepoint_rolled_back_are_checked_again(
    url: str, connection: psycopg.Connection[Any], grant: Any
) -> None:
    grant.protect(connection, at="commit")
    connection.execute("savepoint a")
    connection.execute("set constraints all immediate")
    connection.execute("rollback to a")
    assert supersede(url, grant)
    with pytest.raises(FencedOut):
        connection.commit()


@FORMS
def test_a_nested_block_of_psycopg_is_a_savepoint(connection: psycopg.Connection[Any], grant: Any, at: Any) -> None:
    with connection.transaction():
        with pytest.raises(ValueError, match="already open"), grant.transaction(connection, at=at):
            raise AssertionError
        grant.protect(connection, at=at)
        with connection.transaction(force_rollback=True):
            connection.execute("select 1")
    with connection.transaction(), pytest.raises(EngineError, match="savepoint"), connection.transaction():
        grant.protect(connection, at=at)


@FORMS
@pytest.mark.parametrize("place", PLACES[:1], indirect=True, ids=["newest"])
def test_a_nested_transaction_of_sqlalchemy_is_a_savepoint(url: str, grant: Any, at: Any) -> None:
    engine = sqlalchemy.create_engine(url.replace("://", "+psycopg://", 1), poolclass=NullPool)
    with engine.connect() as connection:
        with pytest.raises(EngineError, match="savepoint"), connection.begin_nested():
            grant.protect(connection, at=at)
        connection.rollback()
        with grant.transaction(connection, at=at), connection.begin_nested() as inner:
            inner.rollback()


def test_on_sqlite_a_nested_transaction_of_sqlalchemy_may_be_the_whole_one(sqlite_url: str) -> None:
    """Its driver begins with the first write, so a savepoint before that is the transaction, which its end commits: and
    what comes after it in the block is in another one."""
    engine, table = sqlalchemy.create_engine(sqlite_url, poolclass=NullPool), make_table(sqlite_url)
    with holdfast.Client(sqlite_url) as client, engine.connect() as connection:
        grant = client.lease("job").acquire()
        with pytest.raises(EngineError, match="savepoint"), connection.begin_nested():
            grant.protect(connection)
        connection.rollback()
        with grant.transaction(connection):
            with connection.begin_nested():
                connection.execute(sqlalchemy.text(f"insert into {table} values ('done')"))
            assert ask(sqlite_url, f"select * from {table}") == []
    assert ask(sqlite_url, f"select * from {table}") == [("done",)]


@FORMS
async def test_a_nested_transaction_of_asyncpg_is_a_savepoint(at: Any) -> None:
    url = shared_postgres()
    engine = create_async_engine(url.replace("://", "+asyncpg://", 1), poolclass=NullPool)
    async with holdfast.AsyncClient(url) as client, engine.connect() as connection:
        grant = await client.lease(f"lease-{secrets.token_hex(4)}").acquire()
        inner = await connection.begin_nested()
        with pytest.raises(EngineError, match="savepoint"):
            await grant.protect(connection, at=at)
        await inner.rollback()
        await connection.rollback()
        async with grant.transaction(connection, at=at):
            await (await connection.begin_nested()).rollback()


def test_on_sqlite_a_savepoint_rolled_back_leaves_the_only_writer_alone(tmp_path: Path) -> None:
    """There protecting is writing, and the right to write is kept until the transaction ends."""
    import sqlite3

    path = tmp_path / "app.db"
    with holdfast.Client(f"sqlite:///{path}") as client:
        grant = client.lease("job").acquire()
        mine, other = (sqlite3.connect(path, isolation_level=None, timeout=0) for _ in range(2))
        mine.execute("begin")
        mine.execute("savepoint a")
        grant.protect(mine)
        mine.execute("rollback to a")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("begin immediate")
        mine.execute("commit")
        other.execute("begin immediate")
        mine.close()
        other.close()
