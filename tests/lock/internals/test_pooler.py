"""Through a pooler: where it hands sessions round, locks are refused by name; where it does not, they work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.database.postgres import PostgresSession
from holdfast.lock import pooler as detection
from holdfast.testing import Pooler
from tests.conftest import fresh
from tests.lock.looks import advisory

Connect = Callable[..., Any]
needs_pgbouncer = pytest.mark.usefixtures("needs_pgbouncer")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a server is remembered in the process: here every test begins without."""
    monkeypatch.setattr(detection, "_stay", set())


def test_a_pooler_in_transaction_mode_is_refused_by_name(connect: Connect, pooled_url: str, postgres_url: str) -> None:
    client = connect(pooled_url)
    for attempt in (client.lock("a").acquire, client.lock("a").try_acquire, client.lock(("agent", 7)).acquire):
        with pytest.raises(holdfast.SessionUnsafe, match=r"pooler.*lock_url="):
            attempt()
    assert advisory(postgres_url) == [], "nothing was locked before it was known"


@needs_pgbouncer
@pytest.mark.parametrize("size", [1, 5])
def test_it_is_found_out_whatever_the_size_of_the_pool(postgres_url: str, size: int) -> None:
    with (
        Pooler(postgres_url, size=size) as through,
        holdfast.Client(through.url) as client,
        pytest.raises(holdfast.SessionUnsafe),
    ):
        client.lock("a").acquire()


@needs_pgbouncer
def test_it_is_found_out_while_others_use_the_pool(postgres_url: str) -> None:
    with Pooler(postgres_url, size=3) as through:
        clients = [holdfast.Client(through.url) for _ in range(4)]
        for client in clients:
            client.leases.list()
        for client in clients:
            with pytest.raises(holdfast.SessionUnsafe):
                client.lock("a").acquire()
            client.close()


def test_a_direct_url_beside_the_pooler(connect: Connect, pooled_url: str, postgres_url: str) -> None:
    client, other = connect(pooled_url, lock_url=postgres_url), connect(postgres_url)
    with client.lock("a"), client.lock(("agent", 7)), client.lease("import", ttl=60) as lease:
        assert other.lock("a").try_acquire() is None
        assert other.lock(("agent", 7)).try_acquire() is None
        lease.check()
    assert other.lock("a").try_acquire() is not None


def test_a_listing_does_not_show_the_key_of_the_check(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second session of the check is still open here: a server may notice late that it was closed."""
    sessions: list[PostgresSession] = []
    client = connect(postgres_url)
    with monkeypatch.context() as patch:
        patch.setattr(PostgresSession, "close", lambda session: sessions.append(session))
        with client.lock("a"):
            assert [each.name for each in client.locks.list()] == ["a"]
    assert sessions
    for session in sessions:
        session.close()


@needs_pgbouncer
def test_session_mode_is_as_good_as_none(postgres_url: str) -> None:
    with (
        Pooler(postgres_url, mode="session", size=10) as through,
        holdfast.Client(through.url) as client,
        holdfast.Client(postgres_url) as other,
    ):
        with client.lock("a"):
            assert other.lock("a").try_acquire() is None
            with pytest.raises(holdfast.AcquireTimeout):
                other.lock("a").acquire(timeout=0.05)
        with other.lock("a"), pytest.raises(holdfast.AcquireTimeout):
            client.lock("a").acquire(timeout=0.1)


def test_a_lock_url_to_another_database_is_found_out_at_first_use(connect: Connect, postgres_url: str) -> None:
    """Of the same server, even: it would exclude nobody. Whichever way the first lock is asked for."""
    client = connect(postgres_url, lock_url=fresh())
    for take in (client.lock("a").acquire, client.lock("a").try_acquire, client.lock(("agent", 7)).acquire):
        with pytest.raises(holdfast.SessionUnsafe, match="another database"):
            take()
    assert advisory(postgres_url) == []


def test_a_lock_url_to_another_file_or_kind_of_database_is_a_mistake(sqlite_url: str, postgres_url: str) -> None:
    for other in (postgres_url, f"{sqlite_url}2"):
        with pytest.raises(ValueError, match="lock_url"):
            holdfast.Client(sqlite_url, lock_url=other)
    with pytest.raises(ValueError, match="lock_url"):
        holdfast.Client(postgres_url, lock_url=sqlite_url)
    holdfast.Client(sqlite_url, lock_url=sqlite_url).close()
