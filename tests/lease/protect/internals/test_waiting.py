"""Who waits for a protected transaction, for how long, and who does not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import EngineError, FencedOut
from holdfast.database.engine import Engine
from tests.children import PATIENCE, eventually, kept
from tests.user_connections import ask, make_table

EXPIRE = """
update holdfast.beat set expires_at = clock_timestamp() where id = (select beat from holdfast.lease where name = %s)
"""
LINGER = EXPIRE.replace("clock_timestamp()", "clock_timestamp() + interval '1 min'")
STATUS = "select status from holdfast.lease_acquire(%s, 'thief', 30)"
FORCING = "select 1 from pg_stat_activity where datname = current_database() and query like '%lease_force_release(%'"


@pytest.fixture
def operator(url: str) -> Iterator[holdfast.Client]:
    """Somebody else: another client, with a connection of its own."""
    with holdfast.Client(url) as made:
        yield made


@pytest.fixture
def connection(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url) as made:
        yield made
        made.rollback()


def limit(connection: psycopg.Connection[Any]) -> str:
    row = connection.execute("show idle_in_transaction_session_timeout").fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.parametrize(
    ("before", "ttl", "within"),
    [("0", 30, "30s"), ("1min", 30, "30s"), ("20s", 30, "20s"), ("0", 0.05, "50ms"), ("7ms", 0.05, "7ms")],
)
def test_a_protected_transaction_may_idle_for_one_ttl_and_never_longer_than_before(
    client: holdfast.Client, connection: psycopg.Connection[Any], name: str, before: str, ttl: float, within: str
) -> None:
    """A limit of 0 would be none at all. All in one message: the shortest strikes as soon as the server waits."""
    connection.autocommit = True  # first: in a transaction, the shortest would end the session before the commit
    connection.execute(f"set idle_in_transaction_session_timeout = '{before}'".encode())
    grant = client.lease(name, ttl=ttl, auto_renew=False).acquire()
    connection.execute(LINGER, [name])
    asked = psycopg.ClientCursor(connection).execute(
        "begin; select holdfast.lease_protect(%s, %s::uuid)::text"
        " || (select ' ' || current_setting('idle_in_transaction_session_timeout')); rollback",
        [grant.name, grant.token],
    )
    asked.nextset()
    row = asked.fetchone()
    assert row is not None
    assert row[0].split() == [str(grant.fence), within]
    assert limit(connection) == before


def test_a_transaction_protected_at_commit_may_idle_as_before(
    client: holdfast.Client, connection: psycopg.Connection[Any], name: str
) -> None:
    """Nobody waits for it, so nothing has to end it."""
    client.lease(name).acquire().protect(connection, at="commit")
    assert limit(connection) == "0"


def test_overlapping_protected_transactions_cannot_starve_a_takeover(
    url: str, client: holdfast.Client, operator: holdfast.Client, name: str
) -> None:
    """There is never a moment without one; but once the beat has expired no new one may begin."""
    grant = client.lease(name).acquire()

    def overlap() -> None:
        with psycopg.connect(url) as one, psycopg.connect(url) as two:
            grant.protect(one)
            for count in range(1_000_000):
                grant.protect((two, one)[count % 2])
                (one, two)[count % 2].commit()
                ready.append(count)

    ready: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        overlapping = pool.submit(overlap)
        eventually(lambda: len(ready) > 20, "they overlap")
        ask(url, EXPIRE, name)
        assert operator.lease(name).acquire(timeout=PATIENCE).fence > grant.fence
        with pytest.raises(FencedOut):
            overlapping.result(PATIENCE)


def test_a_thief_is_told_busy_and_others_of_the_same_dead_beat_go_on(
    url: str, client: holdfast.Client, operator: holdfast.Client, connection: psycopg.Connection[Any], name: str
) -> None:
    grants = [client.lease(f"{name}-{number}").acquire() for number in range(3)]
    grants[0].protect(connection)
    ask(url, EXPIRE, grants[0].name)
    assert operator.lease(grants[0].name).try_acquire() is None
    assert ask(url, STATUS, grants[0].name) == [("busy",)]
    for stolen in grants[1:]:
        assert operator.lease(stolen.name).acquire().fence > stolen.fence
    assert ask(url, STATUS, grants[0].name) == [("busy",)]
    connection.commit()
    assert operator.lease(grants[0].name).acquire().fence > grants[0].fence


def test_an_open_transaction_delays_nobody_else(
    url: str,
    client: holdfast.Client,
    operator: holdfast.Client,
    connection: psycopg.Connection[Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a forced release waits for it, here until it ends, and one from SQL in the server, leases come and go,
    and the heartbeat of the protected one goes on."""
    monkeypatch.setattr("holdfast.lease.admin._PATIENCE", 3600.0)
    monkeypatch.setitem(Engine.call_when_free.__kwdefaults__ or {}, "timeout", 3600.0)
    grant = client.lease(name, ttl=600, renew_every=0.05).acquire()
    grant.protect(connection)

    def release_from_sql() -> None:
        with psycopg.connect(url) as waiting:
            waiting.execute("select holdfast.lease_release(%s, null, %s::uuid)", [name, grant.token])

    with ThreadPoolExecutor(3) as pool, holdfast.Client(url) as bystander:
        from_sql = pool.submit(release_from_sql)
        forced = pool.submit(operator.leases.force_release, name, actor="test", reason="too long")
        eventually(lambda: ask(url, FORCING), "the forced release has asked")

        def others_go_on() -> None:
            for each in (client, operator, bystander):
                with each.lease(f"{name}-other", ttl=60).acquire(), each.lease(f"{name}-another").acquire():
                    assert each.leases.get(name)
            kept(grant, 0.2)

        try:
            pool.submit(others_go_on).result(PATIENCE)
            assert not forced.done()
        finally:
            connection.rollback()
        assert forced.exception(PATIENCE) is None
        from_sql.exception(PATIENCE)


def test_a_release_gives_up_while_a_transaction_is_open(
    url: str,
    client: holdfast.Client,
    operator: holdfast.Client,
    connection: psycopg.Connection[Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forced one; and one from SQL, which waits in the server, in a function that says for how long."""
    monkeypatch.setattr("holdfast.lease.admin._PATIENCE", 0.1)
    grant = client.lease(name, ttl=600).acquire()
    grant.protect(connection)
    with pytest.raises(EngineError, match=f"{name}.* cannot be taken away while"):
        operator.leases.force_release(name, actor="test", reason="too long")
    limited = "select 'lock_timeout=5s' = any(proconfig) from pg_proc where oid = to_regproc('holdfast.lease_await')"
    assert ask(url, limited) == [(True,)]
    assert not grant.lost
    connection.commit()
    assert grant.release()


def test_a_forced_release_comes_after_the_transaction_that_was_protected_at_start(
    url: str, client: holdfast.Client, operator: holdfast.Client, connection: psycopg.Connection[Any], name: str
) -> None:
    table = make_table(url)
    grant = client.lease(name).acquire()
    grant.protect(connection)
    connection.execute(f"insert into {table} values ('in time')".encode())

    def force() -> tuple[bool, list[tuple[Any, ...]]]:
        done = operator.leases.force_release(name, actor="test", reason="stuck")
        return done, ask(url, f"select what from {table}")

    with ThreadPoolExecutor(1) as pool:
        forced = pool.submit(force)
        eventually(lambda: ask(url, FORCING), "the forced release has asked")
        assert not forced.done()
        connection.commit()
        assert forced.result(PATIENCE) == (True, [("in time",)])
    with pytest.raises(FencedOut):
        grant.protect(connection)


def test_a_release_inside_its_own_protected_transaction_says_so_and_keeps_the_lease(
    client: holdfast.Client, connection: psycopg.Connection[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database cannot see that both are the same program, and would let it wait for itself for ever."""
    monkeypatch.setattr("holdfast.lease.grant._RELEASE_PATIENCE", 0.2)
    grant = client.lease(name).acquire()
    grant.protect(connection)
    with pytest.raises(EngineError, match="commit or roll back first"):
        grant.release()
    assert not grant.lost
    assert [held.fence for held in client.leases.list() if held.name == name] == [grant.fence]
    connection.commit()
    assert grant.release()
    assert client.leases.get(name) is None


def test_a_release_inside_its_own_protected_transaction_leaves_the_transaction_usable(
    url: str,
    client: holdfast.Client,
    connection: psycopg.Connection[Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server ends a protected transaction that idles for a TTL: a release must give up well before."""
    table, given, call = make_table(url), list[float](), client._engine.call_when_free

    def call_when_free(*arguments: Any, patience: float, **options: Any) -> Any:
        given.append(patience)
        return call(*arguments, patience=0.1, **options)

    monkeypatch.setattr(client._engine, "call_when_free", call_when_free)
    monkeypatch.setattr("holdfast.lease.grant._RELEASE_PATIENCE", 3600.0)
    grant = client.lease(name, ttl=60).acquire()
    with grant.transaction(connection):
        connection.execute(f"insert into {table} values ('kept')".encode())
        with pytest.raises(EngineError, match="commit or roll back first"):
            grant.release(timeout=3600)
    assert given[0] <= 30
    assert ask(url, f"select what from {table}") == [("kept",)]


def test_on_sqlite_a_release_inside_a_transaction_of_ones_own_is_told_soon(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it holds up every writer, and the one who waits may be the one who is waited for."""
    limits = list[float]()
    with holdfast.Client(sqlite_url) as client, closing(sqlite3.connect(sqlite_url[len("sqlite:///") :])) as connection:
        grant, call = client.lease("job", ttl=600).acquire(), client._engine.call

        def release(*arguments: Any, timeout: float, **options: Any) -> Any:
            limits.append(timeout)
            return call(*arguments, timeout=0.1, **options)

        monkeypatch.setattr(client._engine, "call", release)
        grant.protect(connection)
        with pytest.raises(EngineError, match="your own"):
            grant.release()
        monkeypatch.undo()
        assert limits == [5.0], "half of what other calls are given"
        connection.commit()
        eventually(lambda: client.leases.get("job") is None, "it is given back all the same")


async def test_an_async_release_inside_its_own_protected_transaction_says_so_and_keeps_the_lease(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.lease.grant_async._RELEASE_PATIENCE", 0.2)
    async with holdfast.AsyncClient(url) as client, await psycopg.AsyncConnection.connect(url) as connection:
        grant = await client.lease(name).acquire()
        await grant.protect(connection)
        with pytest.raises(EngineError, match="commit or roll back first"):
            await grant.release()
        assert not grant.lost
        await connection.commit()
        assert await grant.release()


def test_the_block_of_a_lease_left_with_the_transaction_open_frees_it_when_that_ends(
    client: holdfast.Client,
    operator: holdfast.Client,
    connection: psycopg.Connection[Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever leaves the block does not get an error for it: the release is made up for, and is not waited for."""
    monkeypatch.setattr("holdfast.lease.grant._RELEASE_PATIENCE", 0.1)
    with client.lease(name) as grant:
        grant.protect(connection)
    assert grant.lost
    assert operator.lease(name).try_acquire() is None
    connection.commit()
    assert operator.lease(name).acquire(timeout=PATIENCE).fence > grant.fence


def test_a_release_inside_a_transaction_protected_at_commit_costs_the_commit(
    url: str, client: holdfast.Client, connection: psycopg.Connection[Any], name: str
) -> None:
    table = make_table(url)
    grant = client.lease(name).acquire()
    grant.protect(connection, at="commit")
    connection.execute(f"insert into {table} values ('too early')".encode())
    assert grant.release()
    with pytest.raises(FencedOut):
        connection.commit()
    assert ask(url, f"select what from {table}") == []
