"""Callers in one process, each of which makes its next call as soon as it has the answer to the last.

    python -m bench.callers tasks postgresql://…

Reads one job per line from stdin, ``{"what": "put_if", "callers": 8, "seconds": 1.0}``, and writes its figures to
stdout, or the error of the first call that failed. A process of its own, so that each library has an interpreter to
itself, and so that another checkout of holdfast can be measured in the same run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from statistics import quantiles
from time import perf_counter
from typing import Any
from uuid import uuid4

import holdfast

CONNECTIONS = 8
"""Of the pool of the application, for its transactions and for what is written by hand."""
INSERT = "insert into work (text) values ('x')"
PAYLOAD = {"phase": "Ready", "replicas": 3, "note": "x" * 200}
LEAST = 2
"""Calls of a caller, even on a slow machine: quantiles need two."""
_WARM = 3

Blocking = Callable[[int], object]
Later = Callable[[int], Awaitable[object]]
"""One call of the caller of that number."""

_numbers = itertools.count()
_run = uuid4().hex


def _key() -> str:
    """Another one each time, also in another process."""
    return f"{_run}-{next(_numbers)}"


@asynccontextmanager
async def tasks(url: str) -> AsyncIterator[Mapping[str, Later]]:
    """One AsyncClient. Without transactions on SQLite, whose connections block the loop."""
    async with AsyncExitStack() as at_end:
        client = await at_end.enter_async_context(holdfast.AsyncClient(url))
        versions: dict[int, int] = {}

        async def pair(caller: int) -> None:
            await (await client.lease(f"lease-{caller}", ttl=30).acquire()).release()

        async def effect() -> int:
            return 1

        async def external(_: int) -> None:
            await client.operation(_key()).run(effect)

        async def insert(connection: Any) -> None:
            await connection.execute(INSERT)

        async def transaction(_: int) -> None:
            async with pool() as connection:
                await client.operation(_key(), tx=connection).run(insert, connection)

        async def put(caller: int) -> None:
            version = versions.get(caller)
            condition = holdfast.Unconditional() if version is None else holdfast.MatchVersion(version)
            versions[caller] = (await client.objects.put_if("box", f"b-{caller}", PAYLOAD, condition)).version

        calls: dict[str, Later] = {"lease pairs": pair, "external operations": external, "put_if": put}
        if not url.startswith("sqlite"):
            pool = await at_end.enter_async_context(_async_pool(url))
            calls["transaction operations"] = transaction
        yield calls


@contextmanager
def threads(url: str) -> Iterator[Mapping[str, Blocking]]:
    """One Client."""
    with holdfast.Client(url) as client, _pool(url) as pool:
        versions: dict[int, int] = {}

        def insert(connection: Any) -> None:
            connection.execute(INSERT)

        def transaction(_: int) -> None:
            with pool() as connection:
                client.operation(_key(), tx=connection).run(insert, connection)

        def put(caller: int) -> None:
            version = versions.get(caller)
            condition = holdfast.Unconditional() if version is None else holdfast.MatchVersion(version)
            versions[caller] = client.objects.put_if("box", f"b-{caller}", PAYLOAD, condition).version

        yield {
            "lease pairs": lambda caller: client.lease(f"lease-{caller}", ttl=30).acquire().release(),
            "external operations": lambda _: client.operation(_key()).run(int),
            "transaction operations": transaction,
            "put_if": put,
        }


@asynccontextmanager
async def psycopg(url: str) -> AsyncIterator[Mapping[str, Later]]:
    """The least that a program could write by hand, with as many commits: tables of its own, and no renewals, waiting,
    retries, history or change log."""
    async with _async_pool(url) as pool:
        versions: dict[int, int] = {}

        async def pair(caller: int) -> None:
            name, token = f"lease-{caller}", uuid4()
            async with pool() as connection:
                await connection.execute("insert into by_hand_lease values (%s, 'me', %s, now())", (name, token))
            async with pool() as connection:
                await connection.execute("delete from by_hand_lease where name = %s and token = %s", (name, token))

        async def external(_: int) -> None:
            key = _key()
            async with pool() as connection:
                await connection.execute("insert into by_hand_operation values (%s, 'partial')", (key,))
            async with pool() as connection:
                await connection.execute("update by_hand_operation set status = 'success' where key = %s", (key,))

        async def transaction(_: int) -> None:
            async with pool() as connection, connection.transaction():
                await connection.execute("insert into by_hand_operation values (%s, 'success')", (_key(),))
                await connection.execute(INSERT)

        async def put(caller: int) -> None:
            async with pool() as connection:
                cursor = await connection.execute(
                    "insert into by_hand_object as o values (%s, %s, 1) on conflict (id) do update"
                    " set body = excluded.body, version = o.version + 1 where o.version = %s returning version",
                    (f"b-{caller}", json.dumps(PAYLOAD), versions.get(caller, 1)),
                )
                [versions[caller]] = await cursor.fetchone()

        yield {
            "lease pairs": pair,
            "external operations": external,
            "transaction operations": transaction,
            "put_if": put,
        }


@contextmanager
def dbos(url: str) -> Iterator[Mapping[str, Blocking]]:
    """DBOS: a workflow of one step, and a workflow of one transaction."""
    from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource
    from sqlalchemy import text

    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})
    source = SQLAlchemyDatasource.create(url.replace("postgresql://", "postgresql+psycopg://", 1))

    def insert() -> None:
        source.sql_session().execute(text(INSERT))

    step, within = DBOS.step()(_one), source.transaction(isolation_level="READ COMMITTED")(insert)

    def outside() -> None:
        step()

    def inside() -> None:
        within()

    workflows = {"external operations": DBOS.workflow()(outside), "transaction operations": DBOS.workflow()(inside)}

    def begin(workflow: Callable[[], None]) -> Blocking:
        def run(_: int) -> None:
            with SetWorkflowID(_key()):
                workflow()

        return run

    DBOS.launch()
    try:
        yield {what: begin(workflow) for what, workflow in workflows.items()}
    finally:
        DBOS.destroy()


def _one() -> int:
    return 1


@asynccontextmanager
async def redis(url: str) -> AsyncIterator[Mapping[str, Later]]:
    """``redis.asyncio``'s Lock."""
    import redis.asyncio

    client: Any = redis.asyncio.Redis.from_url(url, max_connections=1000)

    async def pair(caller: int) -> None:
        async with client.lock(f"lease-{caller}", timeout=30):
            pass

    try:
        yield {"lease pairs": pair}
    finally:
        await client.aclose()


TABLES = (
    "create table work (id bigint generated always as identity primary key, text text)",
    "create table by_hand_lease (name text primary key, holder text, token uuid, acquired_at timestamptz)",
    "create table by_hand_operation (key text primary key, status text)",
    "create table by_hand_object (id text primary key, body text, version bigint)",
)
"""Of the application, on PostgreSQL; on SQLite the first one alone."""


@asynccontextmanager
async def _async_pool(url: str) -> AsyncIterator[Callable[[], AbstractAsyncContextManager[Any]]]:
    from psycopg_pool import AsyncConnectionPool

    options: dict[str, Any] = {"min_size": CONNECTIONS, "max_size": CONNECTIONS, "timeout": 60}
    async with AsyncConnectionPool(url, kwargs={"autocommit": True}, **options) as connections:
        yield connections.connection


@contextmanager
def _pool(url: str) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    if not url.startswith("sqlite"):
        from psycopg_pool import ConnectionPool

        options: dict[str, Any] = {"min_size": CONNECTIONS, "max_size": CONNECTIONS, "timeout": 60}
        with ConnectionPool(url, kwargs={"autocommit": True}, **options) as connections:
            yield connections.connection
        return
    idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()

    @contextmanager
    def borrow() -> Iterator[sqlite3.Connection]:
        connection = idle.get()
        try:
            yield connection
        finally:
            idle.put(connection)

    with ExitStack() as at_end:
        for _ in range(CONNECTIONS):
            connection = sqlite3.connect(
                url.removeprefix("sqlite:///"), isolation_level=None, timeout=60, check_same_thread=False
            )
            at_end.callback(connection.close)
            idle.put(connection)
        yield borrow


async def _repeat_later(call: Later, callers: int, seconds: float) -> tuple[float, list[float]]:
    taken: list[float] = []
    warm, all_warm = 0, asyncio.Event()  # a Barrier of Python 3.11 hangs when a caller fails

    async def repeat(caller: int) -> None:
        nonlocal warm
        for _ in range(_WARM):
            await call(caller)
        warm += 1
        if warm == callers:
            all_warm.set()
        await all_warm.wait()
        before = perf_counter()
        end, count = before + seconds, 0
        while count < LEAST or before < end:
            await call(caller)
            after = perf_counter()
            taken.append(after - before)
            before, count = after, count + 1

    async with asyncio.TaskGroup() as group:
        for caller in range(callers):
            group.create_task(repeat(caller))
        await all_warm.wait()
        began = perf_counter()
    return perf_counter() - began, taken


def _repeat(call: Blocking, callers: int, seconds: float) -> tuple[float, list[float]]:
    taken: list[float] = []
    errors: list[BaseException] = []
    begin = threading.Barrier(callers + 1)

    def repeat(caller: int) -> None:
        try:
            for _ in range(_WARM):
                call(caller)
            begin.wait()
            before = perf_counter()
            end, count = before + seconds, 0
            while count < LEAST or before < end:
                call(caller)
                after = perf_counter()
                taken.append(after - before)
                before, count = after, count + 1
        except BaseException as error:
            errors.append(error)
            begin.abort()

    running = [threading.Thread(target=repeat, args=(caller,), daemon=True) for caller in range(callers)]
    for thread in running:
        thread.start()
    try:
        begin.wait()
    except threading.BrokenBarrierError:
        raise errors[0] from None
    began = perf_counter()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]
    return perf_counter() - began, taken


def figures(seconds: float, taken: list[float]) -> dict[str, float]:
    """Calls per second, and how long one takes: half of them at most p50, all but one in a hundred at most p99."""
    cuts = quantiles(taken, n=100, method="inclusive")
    return {"rate": len(taken) / seconds, "p50": cuts[49], "p99": cuts[98]}


def _work(url: str, library: Callable[[str], AbstractContextManager[Mapping[str, Blocking]]]) -> None:
    with library(url) as calls:
        for line in sys.stdin:
            job = json.loads(line)
            try:
                answer: dict[str, Any] = figures(*_repeat(calls[job["what"]], job["callers"], job["seconds"]))
            except Exception as error:
                answer = {"error": repr(error)}
            print(json.dumps(answer), flush=True)


async def _work_later(url: str, library: Callable[[str], AbstractAsyncContextManager[Mapping[str, Later]]]) -> None:
    async with library(url) as calls:
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = json.loads(line)
            try:
                answer: dict[str, Any] = figures(
                    *await _repeat_later(calls[job["what"]], job["callers"], job["seconds"])
                )
            except Exception as error:
                answer = {"error": repr(error)}
            print(json.dumps(answer), flush=True)


BLOCKING = {"threads": threads, "dbos": dbos}
LATER = {"tasks": tasks, "psycopg": psycopg, "redis": redis}

if __name__ == "__main__":
    _, kind, url = sys.argv
    if kind in BLOCKING:
        _work(url, BLOCKING[kind])
    else:
        asyncio.run(_work_later(url, LATER[kind]))
