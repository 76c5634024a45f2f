"""Several calls in one transaction of a session: committed once, answered each, and rolled back with a refused one."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from holdfast.database.call_queue import Again
from holdfast.database.postgres import PostgresSession
from holdfast.database.postgres_async import AsyncPostgresSession
from holdfast.database.sqlite import SqliteSession
from holdfast.database.sqlite_async import AsyncSqliteSession
from holdfast.database.url import parse
from holdfast.errors import Refused, Unanswered
from holdfast.testing.sync_facade import EventLoopThread
from tests.children import PATIENCE, query
from tests.conftest import migrated, server
from tests.raw_session import acquisition

Opener = Callable[..., Any]


class Session:
    """A session of either flavour."""

    def __init__(self, url: str, loop: EventLoopThread | None, **options: Any) -> None:
        self.database, self.loop = parse(url, **options), loop
        is_sqlite = self.database.dialect == "sqlite"
        kind: Any = SqliteSession if is_sqlite else PostgresSession
        if loop is not None:
            kind = AsyncSqliteSession if is_sqlite else AsyncPostgresSession
        self.inner = self.run(lambda: kind.open(self.database, PATIENCE))

    def run(self, function: Callable[[], Any]) -> Any:
        if self.loop is None:
            return function()

        async def run() -> Any:
            result = function()
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop.loop).result(PATIENCE)

    def together(self, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
        answers: list[Any] = self.run(lambda: self.inner.call_together(calls, PATIENCE))
        return answers

    def call(self, statement: str, /, **parameters: Any) -> list[Any]:
        rows: list[Any] = self.run(lambda: self.inner.call(statement, parameters, PATIENCE))
        return rows


@pytest.fixture(params=["sync", "async"])
def open_session(request: pytest.FixtureRequest) -> Iterator[Opener]:
    loop, opened = EventLoopThread() if request.param == "async" else None, []

    def create(url: str, **options: Any) -> Session:
        opened.append(Session(migrated(url), loop, **options))
        return opened[-1]

    yield create
    for session in opened:
        session.run(session.inner.close)
    if loop is not None:
        loop.close()


def acquire(name: str, **others: Any) -> tuple[str, dict[str, Any]]:
    return "lease_acquire", acquisition(name, **others)


def names(url: str) -> list[str]:
    table = "holdfast_lease" if url.startswith("sqlite") else "holdfast.lease"
    return sorted(name for (name,) in query(url, f"select name from {table}"))


def test_each_call_has_its_own_answer(open_session: Opener, either: str) -> None:
    session = open_session(either)
    [a], [b], [again], missing = session.together(
        acquire("a"), acquire("b"), acquire("a", holder="another"), ("object_get", {"type": "t", "id": "none"})
    )
    assert (a["status"], b["status"], again["status"], missing) == ("acquired", "acquired", "held", [])
    assert a["fence"] < b["fence"]
    assert names(either) == ["a", "b"]
    assert session.call("lease_list", name="a")[0]["fence"] == a["fence"], "the session is left as it was"


@pytest.mark.parametrize("prepared", [True, False])
def test_they_are_one_transaction(open_session: Opener, postgres_url: str, prepared: bool) -> None:
    session = open_session(postgres_url, prepared=prepared)
    session.together(acquire("a"), acquire("b"), acquire("c"))
    assert query(postgres_url, "select count(distinct xmin::text), count(*) from holdfast.lease") == [(1, 3)]


def test_a_refused_call_rolls_back_its_neighbours_which_are_told_so(open_session: Opener, postgres_url: str) -> None:
    session = open_session(postgres_url)
    answers = session.together(acquire("a"), acquire("b", ttl=0), acquire("c"))
    assert answers == [Again.TOGETHER, Again.ALONE, Again.TOGETHER]
    assert names(postgres_url) == []
    assert session.together(acquire("a"), acquire("c"))[1][0]["status"] == "acquired"


@pytest.mark.parametrize(("table", "column"), [("lease", "holder"), ("beat", "label")])
def test_on_sqlite_a_refusal_is_of_one_call_alone(
    open_session: Opener, sqlite_url: str, table: str, column: str
) -> None:
    """Whichever of its statements is refused, nothing of it stays."""
    session = open_session(sqlite_url)
    query(
        sqlite_url,
        f"create trigger refuse before insert on holdfast_{table} when new.{column} = 'bad' "
        "begin select raise(abort, 'not this one'); end",
    )
    [a], refusal, [c] = session.together(acquire("a"), acquire("b", holder="bad"), acquire("c"))
    assert (a["status"], c["status"]) == ("acquired", "acquired")
    assert isinstance(refusal, Refused)
    assert "not this one" in str(refusal)
    assert names(sqlite_url) == ["a", "c"]
    assert query(sqlite_url, "select count(*) from holdfast_beat") == [(2,)]


def test_a_refused_commit_may_be_the_fault_of_each(open_session: Opener, postgres_url: str) -> None:
    query(
        postgres_url,
        """create function refuse() returns trigger language plpgsql as
           $$ begin raise exception 'not at commit'; end $$""",
    )
    query(
        postgres_url,
        """create constraint trigger refuse after insert on holdfast.lease deferrable initially deferred
           for each row when (new.name = 'b') execute function refuse()""",
    )
    session = open_session(postgres_url)
    assert session.together(acquire("a"), acquire("b")) == [Again.ALONE, Again.ALONE]
    assert names(postgres_url) == []
    assert session.call("lease_acquire", **acquisition("a"))[0]["status"] == "acquired"


def test_a_value_that_cannot_be_sent_is_one_callers_fault(open_session: Opener, postgres_url: str) -> None:
    session = open_session(postgres_url)
    bad = acquire("b", holder="\ud800")
    assert session.together(acquire("a"), bad, acquire("c")) == [Again.TOGETHER, Again.ALONE, Again.TOGETHER]
    assert names(postgres_url) == []
    assert session.together(acquire("a"), acquire("c"))[0][0]["status"] == "acquired"


def test_a_row_that_is_locked_for_long_keeps_nobody_waiting(open_session: Opener, postgres_url: str) -> None:
    """One of the user's transactions has locked it. A call alone would wait, here for an hour."""
    session = open_session(postgres_url)
    session.call("wait_long")
    put = {"type": "t", "id": "x", "body": "1", "expected": 0, "again": False, "late": False}
    token = {"token": "00000000-0000-0000-0000-000000000001"}
    [row] = session.call("object_put", **put, **token)
    swap = ("object_swap", {"type": "t", "id": "x", "body": "2", "expected": row["version"], "again": False, **token})
    with psycopg.connect(postgres_url) as user:
        user.execute("select from holdfast.object for update")
        assert session.together(acquire("a"), swap) == [Again.TOGETHER, Again.ALONE]
    assert session.together(acquire("a"), swap)[1][0]["status"] == "done"
    assert query(postgres_url, "select body from holdfast.object") == [("2",)]


def test_a_warning_at_commit_makes_all_answers_unknown(open_session: Opener, postgres_url: str) -> None:
    query(
        postgres_url,
        """create function warn() returns trigger language plpgsql as $$ begin
           raise warning 'canceling wait for synchronous replication'; return null; end $$""",
    )
    query(
        postgres_url,
        """create constraint trigger warn after insert on holdfast.lease deferrable initially deferred
           for each row execute function warn()""",
    )
    session = open_session(postgres_url)
    with pytest.raises(Unanswered, match="the commit may be lost"):
        session.together(acquire("a"), acquire("b"))


def test_a_lost_session_is_unknown_for_all(open_session: Opener, postgres_url: str) -> None:
    session = open_session(postgres_url)
    session.together(acquire("a"), acquire("b"))
    server().execute(f"select pg_terminate_backend({session.inner.pgconn.backend_pid})")
    with pytest.raises(Unanswered):
        session.together(acquire("c"), acquire("d"))


def test_large_values_fit_in_one_message(open_session: Opener, postgres_url: str) -> None:
    """More than either side's buffers hold, in both directions: nobody waits for the other to read."""
    session = open_session(postgres_url)
    body = '"' + "x" * 1_000_000 + '"'
    calls = [
        (
            "object_put",
            {
                "type": "t", "id": str(number), "body": body, "expected": 0, "again": False, "late": False,
                "token": f"00000000-0000-0000-0000-00000000000{number}",
            },
        )
        for number in range(5)
    ]  # fmt: skip
    assert [row["status"] for [row] in session.together(*calls)] == ["done"] * 5
    reads = [("object_get", {"type": "t", "id": str(number)}) for number in range(5)]
    assert [len(row["body"]) for [row] in session.together(*reads)] == [len(body)] * 5


def test_a_refused_acquire_on_sqlite_locks_nothing(open_session: Opener, sqlite_url: str) -> None:
    """What is answered without a write does not wait for a writer."""
    session = open_session(sqlite_url)
    session.call("lease_acquire", **acquisition("a"))
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as writer:
        writer.execute("begin immediate")
        answers = session.together(acquire("a", holder="b"), ("object_get", {"type": "t", "id": "x"}))
    assert answers[0][0]["status"] == "held"


async def test_a_cancelled_batch_is_sent_to_its_end(postgres_url: str) -> None:
    session = await AsyncPostgresSession.open(parse(postgres_url), PATIENCE)
    await session.call_together([acquire("a"), acquire("b")], PATIENCE)  # so that the statements are prepared
    session.call_together([acquire("c"), acquire("d")], PATIENCE).cancel()
    assert len(await session.call("lease_list", {"name": None}, PATIENCE)) == 4
    session.close()
