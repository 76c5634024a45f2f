"""failover="session": a standby takes over when the holder's session ends, long before the TTL; TTL leases stay."""

from __future__ import annotations

import logging
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.database import background
from holdfast.database.statements import statements
from holdfast.testing import Postgres
from tests.children import NONE, OURS, PATIENCE, Child, backends, eventually, query, rows
from tests.conftest import migrated
from tests.pairs import EACH_ONCE, ONE_FLAVOUR

HOUR = 3600.0


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """What is said to that logger, as it is said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


_HOLDER = """
import sys, holdfast
client = holdfast.Client(sys.argv[1])
term = client.lease("term", ttl=3600, failover="session").acquire()
plain = client.lease("plain", ttl=3600).acquire()
print("held")
for _ in sys.stdin:
    print("lost" if term.lost else "held", "lost" if plain.lost else "held")
"""


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    with Postgres.create() as server:
        yield server


@ONE_FLAVOUR
def test_a_lease_lost_with_its_session_and_then_released_leaves_nothing(
    connect: Callable[..., Any], postgres_url: str
) -> None:
    """Its beat is ended with the last grant on it: nobody need wait for a TTL, or for somebody's next purge."""
    client = connect(postgres_url)
    grants = [client.lease(name, ttl=HOUR, failover="session").acquire() for name in ("a", "b")]
    query(postgres_url, f"select pg_terminate_backend(pid) from pg_stat_activity where {OURS}")
    for grant in grants:
        eventually(lambda grant=grant: grant.lost, "it is lost with the session")  # type: ignore[misc]
        assert rows(postgres_url)["beat"] == 1, "while one of them may still be at work"
        assert grant.release()
    client.close()
    eventually(lambda: rows(postgres_url) == NONE, "the beat is gone")


@EACH_ONCE
def test_a_killed_holder_is_succeeded_long_before_its_ttl(connect: Callable[..., Any], either: str) -> None:
    """And its TTL lease is not: only what was taken with failover="session" goes with the session."""
    client = connect(either)
    with Child(_HOLDER, either) as holder:
        holder.expect("held")
        assert client.lease("term", ttl=HOUR).try_acquire() is None
        holder.kill()
        with client.lease("term", ttl=HOUR, timeout=PATIENCE) as grant:
            assert not grant.lost
        assert client.lease("plain", ttl=HOUR).try_acquire() is None
    [past] = [each for each in client.leases.history("term") if each.outcome != "released"]
    assert past.outcome == "session_lost"


@EACH_ONCE
def test_a_standby_that_waits_already_is_woken_by_the_kill(connect: Callable[..., Any], either: str) -> None:
    """On PostgreSQL by the server, and not by its own polling."""
    client, got = connect(either), threading.Event()
    if either.startswith("postgres"):
        getattr(client, "_inner", client)._engine.poll = 1e6

    def stand_by() -> None:
        client.lease("term", ttl=HOUR, timeout=600, failover="session").acquire()
        got.set()

    with Child(_HOLDER, either) as holder:
        holder.expect("held")
        standby = threading.Thread(target=stand_by)
        standby.start()
        if either.startswith("postgres"):
            eventually(lambda: query(either, VIGILS) == [(1,)], "it watches the holder's session")
        assert not got.wait(0.1)
        holder.kill()
        assert got.wait(PATIENCE)
        standby.join()


def test_a_vigil_is_begun_anew_now_and_then(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as its statement waits, vacuum removes nothing that has died since."""
    known = statements("postgres", "holdfast")
    hasty = known["wait_long"]._replace(sql=known["wait_long"].sql.replace("10min", "20ms"))
    monkeypatch.setitem(known._parsed, "wait_long", hasty)
    seen: set[Any] = set()

    def begins() -> bool:
        seen.update(query(postgres_url, "select pid from pg_locks where locktype = 'advisory' and not granted"))
        return len(seen) > 2

    with holdfast.Client(postgres_url) as client, Child(_HOLDER, postgres_url) as holder, ThreadPoolExecutor() as pool:
        holder.expect("held")
        standby = pool.submit(client.lease("term", ttl=HOUR, timeout=600).acquire)
        eventually(begins, "it has been begun anew")
        holder.kill()
        assert not standby.result(PATIENCE).lost


@EACH_ONCE
def test_a_stopped_holder_keeps_its_session_and_its_lease(connect: Callable[..., Any], either: str) -> None:
    """SIGSTOP is no end: the server and the kernel still see the session, and only the TTL decides."""
    client = connect(either)
    with Child(_HOLDER, either) as holder:
        holder.expect("held")
        holder.signal(signal.SIGSTOP)
        assert client.lease("term", ttl=HOUR, timeout=0.5).try_acquire() is None
        holder.signal(signal.SIGCONT)
        holder.say("?")
        holder.expect("held held")


def test_the_holder_whose_session_is_ended_is_told_and_its_ttl_leases_stay(postgres_url: str) -> None:
    """A keeper that reconnects must not take its other leases down."""
    told: list[Any] = []
    with holdfast.Client(postgres_url) as client, holdfast.Client(postgres_url) as other:
        term = client.lease("term", ttl=HOUR, failover="session", on_lost=told.append).acquire()
        plain = client.lease("plain", ttl=60, renew_every=0.05, on_lost=told.append).acquire()
        assert rows(postgres_url) == {"lease": 2, "beat": 2}
        for pid in backends(postgres_url):
            query(postgres_url, "select pg_terminate_backend(%s)", pid)
        eventually(lambda: term.lost, "the holder is told")
        with pytest.raises(holdfast.OwnershipUnknown):
            term.check()
        successor = other.lease("term", ttl=HOUR, timeout=PATIENCE).acquire()
        assert successor.fence > term.fence
        beats = query(postgres_url, "select xmin::text from holdfast.beat where ttl = interval '60 s'")
        eventually(
            lambda: query(postgres_url, "select xmin::text from holdfast.beat where ttl = interval '60 s'") != beats,
            "the heartbeat of the other lease goes on",
        )
        plain.check()
        assert told == [term]
        again = client.lease("again", ttl=HOUR, failover="session").acquire()
        assert not again.lost


@pytest.mark.parametrize("failover", ["ttl", "session"])
def test_a_file_is_the_same_by_whatever_name(tmp_path: Path, failover: Any) -> None:
    """The locks that stand for a session are in files beside it: beside the file itself, not beside a link to it."""
    (tmp_path / "folder").mkdir()
    real = tmp_path / "folder" / "app.db"
    real.touch()
    (tmp_path / "link.db").symlink_to(real)
    (tmp_path / "shelf").symlink_to(tmp_path / "folder")
    with holdfast.Client(f"sqlite:///{real}") as client:
        grant = client.lease("term", ttl=HOUR, failover=failover).acquire()
        for path in (tmp_path / "link.db", tmp_path / "shelf" / "app.db", tmp_path / "folder" / ".." / "link.db"):
            with holdfast.Client(f"sqlite:///{path}") as other:
                assert other.lease("term", ttl=HOUR, failover=failover).try_acquire() is None, path
        grant.check()
    assert {each.name for each in tmp_path.iterdir()} == {"folder", "link.db", "shelf"}


@EACH_ONCE
def test_release_hands_a_session_lease_over_as_any_other(connect: Callable[..., Any], either: str) -> None:
    client = connect(either)
    with client.lease("term", ttl=HOUR, failover="session") as grant:
        assert rows(either) == {"lease": 1, "beat": 1}
    with client.lease("term", ttl=HOUR, failover="session") as successor:
        assert successor.fence > grant.fence
    client.close()
    assert rows(either) == NONE


def test_after_a_server_restart_the_ttl_decides(own_server: Postgres) -> None:
    """No session has survived, so a missing one says nothing about its holder."""
    url = migrated(own_server.database())
    with Child(_HOLDER, url) as holder:
        holder.expect("held")
        holder.signal(signal.SIGSTOP)  # it cannot say goodbye
        own_server.restart("immediate")
        with holdfast.Client(url) as client:
            assert client.lease("term", ttl=4).try_acquire() is None
            record = client.leases.get("term")
            assert record is not None
            query(url, "update holdfast.beat set expires_at = started")
            grant = client.lease("term", ttl=4).acquire()
            assert grant.fence > record.fence
            [past] = client.leases.history("term")
            assert past.outcome == "expired"


VIGILS = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


def test_sessions_are_watched_as_many_as_may_be_and_each_by_one_connection(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two leases of one holder need one vigil; beyond the limit standbys poll, and take over all the same."""
    monkeypatch.setattr("holdfast.database.listener.MAX_WATCHED_SESSIONS", 1)
    program = """
    import sys, holdfast
    client = holdfast.Client(sys.argv[1])
    for name in sys.argv[2:]:
        client.lease(name, ttl=3600, failover="session").acquire()
    print("held")
    input()
    """
    names = ["a", "b", "c"]
    with (
        Child(program, postgres_url, "a", "b") as one,
        Child(program, postgres_url, "c") as other,
        holdfast.Client(postgres_url) as standby,
        ThreadPoolExecutor(3) as pool,
    ):
        one.expect("held")
        other.expect("held")
        asked = [pool.submit(standby.lease(name, ttl=HOUR, timeout=600).acquire) for name in names]
        eventually(lambda: query(postgres_url, VIGILS) == [(1,)], "one session is watched")
        for each in (one, other):
            each.kill()
        assert [each.result(PATIENCE).name for each in asked] == names


def test_a_writer_that_holds_up_a_heartbeat_does_not_end_the_session(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is busy, the session is not gone: on SQLite there is nothing that a heartbeat could lose it by."""
    monkeypatch.setattr("holdfast.lease.keeper.budget", lambda left: 0.2)
    with holdfast.Client(sqlite_url) as client, holdfast.Client(sqlite_url) as standby:
        term = client.lease("term", ttl=600, renew_every=0.1, failover="session").acquire()
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as writer:
            with logged("holdfast.keeper") as said:
                writer.execute("begin immediate")
                eventually(lambda: any("heartbeat" in text and "failed" in text for text in said), "a heartbeat fails")
            writer.execute("rollback")
        monkeypatch.undo()
        with pytest.raises(holdfast.NotAcquired):
            standby.lease("term", ttl=600, failover="session").acquire()
        term.renew()
        term.check()


def test_an_acquire_that_takes_long_keeps_its_session(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session had no other use yet, and was closed after a moment of idleness: the lease was lost at once."""
    monkeypatch.setattr(background, "LINGER", 0.02)
    blocked = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query ~ 'lease_acquire'"
    with (
        psycopg.connect(postgres_url) as other,
        holdfast.Client(postgres_url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        other.execute("lock table holdfast.lease in access exclusive mode")
        acquiring = pool.submit(client.lease("term", ttl=HOUR, failover="session").acquire)
        eventually(lambda: query(postgres_url, blocked), "it waits for the table")
        threading.Event().wait(0.5)  # nothing happens now, and nothing may
        other.rollback()
        grant = acquiring.result(PATIENCE)
        grant.check()
        assert grant.release() is True
    eventually(lambda: backends(postgres_url) == [], "no session outlives what it was for")
