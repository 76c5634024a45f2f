"""holdfast.row_lock: a row for one worker at a time, in the worker's own transaction, at once or not at all."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, assert_type

import psycopg
import pytest
import sqlalchemy
from psycopg import sql
from psycopg.rows import tuple_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import holdfast
from tests.children import PATIENCE

Connect = Callable[[], Any]
NOTHING: Any = object()


@pytest.fixture
def summaries(postgres_url: str) -> str:
    with psycopg.connect(postgres_url, autocommit=True) as database:
        database.execute("create table summary (id int primary key, text text)")
        database.execute("insert into summary values (7, null), (8, 'done')")
    return postgres_url


def as_sqlalchemy(url: str, driver: str = "psycopg") -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")


@pytest.fixture(params=["psycopg", "sqlalchemy", "session"])
def connect(request: pytest.FixtureRequest, summaries: str) -> Iterator[Connect]:
    """Connections of each kind that begin a transaction by themselves."""
    with ExitStack() as stack:
        if request.param == "psycopg":
            yield lambda: stack.enter_context(psycopg.connect(summaries, row_factory=tuple_row))
        else:
            engine = sqlalchemy.create_engine(as_sqlalchemy(summaries))
            stack.callback(engine.dispose)
            make: Any = engine.connect if request.param == "sqlalchemy" else lambda: Session(engine)
            yield lambda: stack.enter_context(make())


def run(connection: Any, statement: str) -> Any:
    if isinstance(connection, psycopg.Connection):
        return connection.execute(statement.encode())
    return connection.execute(sqlalchemy.text(statement))


def test_whoever_comes_second_gets_none_at_once_and_later_the_value(connect: Connect) -> None:
    first, second = connect(), connect()
    assert holdfast.row_lock(first, "summary", id=7) == {"id": 7, "text": None}
    assert holdfast.row_lock(second, "summary", id=7) is None
    assert holdfast.row_lock(second, "public.summary", id=8) == {"id": 8, "text": "done"}
    run(first, "update summary set text = 'short' where id = 7")
    assert holdfast.row_lock(second, "summary", id=7) is None
    first.commit()
    assert holdfast.row_lock(second, "summary", id=7) == {"id": 7, "text": "short"}


def test_a_refusal_does_not_spoil_the_transaction_it_happens_in(connect: Connect) -> None:
    """PostgreSQL ends a transaction with the first error: what was done in it before must not go with it."""
    first, second = connect(), connect()
    holdfast.row_lock(first, "summary", id=7)
    run(second, "insert into summary values (9, 'kept')")
    assert holdfast.row_lock(second, "summary", id=7) is None
    with pytest.raises(LookupError, match=r"no row in summary with id=5"):
        holdfast.row_lock(second, "summary", id=5)
    second.commit()
    assert run(first, "select text from summary where id = 9").fetchall() == [("kept",)]


def test_the_lock_lasts_until_the_transaction_ends_however_it_ends(connect: Connect) -> None:
    first, second = connect(), connect()
    for end in (first.commit, first.rollback):
        assert holdfast.row_lock(first, "summary", id=7) is not None
        assert holdfast.row_lock(first, "summary", id=7) is not None, "whoever has it may ask again"
        assert holdfast.row_lock(second, "summary", id=7) is None
        end()
        assert holdfast.row_lock(second, "summary", id=7) is not None
        second.rollback()


def test_without_a_transaction_it_is_refused_because_nothing_would_be_locked(summaries: str) -> None:
    with psycopg.connect(summaries, autocommit=True) as connection:
        with pytest.raises(ValueError, match="no transaction is open"):
            holdfast.row_lock(connection, "summary", id=7)
        with connection.transaction():
            assert holdfast.row_lock(connection, "summary", id=7) is not None
            with connection.pipeline(), pytest.raises(ValueError, match="pipeline mode"):
                holdfast.row_lock(connection, "summary", id=7)
    engine = sqlalchemy.create_engine(as_sqlalchemy(summaries), isolation_level="AUTOCOMMIT")
    with engine.connect() as other, pytest.raises(ValueError, match="no transaction is open"):
        holdfast.row_lock(other, "summary", id=7)
    engine.dispose()


@pytest.mark.parametrize("library", ["psycopg", "sqlalchemy", "sqlite3"])
def test_names_are_quoted_whatever_is_in_them(summaries: str, tmp_path: Path, library: str) -> None:
    table, column = 'x"; drop table summary; --', 'a:b %s "c'
    quoted = sql.Identifier(table).as_string(), sql.Identifier(column).as_string()
    with ExitStack() as stack:
        maker: Any = (
            stack.enter_context(closing(sqlite3.connect(tmp_path / "x.db", isolation_level=None)))
            if library == "sqlite3"
            else stack.enter_context(psycopg.connect(summaries, autocommit=True))
        )
        maker.execute(f"create table {quoted[0]} ({quoted[1]} int, summary int)")
        maker.execute(f"insert into {quoted[0]} values (1, 2)")
        if library == "sqlalchemy":
            engine = sqlalchemy.create_engine(as_sqlalchemy(summaries))
            stack.callback(engine.dispose)
            connection: Any = stack.enter_context(engine.connect())
        else:
            connection = maker
            maker.execute("begin")
        found = holdfast.row_lock(connection, (table,), **{column: 1})
        assert found == {column: 1, "summary": 2}
        connection.rollback()


@pytest.mark.parametrize(
    ("table", "key", "error", "wanted"),
    [
        ("summary", {}, ValueError, "needs the row's key"),
        ("summary", {"id": None}, ValueError, "NULL equals nothing"),
        ("a.b.c", {"id": 7}, ValueError, "table must be"),
        ("", {"id": 7}, ValueError, "table must have 1 to 63"),
        ("ä" * 40, {"id": 7}, ValueError, "at most 63 bytes"),
        ("sum\0mary", {"id": 7}, ValueError, "control characters"),
        (7, {"id": 7}, ValueError, "table must be"),
        ((7,), {"id": 7}, TypeError, "table must be a str"),
        ("summary", {"c" * 64: 7}, ValueError, "column must have"),
    ],
)
def test_a_wrong_table_or_key_is_refused_before_anything_is_asked(
    table: Any, key: dict[str, Any], error: type[Exception], wanted: str
) -> None:
    with pytest.raises(error, match=wanted):
        holdfast.row_lock(NOTHING, table, **key)


def test_a_key_that_fits_several_rows_locks_none_of_them(connect: Connect) -> None:
    first, second = connect(), connect()
    run(first, "alter table summary add kind text default 'x'")
    first.commit()
    with pytest.raises(ValueError, match="several rows in summary with kind='x'"):
        holdfast.row_lock(first, "summary", kind="x")
    assert holdfast.row_lock(second, "summary", id=7, kind="x") is not None


def test_a_table_that_gets_another_column_is_locked_as_before(summaries: str) -> None:
    """Psycopg prepares what it is told often, and then the server refuses it once in every connection."""
    with psycopg.connect(summaries) as connection, psycopg.connect(summaries) as other:
        for _ in range(8):
            holdfast.row_lock(connection, "summary", id=7)
            connection.commit()
        other.execute("alter table summary add column model text")
        other.commit()
        assert holdfast.row_lock(connection, "summary", id=7) == {"id": 7, "text": None, "model": None}


def test_an_unknown_connection_is_named() -> None:
    with pytest.raises(TypeError, match=r"cannot lock a row with a builtins\.object"):
        holdfast.row_lock(NOTHING, "summary", id=7)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_the_answer_of_an_async_connection_is_awaited(summaries: str, driver: str) -> None:
    async with await psycopg.AsyncConnection.connect(summaries) as first:
        answer = await holdfast.row_lock(first, "summary", id=7)
        assert_type(answer, dict[str, Any] | None)
        assert answer == {"id": 7, "text": None}
        engine = create_async_engine(as_sqlalchemy(summaries, driver))
        async with engine.connect() as second, AsyncSession(engine) as third:
            assert await holdfast.row_lock(second, "summary", id=7) is None
            assert await holdfast.row_lock(second, "summary", id=8) == {"id": 8, "text": "done"}
            assert await holdfast.row_lock(third, "summary", id=8) is None
            await first.commit()
            assert await holdfast.row_lock(third, "summary", id=7) is not None
        await engine.dispose()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("pragma journal_mode = wal")
        database.execute("create table summary (id integer primary key, text text)")
        database.execute("insert into summary values (7, null)")
    return path


def test_on_sqlite_none_means_that_somebody_is_writing_and_nobody_waits(file: Path) -> None:
    with closing(sqlite3.connect(file, timeout=60)) as first, closing(sqlite3.connect(file, timeout=60)) as second:
        assert holdfast.row_lock(first, "summary", id=7) == {"id": 7, "text": None}
        second.execute("select * from summary").fetchall()
        assert holdfast.row_lock(second, "summary", id=7) is None
        first.execute("update summary set text = 'short' where id = 7")
        first.commit()
        assert second.execute("pragma busy_timeout").fetchone() == (60_000,), "the user's patience is given back"
        assert holdfast.row_lock(second, "summary", id=7) == {"id": 7, "text": "short"}
        with pytest.raises(LookupError, match="id=9"):
            holdfast.row_lock(second, "summary", id=9)
        with pytest.raises(sqlite3.OperationalError, match="no such column"):
            holdfast.row_lock(second, "summary", name="name")
        second.commit()
        for wrong, error in (({"id": 9}, LookupError), ({"name": "name"}, sqlite3.OperationalError)):
            with pytest.raises(error):
                holdfast.row_lock(second, "summary", **wrong)
            assert holdfast.row_lock(first, "summary", id=7), "whoever got no row keeps nobody from writing"
            first.rollback()


def test_on_sqlite_a_transaction_that_has_read_before_becomes_the_writer_or_must_begin_anew(file: Path) -> None:
    with (
        closing(sqlite3.connect(file, isolation_level=None)) as first,
        closing(sqlite3.connect(file, isolation_level=None)) as second,
    ):
        with pytest.raises(ValueError, match="no transaction is open"):
            holdfast.row_lock(first, "summary", id=7)
        for connection in (first, second):
            connection.execute("begin")
            connection.execute("select * from summary").fetchall()
        assert holdfast.row_lock(first, "summary", id=7) is not None
        assert holdfast.row_lock(second, "summary", id=7) is None
        first.execute("update summary set text = 'short'")
        first.execute("commit")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            holdfast.row_lock(second, "summary", id=7)


def test_on_sqlite_through_sqlalchemy(file: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{file}")
    with engine.connect() as first, Session(engine) as second:
        assert holdfast.row_lock(first, "summary", id=7) == {"id": 7, "text": None}
        assert holdfast.row_lock(second, "summary", id=7) is None
        first.execute(sqlalchemy.text("update summary set text = 'short'"))
        first.commit()
        assert holdfast.row_lock(second, "summary", id=7) == {"id": 7, "text": "short"}
    engine.dispose()


async def test_on_sqlite_through_sqlalchemy_on_asyncio(file: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{file}")
    async with engine.connect() as first, engine.connect() as second:
        assert await holdfast.row_lock(first, "summary", id=7) == {"id": 7, "text": None}
        assert await holdfast.row_lock(second, "summary", id=7) is None
    await engine.dispose()


def test_of_many_threads_one_does_the_work_and_the_others_do_not_wait_for_it(summaries: str) -> None:
    calls: list[int] = []
    answers: list[Any] = []
    ready, working, rest_done = threading.Barrier(8), threading.Event(), threading.Semaphore(0)

    def work() -> None:
        with psycopg.connect(summaries) as connection:
            ready.wait(PATIENCE)
            row = holdfast.row_lock(connection, "summary", id=7)
            if row is None:
                answers.append(None)
                rest_done.release()
            elif row["text"] is None:
                calls.append(1)
                working.set()
                for _ in range(7):
                    assert rest_done.acquire(timeout=PATIENCE)
                connection.execute("update summary set text = 'short' where id = 7")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert (calls, answers) == ([1], [None] * 7)
    with psycopg.connect(summaries) as connection:
        row = holdfast.row_lock(connection, "summary", id=7)
        assert_type(row, dict[str, Any] | None)
        assert row == {"id": 7, "text": "short"}
