"""What locks are compared with: the minimum for any program, and other libraries if installed."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

from bench.costs import prepared
from bench.measure import Run
from bench.place import Place

LOCK, UNLOCK = b"select pg_try_advisory_lock($1::bigint)", b"select pg_advisory_unlock($1::bigint)"


def prepared_pair(place: Place, url: str) -> Run:
    execute = prepared(place.psycopg(url).pgconn, lock=LOCK, unlock=UNLOCK)

    def run(times: int) -> None:
        for _ in range(times):
            execute(b"lock", [b"4711"])
            execute(b"unlock", [b"4711"])

    return run


def others(place: Place, url: str) -> list[tuple[str, Run]]:
    variants = []
    for label, needs, make in (
        ("redis-py Lock", "redis", _redis),
        ("sqlalchemy-dlock", "sqlalchemy_dlock", _sqlalchemy_dlock),
    ):
        if importlib.util.find_spec(needs) is None:
            print(f"  {label} is skipped: pip install --group bench", file=sys.stderr)
        elif (run := make(place, url)) is None:
            print(f"  {label} is skipped: no redis-server on PATH", file=sys.stderr)
        else:
            variants.append((label, run))
    return variants


def redis_port(place: Place) -> int | None:
    """The port of a new server without persistence; None when there is no program for it."""
    program = shutil.which("redis-server")
    if program is None:
        return None
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port: int = chosen.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([program, *options, "--dir", str(place.folder)], stdout=subprocess.DEVNULL)
    place.at_end(server.wait)
    place.at_end(server.kill)
    until = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return port
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _redis(place: Place, url: str) -> Run | None:
    port = redis_port(place)
    if port is None:
        return None
    import redis

    client: Any = redis.Redis(port=port)
    place.at_end(client.close)

    def run(times: int) -> None:
        for _ in range(times):
            with client.lock("bench", timeout=30):
                pass

    return run


def _sqlalchemy_dlock(place: Place, url: str) -> Run:
    import sqlalchemy
    import sqlalchemy_dlock

    engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    place.at_end(engine.dispose)
    connection = engine.connect()
    place.at_end(connection.close)

    def run(times: int) -> None:
        for _ in range(times):
            with sqlalchemy_dlock.create_sadlock(connection, "bench"):
                pass

    return run


class Bare:
    """A connection with prepared statements on an event loop: what a careful program could do by hand."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._pgconn = connection, connection.pgconn
        prepared(self._pgconn, lock=LOCK, unlock=UNLOCK)
        self._pgconn.nonblocking = 1
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pgconn.socket, self._readable)
        self._answer: asyncio.Future[None] = self._loop.create_future()

    async def pair(self, key: int) -> None:
        for statement in (b"lock", b"unlock"):
            self._answer = self._loop.create_future()
            self._pgconn.send_query_prepared(statement, [str(key).encode()])
            self._pgconn.flush()
            await self._answer

    def close(self) -> None:
        self._loop.remove_reader(self._pgconn.socket)
        self._connection.close()

    def _readable(self) -> None:
        self._pgconn.consume_input()
        if not self._pgconn.is_busy():
            while self._pgconn.get_result() is not None:
                pass
            self._answer.set_result(None)


async def bare_connections(url: str, number: int) -> list[Bare]:
    import psycopg

    return [Bare(psycopg.connect(url, autocommit=True)) for _ in range(number)]


async def asyncpg_connections(url: str, number: int) -> list[Any]:
    import asyncpg

    return [await asyncpg.connect(url) for _ in range(number)]


async def asyncpg_pair(connection: Any, key: int) -> None:
    await connection.fetchval(LOCK.decode(), key)
    await connection.fetchval(UNLOCK.decode(), key)
