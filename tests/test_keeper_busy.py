"""The heartbeat comes first, however much else the keeper has to say, and over however slow a link."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing import Proxy
from tests.children import backends, eventually, kept, query, until

MANY = 150
TTL = 4.0
ONE_WAY = 0.015
"""A round trip of 30 ms: one for each of MANY names takes longer than the TTL."""
WAITING = """
select count(*) from pg_locks join pg_database d on d.oid = database and d.datname = current_database()
 where locktype = 'advisory' and mode = 'ShareLock' and granted
"""


@pytest.fixture
def taken(postgres_url: str) -> str:
    """A database in which somebody else holds MANY leases."""
    with psycopg.connect(postgres_url, autocommit=True) as database:
        database.execute(
            "select status from generate_series(1, %s) n, holdfast.lease_acquire('name-' || n, 'somebody', 600)", [MANY]
        )
    return postgres_url


@asynccontextmanager
async def waiters(client: holdfast.AsyncClient, url: str) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """One for each name, all of them shown to the server."""
    tasks = [asyncio.create_task(client.lease(f"name-{n}").acquire(timeout=60)) for n in range(1, MANY + 1)]
    try:
        await until(lambda: query(url, WAITING) == [(MANY,)], "all are waiting", 60)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("what", ["waiters give up", "the session ends"])
async def test_many_waiters_on_a_slow_link_do_not_cost_a_lease(taken: str, what: str) -> None:
    """A round trip for each of them, between two heartbeats, would take longer than the TTL."""
    told: list[Any] = []
    with Proxy(taken) as link:
        async with holdfast.AsyncClient(link.url) as client:
            grant = await client.lease("mine", ttl=TTL, on_lost=told.append).acquire()
            async with waiters(client, taken) as tasks:
                link.delay(ONE_WAY)
                if what == "waiters give up":
                    for task in tasks:
                        task.cancel()
                else:
                    for pid in backends(taken):
                        query(taken, "select pg_terminate_backend(%s)", pid)
                await asyncio.to_thread(kept, grant, TTL / 2)
            await grant.renew()
    assert told == []


async def test_many_things_to_undo_on_a_slow_link_do_not_cost_a_lease(postgres_url: str) -> None:
    """As after an outage: each acquire that was given up is to be undone, with a round trip of its own."""
    told: list[Any] = []
    with Proxy(postgres_url, delay=ONE_WAY) as link:
        async with holdfast.AsyncClient(link.url) as client:
            grant = await client.lease("mine", ttl=TTL, on_lost=told.append).acquire()
            tasks = [asyncio.create_task(client.lease(f"name-{n}", ttl=60).acquire()) for n in range(MANY)]
            await until(lambda: query(postgres_url, "select count(*) from holdfast.lease")[0][0] > 1, "they are sent")
            for task in tasks:
                task.cancel()
            await asyncio.to_thread(kept, grant, TTL / 2)
            await until(lambda: query(postgres_url, "select name from holdfast.lease") == [("mine",)], "undone", 60)
            grant.check()
    assert told == []


async def test_a_loss_is_told_before_the_ttl_ends_although_the_keeper_is_busy(taken: str) -> None:
    """The link falls silent the moment the keeper has most to say. Later than the TTL, two would believe."""
    told: list[float] = []
    with Proxy(taken) as link:
        async with holdfast.AsyncClient(link.url) as client:
            grant = await client.lease("mine", ttl=TTL, on_lost=lambda _: told.append(time.monotonic())).acquire()
            async with waiters(client, taken) as tasks:
                link.delay(ONE_WAY)
                for task in tasks:
                    task.cancel()
                link.stall("to_client")
                silent = time.monotonic()
                await until(lambda: told, "the loss is told")
                assert grant.lost
                link.heal()
    assert told[0] < silent + TTL, "the last heartbeat that was answered came before the silence"


def test_a_name_that_cannot_be_watched_is_not_asked_for_all_the_time(postgres_url: str) -> None:
    """Somebody holds its key for long: an open transaction that has released it, or a lock of the user's own that
    happens to have the same number."""
    with (
        Proxy(postgres_url) as link,
        holdfast.Client(postgres_url) as other,
        holdfast.Client(link.url) as client,
        psycopg.connect(postgres_url, autocommit=True) as somebody,
    ):
        other.lease("import", ttl=60).acquire()
        somebody.execute("select pg_advisory_lock(hashtext('holdfast.free'), hashtext('import'))")
        with pytest.raises(holdfast.AcquireTimeout):
            client.lease("import").acquire(timeout=1)
        assert link.messages < 60, "several hundred, if it is"
        somebody.execute("select pg_advisory_unlock_all()")


def test_closed_clients_and_their_event_loops_are_forgotten(either: str) -> None:
    """One beat may serve a process for months, and the clients that come and go meanwhile."""
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def work() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        async with holdfast.AsyncClient(either) as client, client.lease("short", ttl=30):
            pass

    with holdfast.Client(either) as client, client.lease("anchor", ttl=30):
        for _ in range(3):
            with asyncio.Runner() as runner:
                runner.run(work())
            del runner

        def forgotten() -> bool:
            gc.collect()
            return all(loop() is None for loop in loops)

        eventually(forgotten, "nobody keeps a closed loop", timeout=10)
