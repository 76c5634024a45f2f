"""The PostgreSQL session on an event loop: each answer goes to its own question, whatever becomes of the askers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import pytest_asyncio
import uvloop
from psycopg import pq

from holdfast.database.postgres_async import AsyncPostgresSession
from holdfast.database.url import parse
from holdfast.errors import Unanswered, Unreachable
from tests.children import PATIENCE, until
from tests.raw_session import acquisition, locked
from tests.reset_connection import BrokenOff

LIST = "lease_list"


@pytest_asyncio.fixture
async def session(postgres_url: str) -> AsyncIterator[AsyncPostgresSession]:
    made = await AsyncPostgresSession.open(parse(postgres_url), PATIENCE)
    yield made
    made.close()


async def test_of_1000_calls_with_random_cancellations_each_gets_its_own_answer(session: AsyncPostgresSession) -> None:
    await session.script(
        "do $$ begin for i in 1..1000 loop perform holdfast.lease_acquire('name ' || i, 'h', 300); end loop; end $$",
        60.0,
    )
    chance = random.Random(7)

    async def one(number: int) -> None:
        await asyncio.sleep(chance.uniform(0, 0.2))
        [row] = await session.call(LIST, {"name": f"name {number}"}, 60.0)
        assert row["name"] == f"name {number}"

    tasks = [asyncio.create_task(one(number)) for number in range(1, 1001)]
    doomed = chance.sample(tasks, 300)
    for task in doomed:
        asyncio.get_running_loop().call_later(chance.uniform(0, 0.3), task.cancel)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = [outcome for outcome in outcomes if isinstance(outcome, asyncio.CancelledError)]
    assert [outcome for outcome in outcomes if outcome is not None and outcome not in cancelled] == []
    assert 0 < len(cancelled) <= 300
    assert len(await session.call(LIST, {"name": None}, 60.0)) == 1000


async def test_a_cancelled_call_leaves_the_session_to_the_next(
    session: AsyncPostgresSession, postgres_url: str
) -> None:
    pid = session.pgconn.backend_pid
    with locked(postgres_url):
        task = asyncio.ensure_future(session.call(LIST, {"name": "the cancelled one's"}, 60.0))
        queued = asyncio.ensure_future(session.call("session_open", {}, 60.0))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await queued)[0]["pid"] == pid


async def test_a_timeout_fails_the_call_and_all_that_stand_behind_it(
    session: AsyncPostgresSession, postgres_url: str
) -> None:
    with locked(postgres_url):
        calls = [session.call(LIST, {"name": None}, timeout) for timeout in (0.2, 60.0, 60.0)]
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)
    assert [type(outcome) for outcome in outcomes] == [Unanswered] * 3
    with pytest.raises(Unanswered):
        await session.call(LIST, {"name": None}, 60.0)


async def test_a_call_late_in_the_queue_fails_alone_and_in_time(
    session: AsyncPostgresSession, postgres_url: str
) -> None:
    with locked(postgres_url):
        head = asyncio.ensure_future(session.call(LIST, {"name": None}, 60.0))
        await asyncio.sleep(0)
        with pytest.raises(Unreachable, match="busy with other requests"):
            await asyncio.wait_for(session.call(LIST, {"name": None}, 0.1), PATIENCE)
        assert not head.done()
    assert await head == []
    assert await session.call(LIST, {"name": None}, 60.0) == []


async def test_prepared_statements_that_vanish_cost_nothing_but_themselves(session: AsyncPostgresSession) -> None:
    assert await session.call(LIST, {"name": None}, PATIENCE) == []
    await session.script("deallocate all", PATIENCE)
    answers = await asyncio.gather(*(session.call(LIST, {"name": None}, PATIENCE) for _ in range(10)))
    assert answers == [[]] * 10


async def test_a_value_that_cannot_be_sent_is_the_callers_error_alone(session: AsyncPostgresSession) -> None:
    wrong = {"name": "x", "actor": "a", "reason": "\ud800"}
    with pytest.raises(UnicodeEncodeError):
        await session.call("lease_force_release", wrong, PATIENCE)
    calls = [session.call(LIST, {"name": None}, PATIENCE), session.call("lease_force_release", wrong, PATIENCE)]
    calls.append(session.call(LIST, {"name": None}, PATIENCE))
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)
    assert [type(outcome) for outcome in outcomes] == [list, UnicodeEncodeError, list]


async def test_a_large_value_is_sent_in_pieces(session: AsyncPostgresSession) -> None:
    large = '{"label": "x", "unused": "' + "y" * 12_000_000 + '"}'
    [row] = await session.call("lease_acquire", acquisition("x", process=large), 60.0)
    assert row["status"] == "acquired"


async def test_closing_twice_does_not_take_the_reader_of_the_next_session(postgres_url: str) -> None:
    """The descriptor's number is given out again at once."""
    database = parse(postgres_url)
    first = await AsyncPostgresSession.open(database, PATIENCE)
    number = first.fileno()
    first.close()
    others = [await AsyncPostgresSession.open(database, PATIENCE) for _ in range(4)]
    assert number in [other.fileno() for other in others]
    first.close()
    for other in others:
        assert await asyncio.wait_for(other.call(LIST, {"name": None}, PATIENCE), PATIENCE) == []
        other.close()


async def test_an_open_that_was_cancelled_leaves_no_connection(postgres_url: str) -> None:
    database = parse(postgres_url + "?application_name=cancelled")
    task = asyncio.create_task(AsyncPostgresSession.open(database, PATIENCE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        query = "select count(*) from pg_stat_activity where application_name like '%:cancelled'"
        await until(lambda: connection.execute(query).fetchone() == (0,), "the connection is closed")


class LastWords(BrokenOff):
    """As a connection of libpq."""

    status = pq.ConnStatus.BAD

    def __init__(self) -> None:
        super().__init__()
        self.socket, self.finish = self.ours.fileno(), self.ours.close

    def send_query(self, _: bytes) -> None: ...

    def flush(self) -> int:
        return 0

    def is_busy(self) -> bool:
        return True

    def consume_input(self) -> None:
        try:
            self.read()
        except OSError as error:
            raise psycopg.OperationalError(str(error)) from error


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_that_fails_with_something_left_to_read_is_lost_on_every_loop(make: Any) -> None:
    """uvloop tells of both at once, and never again."""
    opened: Any = SimpleNamespace(
        database=parse("postgresql://nowhere/at-all"),
        pgconn=LastWords(),
        pooled=False,
        shares=True,
        identity=None,
        version=0,
        _prepared=None,
    )

    async def ask() -> None:
        await AsyncPostgresSession(opened, asyncio.get_running_loop()).script("select 1", PATIENCE)

    with asyncio.Runner(loop_factory=make) as runner, pytest.raises(Unanswered, match="was lost"):
        runner.run(ask())
