"""A connection is lost while a call is on its way, and the server receives that call later: after it was repeated, and
after newer writes.

Two proxies stand between client and server. The inner one holds the call back; the outer one is cut, and connects the
client directly from then on. Then the inner one delivers what it has.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import holdfast
from holdfast import MustCreate, Unconditional
from holdfast.database.engine import Engine
from holdfast.database.engine_async import AsyncEngine
from holdfast.testing import Proxy
from tests.children import PATIENCE, eventually, query
from tests.conftest import server
from tests.poor_postgres import tenant

Connect = Callable[..., Any]
BOTH = pytest.mark.parametrize("connect", ["sync", "async"], indirect=True)
SESSIONS = "select pid from pg_stat_activity where application_name like 'holdfast%' and datname = current_database()"
SLEEPERS = "select pid from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()"


class Network:
    """The way to the server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._inner = Proxy(url)
        self._outer = Proxy(self._inner.url)
        self.url = self._outer.url
        self._callers = ThreadPoolExecutor()
        self._sessions: set[tuple[int]] = set()

    def send(self, function: Callable[[], Any]) -> Future[Any]:
        """Call it, and return when its message is held back. Its session must be open."""
        self._sessions = set(query(self._url, SESSIONS))
        self._inner.stall("to_server")
        before = self._inner.messages
        future = self._callers.submit(function)
        eventually(lambda: self._inner.messages > before, "a message is on its way")
        return future

    def bypass(self) -> None:
        """New connections lead directly to the server."""
        self._outer.target(self._url)

    def cut(self) -> None:
        self.bypass()
        self._outer.cut()

    def restore(self) -> None:
        """Connections lead through both proxies again."""
        self._outer.target(self._inner.url)
        self._outer.cut()

    def deliver(self) -> None:
        """Return when the server has executed what was held back, or has no session for it."""
        self._inner.heal()
        eventually(lambda: not self._sessions & set(query(self._url, SESSIONS)), "the old session has ended")

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
