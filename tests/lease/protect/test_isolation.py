"""Protection at every isolation level: snapshots that hide the takeover, and conflicts that are none of the lease's."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import EngineError, FencedOut
from tests.children import PATIENCE, eventually
from tests.user_connections import ask, make_table

FORMS = pytest.mark.parametrize("at", ["start", "commit"])
EXPIRE = """
update holdfast.beat set expires_at = clock_timestamp() where id = (select beat from holdfast.lease where name = %s)
"""


@FORMS
@pytest.mark.parametrize("isolation", psycopg.IsolationLevel)
def test_after_a_forced_release_the_old_holder_cannot_commit(
    url: str, client: holdfast.Client, name: str, at: Any, isolation: psycopg.IsolationLevel
) -> None:
    """Its beat is alive, and its snapshot shows the lease as it was: only the row itself can tell."""
    table = make_table(url)
    grant = client.lease(name).acquire()

    def commit() -> None:
        grant.protect(connection, at=at)
        connection.execute(f"insert into {table} values ('stale')".encode())
        connection.commit()

    with psycopg.connect(url) as connection:
        connection.isolation_level = isolation
        connection.execute("select 1")
        assert client.leases.force_release(name, actor="test", reason="stuck")
        with pytest.raises(FencedOut):
            commit()
        connection.rollback()
    assert ask(url, f"select what from {table}") == []


KEEPS = [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE]
KEEPING = pytest.mark.parametrize("isolation", KEEPS)


def test_a_snapshot_older_than_the_last_heartbeat_is_no_reason_to_refuse(
    url: str, client: holdfast.Client, name: str
) -> None:
    """It shows a beat that would be over by now. The row of the lease is what a takeover must have, and is locked.

    Every form at every level that keeps its snapshot: all of them grow old at the same time."""
    table = make_table(url)
    grant = client.lease(name, ttl=600).acquire()
    expire = """
        update holdfast.beat set expires_at = clock_timestamp() + make_interval(secs => %s)
        where id = (select beat from holdfast.lease where name = %s)
    """
    ask(url, expire, 1, name)
    shown = """
        select extract(epoch from b.expires_at) from holdfast.lease l join holdfast.beat b on b.id = l.beat
        where l.name = %s
    """
    old: list[tuple[Any, psycopg.Connection[Any], str]] = []
    with ExitStack() as stack:
        for at, isolation in product(("start", "commit"), KEEPS):
            connection = stack.enter_context(psycopg.connect(url))
            connection.isolation_level = isolation
            [[until]] = connection.execute(shown, [name]).fetchall()
            old.append((at, connection, until))
        ask(url, expire, 600, name)  # as a heartbeat does
        latest = max(until for _, _, until in old)
        eventually(lambda: ask(url, "select extract(epoch from clock_timestamp()) > %s", latest) == [(True,)], "is old")
        for at, connection, _ in old:
            assert grant.protect(connection, at=at) == grant.fence
            connection.execute(f"insert into {table} values ('held')".encode())
            connection.commit()
    assert not grant.lost
    assert ask(url, f"select what from {table}") == [("held",)] * 4


@FORMS
@pytest.mark.parametrize("isolation", psycopg.IsolationLevel)
def test_a_transaction_begun_when_the_beat_was_over_is_refused(
    url: str, client: holdfast.Client, name: str, at: Any, isolation: psycopg.IsolationLevel
) -> None:
    """Nobody has taken it over yet; but a holder that goes on beginning transactions would never let anybody."""
    grant = client.lease(name, ttl=0.1, auto_renew=False).acquire()
    eventually(lambda: client.leases.get(name) is None, "it has expired")
    with psycopg.connect(url) as connection:
        connection.isolation_level = isolation
        with pytest.raises(FencedOut):
            grant.protect(connection, at=at)
        connection.rollback()


def test_time_is_that_of_the_question_and_not_of_the_beginning_of_the_transaction(
    url: str, client: holdfast.Client, name: str
) -> None:
    """Its lease was alive when they began: what is over meanwhile is over, and a TTL is counted from now."""
    grant = client.lease(name, ttl=600, auto_renew=False).acquire()
    with ExitStack() as stack:
        first, second, thief = (stack.enter_context(psycopg.connect(url)) for _ in range(3))
        for connection in (first, second, thief):
            assert connection.execute("select name from holdfast.lease_list(%s)", [name]).fetchall() == [(name,)]
        ask(url, EXPIRE, name)
        with pytest.raises(FencedOut):
            grant.protect(first)
        with pytest.raises(FencedOut):
            grant.protect(second, at="commit")
        [[from_now]] = thief.execute("select extract(epoch from clock_timestamp()) + 30").fetchall()
        taken = thief.execute("select status from holdfast.lease_acquire(%s, 'thief', 30)", [name]).fetchall()
        [[until]] = thief.execute("select expires_at from holdfast.lease_list(%s)", [name]).fetchall()
        for connection in (first, second, thief):
            connection.rollback()
    assert taken == [("taken_over",)]
    assert until >= float(from_now)


@FORMS
@KEEPING
def test_an_old_snapshot_does_not_hide_a_takeover(
    url: str, client: holdfast.Client, name: str, at: Any, isolation: psycopg.IsolationLevel
) -> None:
    """The beat lived when the transaction began, and the snapshot shows it so for ever."""
    grant = client.lease(name, ttl=0.2, auto_renew=False).acquire()
    with psycopg.connect(url) as connection:
        connection.isolation_level = isolation
        connection.execute("select 1")
        assert client.lease(name).acquire(timeout=PATIENCE).fence > grant.fence

        def commit() -> None:
            grant.protect(connection, at=at)
            connection.commit()

        with pytest.raises(FencedOut):
            commit()
        connection.rollback()


@FORMS
@KEEPING
def test_a_snapshot_older_than_the_lease_is_refused_and_no_loss(
    url: str, client: holdfast.Client, name: str, at: Any, isolation: psycopg.IsolationLevel
) -> None:
    """There is no such lease in it, and what it has read is from before: but nobody has taken it from its holder."""
    with psycopg.connect(url) as connection:
        connection.isolation_level = isolation
        connection.execute("select 1")
        grant = client.lease(name).acquire()
        with pytest.raises(EngineError, match=rf"{name}.*began before the lease was acquired"):
            grant.protect(connection, at=at)
        connection.rollback()
        assert grant.protect(connection, at=at) == grant.fence
        grant.check()


@FORMS
def test_of_two_leases_over_a_transaction_only_the_one_that_has_passed_on_is_lost(
    url: str, client: holdfast.Client, name: str, at: Any
) -> None:
    """Refused when the second one protects it, or when it commits."""
    told: list[Any] = []
    kept = client.lease(name, on_lost=told.append).acquire()
    gone = client.lease(f"{name}-gone").acquire()

    def take_away() -> None:
        assert client.leases.force_release(gone.name, actor="test", reason="stuck")

    def under_both() -> None:
        with psycopg.connect(url) as connection, kept.transaction(connection):
            before, after = (take_away, int) if at == "start" else (int, take_away)
            before()
            gone.protect(connection, at=at)
            after()

    with pytest.raises(FencedOut):
        under_both()
    kept.check()
    assert told == []


def test_a_bulk_load_that_switches_triggers_off_cannot_commit_either(
    url: str, client: holdfast.Client, name: str
) -> None:
    """``session_replication_role = replica``, set to be rid of foreign keys, leaves out plain triggers."""
    table = make_table(url)
    grant = client.lease(name).acquire()
    with psycopg.connect(url) as connection:
        connection.execute("set local session_replication_role = replica")
        grant.protect(connection, at="commit")
        connection.execute(f"insert into {table} values ('stale')".encode())
        assert client.leases.force_release(name, actor="test", reason="stuck")
        with pytest.raises(FencedOut):
            connection.commit()
    assert ask(url, f"select what from {table}") == []


@FORMS
def test_serializable_transactions_that_protect_different_leases_do_not_conflict(
    url: str, client: holdfast.Client, name: str, at: Any
) -> None:
    """They have nothing in common but holdfast's own tables; which are vacuumed, as they will be: plans change then."""
    grants = [client.lease(f"{name}-{number}").acquire() for number in range(2)]
    ask(url, "vacuum analyze holdfast.commit_check, holdfast.lease, holdfast.beat")
    with psycopg.connect(url) as one, psycopg.connect(url) as two:
        one.isolation_level = two.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        grants[0].protect(one, at=at)
        grants[1].protect(two, at=at)
        one.commit()
        two.commit()


@FORMS
def test_a_conflict_of_the_users_own_serializable_transactions_is_not_told_as_a_lost_lease(
    url: str, client: holdfast.Client, name: str, at: Any
) -> None:
    """Trying again helps there. Each of the two has read what the other writes; the second hears of it when it
    protects, or inside its COMMIT from the check of the lease."""
    table = make_table(url)
    grant = client.lease(name).acquire()
    with psycopg.connect(url) as one, psycopg.connect(url) as two:
        for each in (one, two):
            each.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
            if at == "commit":
                grant.protect(each, at=at)
            each.execute(f"select count(*) from {table}".encode())
        for each in (one, two):
            each.execute(f"insert into {table} values ('skewed')".encode())
        one.commit()
        with pytest.raises((EngineError, psycopg.errors.SerializationFailure), match="read/write dependencies") as told:
            two.commit() if at == "commit" else grant.protect(two)
        assert not isinstance(told.value, FencedOut)
        two.rollback()
    assert len(ask(url, f"select * from {table}")) == 1
