"""How sessions are closed: the server may take its time, and a session counts until it has."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from psycopg import pq

import holdfast
from holdfast.lock import executor_async, postgres
from holdfast.lock.postgres import PostgresLockWire
from holdfast.testing import Proxy
from tests.children import PATIENCE, backends, eventually, until
from tests.lock.looks import core, is_idle

TWO: dict[str, Any] = {"lock_sessions": 2, "lock_overflow": 0}


@pytest.fixture
def server_closes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The server closes sessions when this is set."""
    closes, real = threading.Event(), PostgresLockWire.end

    def end(wire: PostgresLockWire) -> None:
        closes.wait(PATIENCE)
        real(wire)

    monkeypatch.setattr(PostgresLockWire, "end", end)
    yield closes
    closes.set()


def test_after_an_interrupt_new_sessions_wait_for_the_end_of_the_old_ones(
    postgres_url: str, server_closes: threading.Event
) -> None:
    with holdfast.Client(postgres_url) as other, holdfast.Client(postgres_url, **TWO) as client:
        kept = other.lock("b").acquire()
        lost = client.lock("a").acquire()
        with ThreadPoolExecutor(2) as threads:
            waits = threads.submit(client.lock("b", timeout=PATIENCE).acquire)
            eventually(lambda: len([each for each in core(client).pool.sessions if each.opened]) == 2, "it waits")
            broken = core(client).pool
            with core(client).mutex:
                broken.writer = "an event that was interrupted"
            core(client).post(core(client).recover)
            eventually(lambda: lost.lost, "all are given up")
            assert len(core(client).pool.closing) == 2
            again = threads.submit(client.lock("a", timeout=PATIENCE).acquire)
            eventually(lambda: core(client).pool._unopened, "it is opened later")
            assert not [each for each in core(client).pool.sessions if each.opened]
            server_closes.set()
            again.result(PATIENCE).release()
            kept.release()
            waits.result(PATIENCE).release()


def test_a_session_that_is_opened_after_its_client_was_closed_is_closed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the event loop of the client does not run any more."""
    connects, real = threading.Event(), executor_async.open_wire

    def open_late(*arguments: Any) -> Any:
        connects.wait(PATIENCE)
        return real(*arguments)

    def connecting() -> bool:
        return any(thread.name == "holdfast-connect" for thread in threading.enumerate())

    async def close_while_it_connects() -> None:
        client = holdfast.AsyncClient(postgres_url)
        acquiring = asyncio.create_task(client.lock("a", timeout=PATIENCE).acquire())
        await until(connecting, "it connects")
        await client.close()
        with pytest.raises(holdfast.EngineError, match="closed"):
            await acquiring

    monkeypatch.setattr(executor_async, "open_wire", open_late)
    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(close_while_it_connects())
        connects.set()
        eventually(lambda: not connecting(), "it has connected")
        eventually(lambda: not backends(postgres_url), "its session is closed")


async def test_a_timeout_is_kept_while_the_server_closes_every_session(
    postgres_url: str, server_closes: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_async, "SWEEP", 0.1)
    async with holdfast.AsyncClient(postgres_url) as other, holdfast.AsyncClient(postgres_url, **TWO) as client:
        kept = await other.lock("b").acquire()
        await (await client.lock("a").acquire()).release()
        assert await client.lock("b").try_acquire() is None
        with pytest.raises(holdfast.AcquireTimeout):
            await client.lock("b").acquire(timeout=0.1)
        pool = core(client).pool
        await until(lambda: len(pool.closing) == 2, "both are being closed")
        with pytest.raises((holdfast.AcquireTimeout, holdfast.Unreachable)):
            await client.lock("c").acquire(timeout=0.5)  # several sweeps
        assert not server_closes.is_set()
        server_closes.set()
        await kept.release()


def test_a_session_is_closed_where_no_descriptor_is_left_to_wait_for_the_server(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def dup(self, _: int) -> int:
            raise OSError(24, "Too many open files")

    with holdfast.Client(postgres_url) as client:
        client.lock("a").acquire().release()
        [session] = core(client).pool.holds
        monkeypatch.setattr(postgres, "os", Os())
        eventually(lambda: session.over and not core(client).pool.closing, "it is idle, and closed")
        eventually(lambda: session.wire.pid not in backends(postgres_url), "it has ended")


@pytest.mark.parametrize("end", ["cut", "stuck"])
def test_a_session_that_ends_while_the_finisher_waits_for_its_answer_is_closed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its caller timed out, and will not let go of it."""
    with Proxy(postgres_url) as link, holdfast.Client(link.url) as client:
        other = client.lock("other").acquire()
        eventually(lambda: is_idle(client), "there is a session to use")
        [session] = core(client).pool.holds
        link.stall("to_client")
        with pytest.raises((holdfast.AcquireTimeout, holdfast.EngineError)):
            client.lock("a").acquire(timeout=0.05)
        eventually(lambda: session in core(client)._draining, "the finisher reads what is outstanding")
        if end == "cut":
            link.cut()
        else:
            monkeypatch.setattr(executor_async, "SWEEP", 0.02)
            monkeypatch.setattr(executor_async, "CALL_TIMEOUT", 0.1)
        eventually(lambda: other.lost, "every grant on it is reported lost")
        eventually(lambda: session.wire._pgconn.status == pq.ConnStatus.BAD, "its descriptor is closed")
        assert not core(client)._still_used
        link.heal()


def test_the_finisher_gives_a_session_back_whose_caller_was_interrupted(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between sending and hearing: the key in doubt is unlocked, and nothing else is lost."""

    class Interrupted:
        def __init__(self, poll: Any) -> None:
            self.poll = poll

        def __call__(self, patience: float | None) -> Any:
            session.wire._poll = self.poll
            raise KeyboardInterrupt

    with holdfast.Client(postgres_url) as other_client, holdfast.Client(postgres_url) as client:
        other = client.lock("other").acquire()
        eventually(lambda: is_idle(client), "there is a session to use")
        [session] = core(client).pool.holds
        session.wire._poll = Interrupted(session.wire._poll)
        with pytest.raises(KeyboardInterrupt):
            client.lock("a").acquire(timeout=PATIENCE)
        other_client.lock("a").acquire(timeout=PATIENCE).release()
        client.lock("a").acquire(timeout=PATIENCE).release()
        assert core(client).pool.holds == [session]
        assert not session.over
        assert not other.lost
        assert backends(postgres_url).count(session.wire.pid) == 1


def test_a_session_whose_sender_met_an_interrupted_event_is_closed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event was another thread's, which has not yet reported its interrupt."""
    real = PostgresLockWire.run

    def run(wire: PostgresLockWire, *arguments: Any) -> bool | None:
        answer = real(wire, *arguments)
        core(client).pool.writer = "an event that was interrupted"
        return answer

    with holdfast.Client(postgres_url) as client:
        grant = client.lock("a").acquire()
        [session] = core(client).pool.holds
        monkeypatch.setattr(PostgresLockWire, "run", run)
        grant.release()
        monkeypatch.setattr(PostgresLockWire, "run", real)
        core(client).post(core(client).recover)
        eventually(lambda: session.wire._pgconn.status == pq.ConnStatus.BAD, "its descriptor is closed")
        assert session.over
        assert not core(client)._still_used
