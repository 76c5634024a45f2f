"""A synchronous pair: the primary dies, the standby is promoted, leases go on or are told lost, fences rise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing import Postgres
from tests.children import PATIENCE, eventually, query
from tests.conftest import migrated


@pytest.fixture
def pair() -> Iterator[tuple[Postgres, Postgres, str]]:
    """A primary that the test may kill, its synchronous standby, and a URL that names both."""
    with make_pair() as made:
        yield made


@pytest.fixture(scope="module")
def lasting_pair() -> Iterator[tuple[Postgres, Postgres, str]]:
    """The same for tests that leave both as they were."""
    with make_pair() as made:
        yield made


RAISED_FOR = "select last_value from holdfast.raised_for"
"""For which life of a server fences were raised."""


@contextmanager
def make_pair() -> Iterator[tuple[Postgres, Postgres, str]]:
    with Postgres.create() as primary:
        standby = primary.standby(synchronous=True)
        url = migrated(primary.database("app"))
        both = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/app"
        assert url.endswith("/app")
        yield primary, standby, both


def test_leases_outlive_the_primary_and_fences_rise(pair: tuple[Postgres, Postgres, str]) -> None:
    primary, standby, url = pair
    here = f"postgresql://postgres@127.0.0.1:{standby.port}/app"
    with holdfast.Client(url) as client, promoted_under(here, standby) as take:
        grants = [client.lease(f"lease-{number}", ttl=600, renew_every=0.2).acquire() for number in range(20)]
        top, raised_for = max(grant.fence for grant in grants), query(here, RAISED_FOR)
        primary.kill()
        standby.promote()
        eventually(lambda: client_sees(client) == 20, "the client finds the new primary by itself")
        before = query(here, "select xmin::text from holdfast.beat")
        eventually(lambda: query(here, "select xmin::text from holdfast.beat") != before, "heartbeats reach it")
        assert not any(grant.lost for grant in grants)
        with client.lease("after", ttl=600) as after:
            assert after.fence > top
        assert query(here, RAISED_FOR) != raised_for, "raised by the clock: higher even if commits had been lost"
        assert after.fence < take() < after.fence + 1_000_000, "the open session draws from the raised sequence"
        assert grants[0].release()
        with client.lease("lease-0", ttl=600) as successor:
            assert successor.fence > after.fence
        primary.rewind(standby, synchronous=True)
        with client.lease("rejoined", ttl=600) as again:
            assert again.fence > successor.fence
        assert not any(grant.lost for grant in grants[1:])


@contextmanager
def promoted_under(here: str, standby: Postgres) -> Iterator[Callable[[], int]]:
    """An open session of the standby, which is refused a lease now. Yields what takes one in it after the promotion.

    The server is promoted under an open connection: what was read when it was made would be stale.
    """
    take = "select fence from holdfast.lease_acquire('through', 'psql', 30)"
    replayed = "select count(*) from pg_database where datname = 'app'"
    eventually(lambda: standby.execute(replayed) == [(1,)], "the standby has replayed it")
    with psycopg.connect(here, autocommit=True) as session:
        known = "select to_regclass('holdfast.lease') is not null"
        eventually(lambda: session.execute(known).fetchone() == (True,), "our tables, too")
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match="read-only"):
            session.execute(take)
        yield lambda: int((session.execute(take).fetchone() or [0])[0])


def test_a_failover_longer_than_the_ttl_is_told_as_a_loss(pair: tuple[Postgres, Postgres, str]) -> None:
    """Nobody is promoted until it is too late: the holder is told before anybody else can have it."""
    primary, standby, url = pair
    told: list[Any] = []
    with holdfast.Client(url) as client, holdfast.Client(url) as other:
        long = client.lease("long", ttl=3600).acquire()
        for ttl in (1.5, 8.0, 32.0):  # if the machine pauses, the first may be lost before the primary goes
            told.clear()
            grant = client.lease("a", ttl=ttl, on_lost=told.append, timeout=PATIENCE).acquire()
            primary.kill()
            if not grant.lost:
                break
            primary.start()
        eventually(lambda: told, "the loss is told")
        with pytest.raises(holdfast.OwnershipUnknown):
            grant.check()
        standby.promote()
        eventually(lambda: client_sees(other) >= 0, "the new primary is found")
        heir = other.lease("a", ttl=600, timeout=PATIENCE).acquire()
        assert heir.fence > grant.fence
        assert grant.lost
        assert told == [grant]
        long.renew()


def client_sees(client: holdfast.Client) -> int:
    try:
        return len(client.leases.list())
    except holdfast.EngineError:
        return -1


def cancel_commit_waits(server: Postgres, stop: threading.Event) -> None:
    """What an operator does whose standby is gone: every commit that waits is cancelled, with a warning."""
    while not stop.wait(0.02):
        server.execute(
            "select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'"
            " and (application_name = 'user' or application_name like 'holdfast:%')"
        )


def test_a_commit_nobody_else_has_is_no_grant_and_no_heartbeat(lasting_pair: tuple[Postgres, Postgres, str]) -> None:
    """The server answers success with a warning; taken for a success, it would be two holders after a failover."""
    primary, standby, url = lasting_pair
    with holdfast.Client(url) as client:
        held = client.lease("held", ttl=2, renew_every=0.1).acquire()
        standby.stop()
        over = threading.Event()
        operator = threading.Thread(target=cancel_commit_waits, args=(primary, over))
        operator.start()
        try:
            for number in range(2):
                with pytest.raises(holdfast.EngineError):
                    client.lease(f"new-{number}", ttl=60).acquire()
            eventually(lambda: held.lost, "no trust grows out of such heartbeats")
            with pytest.raises(holdfast.OwnershipUnknown):
                held.check()
        finally:
            over.set()
            operator.join()
        standby.start()
        eventually(lambda: client_sees(client) == 0, "what was in doubt is given back when the pair is whole")
        with client.lease("new-0", ttl=60), client.lease("held", ttl=60):
            pass


def test_a_protected_commit_that_nobody_else_has_is_an_error(lasting_pair: tuple[Postgres, Postgres, str]) -> None:
    """To the driver it is a success. A warning of the user's own at the commit is none of our business."""
    primary, standby, url = lasting_pair
    with (
        holdfast.Client(url) as client,
        psycopg.connect(url, application_name="user", autocommit=True, target_session_attrs="read-write") as connection,
    ):
        connection.execute("create table effect (number int)")
        connection.execute(
            "create function warn() returns trigger language plpgsql as"
            " $$ begin raise warning 'look out'; return null; end $$"
        )
        connection.execute(
            "create constraint trigger warning after insert on effect deferrable initially deferred"
            " for each row execute function warn()"
        )
        grant = client.lease("protecting", ttl=3600).acquire()
        with grant.transaction(connection):
            connection.execute("insert into effect values (1)")
        standby.stop()
        over = threading.Event()
        operator = threading.Thread(target=cancel_commit_waits, args=(primary, over))
        operator.start()
        try:
            with pytest.raises(holdfast.EngineError, match="may be lost"), grant.transaction(connection):
                connection.execute("insert into effect values (2)")
        finally:
            over.set()
            operator.join()
        assert connection.execute("select count(*) from effect").fetchone() == (2,)
        standby.start()
        with grant.transaction(connection):
            connection.execute("insert into effect values (3)")
