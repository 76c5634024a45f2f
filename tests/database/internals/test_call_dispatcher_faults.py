"""What a caller is told when its batch is late, cannot be sent, or loses the thread that sends it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import MatchVersion, MustCreate
from holdfast.database.sqlite import SqliteSession
from holdfast.testing import Proxy
from tests.children import PATIENCE, eventually, query, until


@pytest.fixture
def run() -> Any:
    """Calls of a client by callers of their own: threads."""
    with ThreadPoolExecutor(20) as pool:
        yield lambda function, *args: pool.submit(function, *args)


def await_waiting(client: Any, number: int) -> None:
    eventually(lambda: len(client._engine._dispatcher._queue.waiting) >= number, f"{number} calls wait")


BOTH = pytest.mark.parametrize("connect", ["sync", "async"], indirect=True)


@BOTH
def test_what_was_late_while_a_session_was_opened_is_not_sent(
    connect: Callable[..., Any], postgres_url: str, run: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for flavour in ("", "_async"):  # an acquire with a short timeout would give the database a second
        monkeypatch.setattr(f"holdfast.lease.handle{flavour}._MIN_TIMEOUT", 0.1)
    with Proxy(postgres_url) as proxy:
        client = connect(proxy.url)
        proxy.stall()
        first = run(lambda: client.lease("first", ttl=600).acquire(timeout=0.3))
        eventually(lambda: proxy.connections, "the first call opens a session")
        patient = run(client.objects.put_if, "box", "b-1", 1, MustCreate())
        late = run(lambda: client.lease("late", ttl=600).acquire(timeout=0.6))
        errors = [first.exception(PATIENCE), late.exception(PATIENCE)]
        proxy.heal()
        patient.result(PATIENCE)
        assert all(isinstance(error, holdfast.EngineError) for error in errors)
        held = [name for (name,) in query(postgres_url, "select name from holdfast.lease")]
        assert not getattr(errors[1], "certain", True) or "late" not in held, f"{errors[1]!r}, and {held} are held"


async def test_a_call_ends_when_its_client_is_closed_while_it_opens_a_session(postgres_url: str) -> None:
    with Proxy(postgres_url) as proxy:
        client = holdfast.AsyncClient(proxy.url)
        proxy.stall()
        call = asyncio.create_task(client.objects.put_if("box", "b-1", 1, MustCreate()))
        await until(lambda: proxy.connections, "the call opens a session")
        await client.close()
        proxy.heal()
        done, _ = await asyncio.wait([call], timeout=PATIENCE)
        assert done, "the call hangs"
        assert isinstance(call.exception(), holdfast.EngineError)


@BOTH
def test_where_calls_do_not_share_a_transaction_they_are_sent_in_their_order(
    connect: Callable[..., Any], postgres_url: str, run: Callable[..., Future[Any]]
) -> None:
    """As through a pooler: a name that sorts last waits no longer than others."""
    client = connect(postgres_url, sessions=1)
    client.objects.put_if("box", "first", 1, MustCreate())
    [session] = client._engine._dispatcher.sessions
    getattr(session, "_inner", session).shares = False
    names = [f"b-{number}" for number in range(9, 0, -1)]
    with psycopg.connect(postgres_url) as other:
        other.execute("lock table holdfast.object in exclusive mode")
        calls = []
        for number, name in enumerate(names):
            calls.append(run(client.objects.put_if, "box", name, 1, MustCreate()))
            await_waiting(client, number)
            eventually(client._engine._dispatcher.is_busy, "the first call is sent")
    versions = [call.result(PATIENCE).version for call in calls]
    assert versions == sorted(versions)


def test_on_sqlite_a_write_is_known_though_the_thread_that_sent_it_was_interrupted(
    sqlite_url: str, run: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes share a transaction, and the thread that sends both is interrupted after the commit."""
    together = SqliteSession.call_together

    def interrupted(self: SqliteSession, calls: Any, timeout: float) -> Any:
        together(self, calls, timeout)
        raise KeyboardInterrupt

    with holdfast.Client(sqlite_url) as client:
        versions = [client.objects.put_if("box", f"b-{each}", 0, MustCreate()).version for each in (1, 2)]
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as other:
            other.execute("begin immediate")
            first = run(client.objects.put_if, "box", "b-0", 1, MustCreate())
            eventually(client._engine._dispatcher.is_busy, "the first call is sent")
            calls = []
            for number, version in enumerate(versions, 1):
                calls.append(run(client.objects.put_if, "box", f"b-{number}", 1, MatchVersion(version)))
                await_waiting(client, number)
            monkeypatch.setattr(SqliteSession, "call_together", interrupted)
            other.execute("rollback")
        first.result(PATIENCE)
        errors = [call.exception(PATIENCE) for call in calls]
        monkeypatch.undo()
        [neighbour] = [error for error in errors if not isinstance(error, KeyboardInterrupt)]
        assert neighbour is None or not getattr(neighbour, "certain", True), f"it was written, and told {neighbour!r}"
