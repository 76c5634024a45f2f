"""Functions that end the transaction which they run in, although that is not theirs to end."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

import holdfast
from tests.operations.user_connections import key, logged, opened, work
from tests.user_connections import ask, settled


def test_a_function_that_commits_by_itself_and_then_fails_is_not_called_again(postgres_url: str) -> None:
    """What it committed is there; to call that a failure would be to do it twice."""
    ask(postgres_url, "create table work (what int)")
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:

        def effect(sql: str) -> None:
            mine.execute("insert into work values (1)")
            mine.execute(sql)
            raise ConnectionError("nobody answers")  # which would be tried again otherwise

        for number, sql in enumerate(("commit", "commit; begin; select 1")):
            for joins in (False, True):
                if joins:
                    mine.execute("select 1")
                operation = client.operation(f"{number}-{joins}", tx=mine)
                with pytest.raises(ConnectionError):
                    operation.run(effect, sql)
                mine.rollback()
                with pytest.raises(holdfast.OperationFailed, match="half done"):
                    operation.run(effect, sql)
                mine.rollback()
        assert client.operations.verify().passed
    assert ask(postgres_url, "select count(*) from work") == [(4,)]


def test_a_function_that_commits_by_itself_is_found_out(postgres_url: str) -> None:
    """Else the effect would be there, and that it is would not be known if we died in between."""
    with holdfast.Client(postgres_url) as client:
        for autocommit in (False, True):
            with psycopg.connect(postgres_url, autocommit=autocommit) as mine:
                for end in (mine.commit, mine.rollback):
                    with pytest.raises(psycopg.ProgrammingError, match="forbidden within a Transaction"):
                        client.operation(key(), tx=mine).run(end)
                    mine.rollback()
                for sql in (b"commit", b"rollback"):
                    with pytest.raises(psycopg.Error, match=r"the transaction in which .* began has ended"):
                        client.operation(key(), tx=mine).run(lambda sql=sql, mine=mine: mine.execute(sql).close())
                    mine.rollback()
                assert client.operation(key(), tx=mine).run(lambda: 1).committed == autocommit
                mine.commit()
                assert mine.info.transaction_status.name == "IDLE"


@pytest.mark.parametrize("kind", ["psycopg", "session-psycopg", "connection-asyncpg-async"])
@pytest.mark.parametrize("joins", [False, True])
async def test_a_function_that_commits_by_itself_is_told_and_not_called_again(
    kind: str, joins: bool, tmp_path: Path
) -> None:
    """What it wrote is there, although the log could not be written with it."""
    async with opened(kind, tmp_path) as each:
        name, writes = key(), work(each, "x")

        def commit() -> Any:
            return each.connection.execute("commit") if kind == "psycopg" else each.connection.commit()

        def plain() -> None:
            writes()
            commit()

        async def awaited() -> None:
            await writes()
            await commit()

        function = awaited if isinstance(each.client, holdfast.AsyncClient) else plain
        for error, told in (
            (Exception, "has ended the transaction|began has ended"),
            (holdfast.OperationFailed, "half done"),
        ):
            if joins:
                await each.run("select 1")
            with pytest.raises(error, match=told):
                await settled(each.client.operation(name, tx=each.connection).run(function))
            await each.rollback()
        assert (each.rows(), logged(each.url, name)) == (["x"], [("partial", 1)])
        assert (await settled(each.client.operations.verify(name))).passed


@pytest.mark.parametrize("kind", ["session-psycopg", "connection-asyncpg-async", "session-pysqlite"])
async def test_one_that_commits_and_then_raises_is_told_from_one_that_rolls_back(kind: str, tmp_path: Path) -> None:
    """SQLAlchemy knows: what was committed is not done again, and what was rolled back is a failure like any other."""
    async with opened(kind, tmp_path) as each:
        writes = work(each, "x")

        def plain(end: str) -> None:
            writes()
            getattr(each.connection, end)()
            raise ConnectionError("nobody answers")

        async def awaited(end: str) -> None:
            await writes()
            await getattr(each.connection, end)()
            raise ConnectionError("nobody answers")

        function = awaited if isinstance(each.client, holdfast.AsyncClient) else plain
        for end, again, left in (("rollback", ConnectionError, []), ("commit", holdfast.OperationFailed, ["x"])):
            name = key()
            for error in (ConnectionError, again):
                with pytest.raises(error):
                    await settled(each.client.operation(name, tx=each.connection).run(function, end))
            assert each.rows() == left
            assert logged(each.url, name) == ([("partial", 1)] if left else [])
            assert (await settled(each.client.operations.verify(name))).passed


@pytest.mark.parametrize("manual", [False, True])
def test_a_function_that_commits_a_file_by_itself_and_writes_again_is_found_out(sqlite_url: str, manual: bool) -> None:
    """What it wrote before is there, and that it is would not be known: so it is told, and not done again."""
    path = sqlite_url.removeprefix("sqlite:///")
    ask(sqlite_url, "create table work (what int)")
    with holdfast.Client(sqlite_url) as client:
        client.operations.list()
        with closing(sqlite3.connect(path, isolation_level=None if manual else "DEFERRED")) as mine:

            def effect(again: bool) -> None:
                mine.execute("insert into work values (1)")
                mine.execute("commit")
                if again:
                    if manual:
                        mine.execute("begin")
                    mine.execute("insert into work values (2)")

            for again in (True, False):
                with pytest.raises(RuntimeError, match="has ended the transaction that it runs in"):
                    client.operation(f"{again}", tx=mine).run(effect, again)
                assert not mine.in_transaction
            client.operation("well", tx=mine).run(lambda: mine.execute("insert into work values (3)").close())
            mine.commit()
            mine.execute("begin")
            mine.execute("insert into work values (4)")
            with pytest.raises(RuntimeError, match="has ended the transaction that it runs in"):
                client.operation("joined", tx=mine).run(effect, True)
            mine.rollback()
        found = {each.label: each.status for each in client.operations.list()}
        assert found == {"True": "partial", "False": "partial", "well": "success"}
        assert client.operations.verify().passed
    assert ask(sqlite_url, "select what from work order by 1") == [(1,), (1,), (1,), (3,), (4,)]


def test_a_function_that_takes_back_more_than_its_own_is_not_recorded_as_done(sqlite_url: str) -> None:
    """Not even if its caller commits in spite of the error."""
    with holdfast.Client(sqlite_url) as client:
        client.operations.list()
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as mine:
            mine.execute("begin")
            mine.execute("savepoint mine")
            with pytest.raises(RuntimeError, match="has ended the transaction that it runs in"):
                client.operation("a", tx=mine).run(lambda: mine.execute("rollback to mine").close())
            mine.execute("commit")
        assert client.operations.get("a") is None


def test_the_same_with_sqlalchemy(sqlite_url: str) -> None:
    ask(sqlite_url, "create table work (what int)")
    engine = sqlalchemy.create_engine(sqlite_url)
    with holdfast.Client(sqlite_url) as client, engine.connect() as mine:
        client.operations.list()

        def effect() -> None:
            for sql in ("insert into work values (1)", "commit", "insert into work values (2)"):
                mine.execute(sqlalchemy.text(sql))

        with pytest.raises(RuntimeError, match="has ended the transaction that it runs in"):
            client.operation("a", tx=mine).run(effect)
    engine.dispose()
    assert ask(sqlite_url, "select what from work") == [(1,)]


def test_what_a_session_takes_back_is_not_recorded_as_done(either: str) -> None:
    """It keeps rows back until the end, and takes all back to the last savepoint when it cannot write one of them; a
    function that goes on after that has had no effect. That is a failure, and not what was left half done."""

    class Base(orm.DeclarativeBase): ...

    class Work(Base):
        __tablename__ = "work"
        what: orm.Mapped[int] = orm.mapped_column(primary_key=True)

    def write(session: orm.Session, *numbers: int) -> None:
        session.add_all([Work(what=number) for number in numbers])

    def go_on(session: orm.Session) -> None:
        write(session, 2)
        session.flush()
        write(session, 1)
        with suppress(sqlalchemy.exc.IntegrityError):
            session.flush()

    engine = sqlalchemy.create_engine(either.replace("postgresql:", "postgresql+psycopg:"))
    Base.metadata.create_all(engine)
    with holdfast.Client(either) as client, orm.Session(engine) as mine:
        client.operation("a", tx=mine).run(write, mine, 1)
        for joins in (False, True):
            if joins:
                mine.execute(sqlalchemy.text("select 1"))
            with pytest.raises(sqlalchemy.exc.IntegrityError):
                client.operation("b", tx=mine).run(write, mine, 2, 1)
            mine.commit()
            record = client.operations.get("b")
            assert record is not None
            assert (record.status, record.attempt) == ("failure", 1 + joins)
            with pytest.raises(Exception, match=r"has ended the transaction|has been rolled back"):
                client.operation(f"c{joins}", tx=mine).run(go_on, mine)
            mine.rollback()
        assert {each.label for each in client.operations.list(status="success")} == {"a"}
    engine.dispose()
    assert ask(either, "select what from work") == [(1,)]
