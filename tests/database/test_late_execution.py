"""A connection is lost while a call is on its way, and the server receives that call later: after it was repeated, and
after newer writes.

Two proxies stand between client and server. The inner one holds the call back; the outer one is cut, and connects the
client directly from then on. Then the inner one delivers what it has.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import MustCreate, Unconditional
from holdfast.database import call_dispatcher
from holdfast.database.engine import Engine
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.postgres import PostgresConnection
from holdfast.testing import Proxy
from holdfast.testing.sync_facade import EventLoopThread
from tests.children import PATIENCE, eventually, query
from tests.conftest import server
from tests.poor_postgres import tenant
from tests.raw_session import waiters

Connect = Callable[..., Any]
BOTH = pytest.mark.parametrize("connect", ["sync", "async"], indirect=True)
SESSIONS = "select pid from pg_stat_activity where application_name like 'holdfast%' and datname = current_database()"
SLEEPERS = "select pid from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()"


class Network:
    """The way to the server."""

    def __init__(self, url: str) -> None:
        self.direct_url = url
        self._inner = Proxy(url)
        self._outer = Proxy(self._inner.url)
        self.url = self._outer.url
        self._callers = ThreadPoolExecutor()
        self._sessions: set[tuple[int]] = set()
        self._messages = 0

    def send(self, function: Callable[[], Any]) -> Future[Any]:
        """Call it, and return when its message is held back. Its session must be open."""
        self.hold_back()
        future = self.submit(function)
        self.await_message()
        return future

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        return self._callers.submit(function)

    def hold_back(self) -> None:
        """What is sent from now on."""
        self._sessions = set(query(self.direct_url, SESSIONS))
        self._inner.stall("to_server")
        self._messages = self._inner.messages

    def await_message(self) -> None:
        eventually(lambda: self._inner.messages > self._messages, "a message is on its way")

    def bypass(self) -> None:
        """New connections lead directly to the server."""
        self._outer.target(self.direct_url)

    def cut(self) -> None:
        self.bypass()
        self._outer.cut()

    def hold_answers(self) -> None:
        self._inner.stall("to_client")

    def break_off(self) -> None:
        """Every connection. Answers that were held back are lost."""
        self._inner.cut()
        self._inner.heal()

    def restore(self) -> None:
        """Connections lead through both proxies again."""
        self._outer.target(self._inner.url)
        self._outer.cut()

    def deliver(self) -> None:
        """Return when the server has executed what was held back, or has no session for it."""
        self._inner.heal()
        eventually(lambda: not self._sessions & set(query(self.direct_url, SESSIONS)), "the old session has ended")

    def close(self) -> None:
        self._outer.close()
        self._inner.close()
        self._callers.shutdown()


@pytest.fixture
def network(postgres_url: str) -> Iterator[Network]:
    network = Network(postgres_url)
    yield network
    network.close()


def opened(connect: Connect, url: str) -> Any:
    """A client whose only session for calls has prepared the statement of a put."""
    client = connect(url, sessions=1)
    client.objects.put_if("box", "b-1", 0, Unconditional())
    return client


def payload(client: Any) -> Any:
    return client.objects.get("box", "b-1").payload


def opened_again(client: Any) -> Any:
    client.objects.get("box", "b-1")  # a call that only reads is repeated
    return client.objects.put_if("box", "b-1", 0, Unconditional())


@BOTH
def test_an_unconditional_write_does_not_overwrite_a_newer_one(connect: Connect, network: Network) -> None:
    """Its session is ended before it is repeated. Then it is repeated, and does not overwrite what came between."""
    client = opened(connect, network.url)
    first = network.send(lambda: client.objects.put_if("box", "b-1", 1, Unconditional()))
    network.cut()
    version = first.result(PATIENCE).version
    newer = client.objects.put_if("box", "b-1", 2, holdfast.MatchVersion(version))
    network.deliver()
    assert client.objects.get("box", "b-1") == newer


@BOTH
def test_what_was_deleted_is_not_created_again(connect: Connect, network: Network) -> None:
    client = opened(connect, network.url)
    first = network.send(lambda: client.objects.put_if("box", "b-2", 1, MustCreate()))
    network.cut()
    client.objects.delete_if("box", "b-2", first.result(PATIENCE).version)
    network.deliver()
    assert client.objects.get("box", "b-2") is None


@BOTH
def test_a_call_that_timed_out_is_over_before_the_next_one(
    connect: Connect, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not repeated, and what its client reads next is final."""
    client = opened(connect, network.url)
    for engine in (Engine, AsyncEngine):
        monkeypatch.setitem(engine.call.__kwdefaults__ or {}, "timeout", 0.5)
    first = network.send(lambda: client.objects.put_if("box", "b-1", 1, Unconditional()))
    assert isinstance(first.exception(PATIENCE), holdfast.Unanswered)
    monkeypatch.undo()
    network.bypass()
    seen = client.objects.get("box", "b-1")
    network.deliver()
    assert client.objects.get("box", "b-1") == seen


@BOTH
def test_a_write_that_was_done_is_not_done_again(connect: Connect, postgres_url: str) -> None:
    """Its answer was lost, and another client has written since."""
    with Proxy(postgres_url) as link, ThreadPoolExecutor(1) as caller, holdfast.Client(postgres_url) as other:
        client = opened(connect, link.url)
        link.stall("to_client")
        first = caller.submit(client.objects.put_if, "box", "b-1", 1, Unconditional())
        eventually(lambda: payload(other) == 1, "it is written")
        newer = other.objects.put_if("box", "b-1", 2, Unconditional())
        link.cut()
        link.heal()
        assert first.result(PATIENCE).version < newer.version
        assert client.objects.get("box", "b-1") == newer


@BOTH
def test_an_acquire_that_was_repeated_is_undone_twice(
    connect: Connect, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sending was granted, and its answer lost. The second one is executed when that grant was undone."""

    def names() -> list[Any]:
        return query(network.direct_url, "select name from holdfast.lease where name <> 'anchor'")

    def send(connection: Any, statement: Any, parameters: Any) -> None:
        if statement.name == "lease_acquire":
            network.hold_back()
            is_held_back.set()
        deliver(connection, statement, parameters)

    client, deliver, is_held_back = connect(network.url, sessions=1), PostgresConnection._send, threading.Event()
    anchor = client.lease("anchor", ttl=600).acquire()  # its beat is that of the other
    network.hold_answers()
    acquiring = network.submit(client.lease("a", ttl=600).acquire)
    eventually(names, "it is granted")
    monkeypatch.setattr(PostgresConnection, "_send", send)
    network.break_off()
    assert is_held_back.wait(PATIENCE), "it is repeated"
    network.await_message()
    monkeypatch.undo()
    network.cut()
    assert isinstance(acquiring.exception(PATIENCE), holdfast.Unanswered)
    eventually(lambda: not names(), "the first grant is undone")
    network.deliver()
    eventually(lambda: not names(), "the second grant is undone")
    history = "select outcome from holdfast.history where name = 'a'"
    assert query(network.direct_url, history) == [("released",), ("released",)], "it was executed late"
    assert anchor.release() is True


@BOTH
def test_where_a_session_cannot_be_ended_no_write_is_repeated(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """The outcome stays open, and says so. Calls that only read are repeated."""
    url = tenant(server().database(), "pg_terminate_backend")
    with holdfast.Client(url) as owner:
        owner.migrate()
    network = Network(url)
    try:
        client = opened(connect, network.url)
        reading = network.send(lambda: client.objects.get("box", "b-1"))
        network.cut()
        assert reading.result(PATIENCE).payload == 0
        network.deliver()
        network.restore()
        assert opened_again(client).payload == 0
        writing = network.send(lambda: client.objects.put_if("box", "b-1", 1, Unconditional()))
        network.cut()
        assert isinstance(writing.exception(PATIENCE), holdfast.Unanswered)
        assert "may still execute its last call" in caplog.text
        network.deliver()
        eventually(lambda: payload(client) == 1, "it is executed late")
    finally:
        network.close()


GATE = """
create table gate (name text);
create function pass() returns trigger language plpgsql as $$ begin
    while exists (select from public.gate g where g.name = new.id) loop
        perform pg_sleep(0.01);
    end loop;
    return null;
end $$;
create trigger pass after insert or update on holdfast.object for each row execute function pass();
"""


def test_neighbours_of_an_interrupted_thread_get_their_answers(postgres_url: str) -> None:
    """Ctrl-C hits the thread that sends the calls of others with its own: theirs are repeated."""
    with holdfast.Client(postgres_url, sessions=1) as client, ThreadPoolExecutor(4) as callers:
        client.migrate()
        query(postgres_url, GATE)
        query(postgres_url, "insert into gate values ('b-0'), ('b-1')")
        dispatcher = client._engine._dispatcher

        def put(number: int) -> Any:
            return client.objects.put_if("box", f"b-{number}", 1, Unconditional())

        def interrupt() -> None:
            eventually(lambda: len(dispatcher._queue.waiting) == 3, "three calls wait")
            query(postgres_url, "delete from gate where name = 'b-0'")
            eventually(lambda: len(dispatcher._channels[0].batch) == 3, "they are sent together")
            eventually(lambda: query(postgres_url, SLEEPERS), "they are executed")
            os.kill(os.getpid(), signal.SIGINT)

        first = callers.submit(put, 0)
        eventually(lambda: query(postgres_url, SLEEPERS), "the first call is executed")
        others = [callers.submit(put, number) for number in (1, 2)]
        eventually(lambda: len(dispatcher._queue.waiting) == 2, "two calls wait")
        interrupter = callers.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(3)  # its deadline is the latest, so this thread sends
        interrupter.result(PATIENCE)
        query(postgres_url, "delete from gate")
        versions = [call.result(PATIENCE).version for call in (first, *others)]
        logged = "select version from holdfast.object_change where id <> 'b-3' order by 1"
        assert query(postgres_url, logged) == [(version,) for version in sorted(versions)], "each is done once"


class Tasks:
    """Callers of an AsyncClient, each a task."""

    ways = ("cancelled", "late")

    def __init__(self, url: str) -> None:
        self._thread = EventLoopThread()
        self.client: Any = self._thread.call(holdfast.AsyncClient, url)
        self._client = self.client._inner

    def start(self, function: Callable[[Any], Any]) -> Future[Any]:
        async def call() -> Any:
            return await function(self._client)

        return asyncio.run_coroutine_threadsafe(call(), self._thread.loop)

    def hold_back(self, network: Network) -> Future[Any]:
        network.hold_back()
        call = self.start(write(1))
        network.await_message()
        return call

    def leave(self, call: Future[Any], way: str) -> None:
        if way == "cancelled":
            call.cancel()
        else:
            queued = sent(self._client)
            queued.deadline = 0.0
            self._thread.loop.call_soon_threadsafe(self._client._engine._dispatcher._on_deadline)

    def close(self) -> None:
        self.client.close()
        self._thread.close()


class Threads:
    """Callers of a Client, each a thread."""

    ways = ("interrupted", "late")

    def __init__(self, url: str) -> None:
        self.client: Any = holdfast.Client(url)
        self._pool = ThreadPoolExecutor(8)

    def start(self, function: Callable[[Any], Any]) -> Future[Any]:
        return self._pool.submit(function, self.client)

    def hold_back(self, network: Network) -> Future[Any]:
        """Together with a call of another thread, which sends it: its deadline is later."""
        queue = self.client._engine._dispatcher._queue
        with psycopg.connect(network.direct_url) as other:
            other.execute("lock table holdfast.object in exclusive mode")
            self.start(write(0, "first"))
            eventually(lambda: waiters(other) == 1, "the first call waits in the server")
            call = self.start(write(1))
            eventually(lambda: len(queue.waiting) == 1, "the write waits")
            self.start(write(0, "neighbour"))
            eventually(lambda: len(queue.waiting) == 2, "its neighbour waits")
            network.hold_back()
        network.await_message()
        return call

    def leave(self, call: Future[Any], way: str) -> None:
        queued = sent(self.client)
        if way == "late":
            queued.deadline = 0.0
        else:
            thread = ctypes.c_ulong(queued.receiver.thread)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))

    def close(self) -> None:
        self.client.close()
        self._pool.shutdown()


def write(value: int, name: str = "b-1") -> Callable[[Any], Any]:
    return lambda client: client.objects.put_if("box", name, value, Unconditional())


def sent(client: Any) -> Any:
    """The write of b-1 that is under way."""
    calls = [call for channel in client._engine._dispatcher._channels for call in channel.batch]
    [queued] = [call for call in calls if call.parameters["id"] == "b-1"]
    return queued


class Abandoned:
    """A write of 1 that is held back, and whose caller has left; then a write of 2 to the same row, by any caller."""

    def __init__(self, network: Network, kind: type[Tasks | Threads], way: str, monkeypatch: Any) -> None:
        self.callers = callers = kind(network.url)
        callers.client.objects.put_if("box", "b-1", 0, Unconditional())
        with monkeypatch.context() as patched:
            if kind is Threads:  # what waits for the first call goes with its neighbour, and on no other session
                patched.setattr(call_dispatcher, "PATIENCE", 3600.0)
            old = callers.hold_back(network)
        callers.leave(old, way)
        with pytest.raises((CancelledError, holdfast.Unanswered, KeyboardInterrupt)):
            old.result(PATIENCE)
        network.bypass()
        self.newer = callers.start(write(2))

    def close(self) -> None:
        self.callers.close()


@pytest.fixture(params=[(kind, way) for kind in (Tasks, Threads) for way in kind.ways], ids=lambda it: it[1])
def abandoned(network: Network, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Abandoned]:
    kind, way = request.param
    abandoned = Abandoned(network, kind, way, monkeypatch)
    yield abandoned
    abandoned.close()


def test_no_call_overtakes_a_write_of_its_row_whose_caller_has_left(abandoned: Abandoned, network: Network) -> None:
    """Calls of other rows do, and lists."""
    callers = abandoned.callers
    reading = callers.start(lambda client: client.objects.get("box", "b-1"))
    callers.start(write(0, "b-2")).result(PATIENCE)
    assert len(callers.client.objects.list("box")) > 1
    assert not abandoned.newer.done()
    assert not reading.done()
    network.deliver()
    assert reading.result(PATIENCE).payload in (1, 2), "what was read is final"
    abandoned.newer.result(PATIENCE)
    assert callers.client.objects.get("box", "b-1").payload == 2


def test_nor_when_the_session_of_that_one_is_lost(abandoned: Abandoned, network: Network) -> None:
    """What waits for it has the session ended before it is sent."""
    abandoned.callers.start(write(0, "b-2")).result(PATIENCE)
    network.cut()
    abandoned.newer.result(PATIENCE)
    network.deliver()
    assert abandoned.callers.client.objects.get("box", "b-1").payload == 2


def test_on_sqlite_no_write_overtakes_one_whose_caller_has_left(sqlite_url: str) -> None:
    """Another connection writes meanwhile."""
    callers = Tasks(sqlite_url)
    callers.client.objects.put_if("box", "b-1", 0, Unconditional())
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("begin immediate")
        old = callers.start(write(1))
        dispatcher = callers._client._engine._dispatcher
        eventually(dispatcher.is_busy, "the write is under way")
        callers.leave(old, "cancelled")
        newer, another = callers.start(write(2)), callers.start(write(0, "b-2"))
        eventually(lambda: len(dispatcher._channels[1].batch) > 0, "a second session writes")
        assert [call.parameters["id"] for call in dispatcher._channels[1].batch] == ["b-2"]
        other.execute("rollback")
    another.result(PATIENCE)
    newer.result(PATIENCE)
    assert payload(callers.client) == 2
    callers.close()


async def test_a_read_that_was_cancelled_holds_nothing_up(postgres_url: str) -> None:
    """Else a listing that waits for a lock of the server would stop all calls of its kind."""
    async with holdfast.AsyncClient(postgres_url) as client:
        await client.migrate()
        with psycopg.connect(postgres_url) as other:
            other.execute("lock table holdfast.history in access exclusive mode")
            listing = asyncio.create_task(client.leases.history())
            async with asyncio.timeout(PATIENCE):
                while not await asyncio.to_thread(waiters, other):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            listing.cancel()
            await asyncio.wait([listing])
            assert await client.leases.get("invoices") is None
            assert waiters(other) == 1, "the listing still waits"
