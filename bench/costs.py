"""The cost of single calls: pairs, refusals, protection."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from uuid import uuid4

import holdfast
from bench.measure import Result, Run, compare
from bench.place import Place
from holdfast.testing import Postgres

NAME = "bench"
_RAW = "(name text primary key, holder text, token {uuid} not null, fence bigint not null, acquired_at {time} not null)"


def pair(place: Place) -> list[Result]:
    """Acquire and release on PostgreSQL; 1.0 is a prepared insert and a prepared delete, each its own transaction."""
    results = []
    for label, server in (("fsync off", place.fast), ("fsync on", place.durable)):
        url, bare_url = place.postgres_url(server), place.postgres_url(server, history=False)
        with asyncio.Runner() as loop:
            later = holdfast.AsyncClient(url)
            variants: list[tuple[str, Run]] = [
                ("insert + delete", _raw_pair(place, url)),
                ("Client", _pairs(place.client(url))),
                ("Client, no history row", _pairs(place.client(bare_url))),
                ("AsyncClient", _async_pairs(loop, later)),
            ]
            rounds, times = place.effort.rounds(), place.effort.times(200)
            results += compare(f"pair, {label}", variants, rounds=rounds, times=times)
            loop.run(later.close())
    return results


def sqlite(place: Place) -> list[Result]:
    """Acquire and release on SQLite; 1.0 is an insert and a delete, each in BEGIN IMMEDIATE, in the same WAL mode."""
    url = place.sqlite_url("pair")
    connection = place.sqlite(place.sqlite_url("raw"))
    connection.execute(f"create table raw {_RAW.format(uuid='text', time='real')} without rowid")

    def raw(times: int) -> None:
        for _ in range(times):
            connection.execute("begin immediate")
            connection.execute("insert into raw values (?, 'me', ?, 1, 0)", (NAME, str(uuid4())))
            connection.execute("commit")
            connection.execute("begin immediate")
            connection.execute("delete from raw where name = ?", (NAME,))
            connection.execute("commit")

    with asyncio.Runner() as loop:
        later = holdfast.AsyncClient(url)
        variants: list[tuple[str, Run]] = [
            ("insert + delete", raw),
            ("Client", _pairs(place.client(url))),
            ("AsyncClient", _async_pairs(loop, later)),
        ]
        results = compare("pair, SQLite", variants, rounds=place.effort.rounds(), times=place.effort.times(400))
        loop.run(later.close())
    return results


def refused(place: Place) -> list[Result]:
    """An acquire that is refused because the lease is held; 1.0 is a prepared select of one row by its primary key."""
    effort, results = place.effort, []
    for label, url in (("PostgreSQL", place.postgres_url()), ("SQLite", place.sqlite_url("refused"))):
        holder, other = place.client(url), place.client(url)
        holder.lease(NAME, ttl=600).acquire()

        select = _raw_select(place, url) if label == "PostgreSQL" else _sqlite_select(place.sqlite(url))
        variants: list[tuple[str, Run]] = [("select", select), ("try_acquire() is None", _refusals(other))]
        results += compare(f"refused, {label}", variants, rounds=effort.rounds(), times=effort.times(500))
    return results


def protect(place: Place) -> list[Result]:
    """One insert in a transaction on the application's own connection; 1.0 is without protection."""
    results = []
    for label, server in (("fsync off", place.fast), ("fsync on", place.durable)):
        results += _protect_postgres(place, label, server)
    return results + _protect_sqlite(place)


def _protect_postgres(place: Place, label: str, server: Postgres) -> list[Result]:
    url = place.postgres_url(server)
    connection, grant = place.psycopg(url), place.client(url).lease(NAME, ttl=600).acquire()
    connection.execute("create table work (id bigint generated always as identity primary key, text text)")
    insert = "insert into work (text) values ('x')"

    def bare(times: int) -> None:
        for _ in range(times):
            with connection.transaction():
                connection.execute(insert)

    def at_start(times: int) -> None:
        for _ in range(times):
            with grant.transaction(connection):
                connection.execute(insert)

    def at_commit(times: int) -> None:
        for _ in range(times):
            with grant.transaction(connection, at="commit"):
                connection.execute(insert)

    variants: list[tuple[str, Run]] = [
        ("transaction", bare),
        ("grant.transaction(conn)", at_start),
        ('grant.transaction(conn, at="commit")', at_commit),
    ]
    return compare(f"protect, {label}", variants, rounds=place.effort.rounds(), times=place.effort.times(150))


def _protect_sqlite(place: Place) -> list[Result]:
    url = place.sqlite_url("protect")
    grant = place.client(url).lease(NAME, ttl=600).acquire()
    connection = place.sqlite(url)
    connection.execute("create table work (id integer primary key, text text)")
    insert = "insert into work (text) values ('x')"

    def bare(times: int) -> None:
        for _ in range(times):
            connection.execute("begin immediate")
            connection.execute(insert)
            connection.execute("commit")

    def protected(times: int) -> None:
        for _ in range(times):
            with grant.transaction(connection):
                connection.execute(insert)

    variants: list[tuple[str, Run]] = [("transaction", bare), ("grant.transaction(conn)", protected)]
    return compare("protect, SQLite", variants, rounds=place.effort.rounds(), times=place.effort.times(400))


def _pairs(client: holdfast.Client) -> Run:
    lease = client.lease(NAME, ttl=30)

    def run(times: int) -> None:
        for _ in range(times):
            lease.acquire().release()

    return run


def _refusals(client: holdfast.Client) -> Run:
    lease = client.lease(NAME, ttl=600)

    def run(times: int) -> None:
        for _ in range(times):
            assert lease.try_acquire() is None

    return run


def _async_pairs(loop: asyncio.Runner, client: holdfast.AsyncClient) -> Run:
    lease = client.lease(NAME, ttl=30)

    async def pairs(times: int) -> None:
        for _ in range(times):
            await (await lease.acquire()).release()

    def run(times: int) -> None:
        loop.run(pairs(times))

    return run


def _raw_pair(place: Place, url: str) -> Run:
    connection = place.psycopg(url)
    connection.execute(f"create table raw {_RAW.format(uuid='uuid', time='timestamptz')} with (fillfactor = 50)")
    execute = prepared(
        connection.pgconn,
        insert=b"insert into raw values ($1, $2, $3::uuid, 1, clock_timestamp())",
        delete=b"delete from raw where name = $1 and token = $2::uuid",
    )

    def run(times: int) -> None:
        for _ in range(times):
            token = str(uuid4()).encode()
            execute(b"insert", [NAME.encode(), b"me", token])
            execute(b"delete", [NAME.encode(), token])

    return run


def _raw_select(place: Place, url: str) -> Run:
    execute = prepared(
        place.psycopg(url).pgconn, select=b"select name, holder, fence, acquired_at from holdfast.lease where name = $1"
    )

    def run(times: int) -> None:
        for _ in range(times):
            execute(b"select", [NAME.encode()])

    return run


def prepared(pgconn: object, **texts: bytes) -> Callable[[bytes, list[bytes]], None]:
    from psycopg import pq

    assert isinstance(pgconn, pq.PGconn)
    good = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)
    for name, text in texts.items():
        assert pgconn.prepare(name.encode(), text).status in good

    def execute(name: bytes, values: list[bytes]) -> None:
        assert pgconn.exec_prepared(name, values).status in good

    return execute


def _sqlite_select(connection: sqlite3.Connection) -> Run:
    def run(times: int) -> None:
        for _ in range(times):
            connection.execute(
                "select name, holder, fence, acquired_at from holdfast_lease where name = ?", (NAME,)
            ).fetchone()

    return run
