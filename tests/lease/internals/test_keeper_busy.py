"""The heartbeat comes first, however much else the keeper has to say, and over however slow a link."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from itertools import groupby, pairwise
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.database.listener import Listener
from holdfast.database.postgres import PostgresSession
from holdfast.lease.keeper import keeper_of
from holdfast.runtime.clock import now
from holdfast.testing import Proxy
from holdfast.testing.standstill import Standstill
from tests.children import PATIENCE, backends, eventually, kept, query, until

MANY = 150
LONG = 600.0
ONE_WAY = 0.01
WAITING = """
select count(*) from pg_locks join pg_database d on d.oid = database and d.datname = current_database()
 where locktype = 'advisory' and mode = 'ShareLock' and granted
"""


@contextmanager
def statements(client: Any, go_on: threading.Event | None = None) -> Iterator[list[str]]:
    """What the keeper of this client sends meanwhile, in order; and nothing before ``go_on`` is set."""
    names: list[str] = []
    background, call = client._engine.background, PostgresSession.call

    def recorded(self: PostgresSession, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Any]:
        if self is background._session:
            names.append(name)
            assert go_on is None or go_on.wait(PATIENCE)
        return call(self, name, parameters, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PostgresSession, "call", recorded)
        yield names


@pytest.fixture
def taken(postgres_url: str) -> str:
    """A database in which somebody else holds MANY leases."""
    hold(postgres_url)
    return postgres_url


def hold(url: str, number: int = MANY) -> list[tuple[Any, ...]]:
    """Names and tokens of so many leases."""
    return query(
        url,
        "select 'name-' || n, token::text from generate_series(1, %s) n,"
        " holdfast.lease_acquire('name-' || n, 'somebody', 3600)",
        number,
    )


@asynccontextmanager
async def waiters(client: holdfast.AsyncClient, url: str) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """One for each name, all of them shown to the server. None polls."""
    client._engine.poll = 1e6
    tasks = [asyncio.create_task(client.lease(f"name-{n}").acquire(timeout=LONG)) for n in range(1, MANY + 1)]
    try:
        await until(lambda: query(url, WAITING) == [(MANY,)], "all are waiting")
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("what", ["waiters give up", "the session ends"])
async def test_the_keeper_speaks_of_many_waiters_in_few_statements(taken: str, what: str) -> None:
    """With a round trip for each of them between two heartbeats, a slow link would cost leases."""
    async with holdfast.AsyncClient(taken) as client:
        grant = await client.lease("mine", ttl=LONG, renew_every=0.1).acquire()
        async with waiters(client, taken) as tasks:
            go_on = threading.Event()
            with statements(client, go_on) as sent:
                if what == "waiters give up":
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    go_on.set()
                    await until(lambda: query(taken, WAITING) == [(0,)], "nobody waits any more")
                else:
                    go_on.set()
                    pids = backends(taken)
                    for pid in pids:
                        query(taken, "select pg_terminate_backend(%s)", pid)
                    await until(lambda: not {*pids} & {*backends(taken)}, "the sessions have ended")
                    await until(lambda: query(taken, WAITING) == [(MANY,)], "all are waiting again")
            about_waiters = [name for name in sent if name.startswith("wait_") or name == "listen"]
            assert 0 < len(about_waiters) < 20
            await asyncio.to_thread(kept, grant, 0.2)


def test_heartbeats_come_before_whatever_else_there_is_to_say(postgres_url: str) -> None:
    """As after an outage: many leases are to be given back, with a round trip for each. One takes 20 ms at the least,
    so however slow the machine is, no more than ten of them fit between two heartbeats of every 0.2 s."""
    given_up = hold(postgres_url, 60)
    with Proxy(postgres_url, delay=ONE_WAY) as link, holdfast.Client(link.url) as client:
        grant = client.lease("mine", ttl=LONG, renew_every=0.2).acquire()
        kept(grant, 0.1)
        with statements(client) as sent:
            for name, token in given_up:
                keeper_of(client._database).release_later(name, token)
            eventually(lambda: query(postgres_url, "select name from holdfast.lease") == [("mine",)], "all given back")
        runs = [len([*group]) for name, group in groupby(sent) if name == "lease_release"]
        assert sum(runs) >= 60
        assert max(runs) <= 30, "releases between two heartbeats"
        grant.check()


async def lose_in_silence(url: str, ttl: float) -> tuple[float, float]:
    """The link falls silent the moment the keeper has most to say. When that was, and when the loss was told."""
    told: list[float] = []
    with Proxy(url) as link:
        async with holdfast.AsyncClient(link.url) as client:
            grant = await client.lease("mine", ttl=ttl, on_lost=lambda _: told.append(time.monotonic())).acquire()
            async with waiters(client, url) as tasks:
                link.delay(ONE_WAY)
                for task in tasks:
                    task.cancel()
                link.stall("to_client")
                silent = time.monotonic()
                await until(lambda: told, "the loss is told")
                assert grant.lost
                link.heal()
    return silent, told[0]


async def test_a_loss_is_told_in_the_silence_although_the_keeper_is_busy(taken: str) -> None:
    """And not when somebody answers at last."""
    await lose_in_silence(taken, 1.5)


@pytest.mark.realtime
async def test_a_loss_is_told_before_the_ttl_ends_although_the_keeper_is_busy(
    taken: str, standstill: Standstill
) -> None:
    """The last heartbeat that was answered came before the silence. Later than a TTL after it, two would believe."""
    silent, told = await lose_in_silence(taken, 4.0)
    assert told - silent - standstill.seconds(since=silent) < 4.0


def test_a_name_that_cannot_be_watched_is_not_asked_for_all_the_time(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds its key for long: an open transaction that has released it, or a lock of the user's own that
    happens to have the same number. A slow machine makes the pauses longer, and never shorter."""
    asked: list[float] = []
    begin = Listener._announce

    def recorded(self: Listener, *arguments: Any) -> None:
        asked.append(now())
        begin(self, *arguments)

    monkeypatch.setattr(Listener, "_announce", recorded)
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url, autocommit=True) as somebody,
        ThreadPoolExecutor(1) as pool,
    ):
        grant = client.lease("import", ttl=LONG).acquire()
        somebody.execute("select pg_advisory_lock(hashtext('holdfast.free'), hashtext('import'))")
        waiting = pool.submit(client.lease("import", ttl=LONG).acquire, timeout=LONG)
        eventually(lambda: len(asked) >= 12, "it was refused eleven times")
        somebody.execute("select pg_advisory_unlock_all()")
        grant.release()
        waiting.result(PATIENCE).release()
    pauses = [later - earlier for earlier, later in pairwise(asked[:12])]
    assert min(pauses[8:]) >= 0.25


def test_closed_clients_and_their_event_loops_are_forgotten(either: str) -> None:
    """One beat may serve a process for months, and the clients that come and go meanwhile: with its next heartbeat."""
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def work() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        async with holdfast.AsyncClient(either) as client, client.lease("short", ttl=30):
            pass

    with holdfast.Client(either) as client, client.lease("anchor", ttl=30, renew_every=0.1):
        for _ in range(3):
            with asyncio.Runner() as runner:
                runner.run(work())
            del runner

        def forgotten() -> bool:
            gc.collect()
            return all(loop() is None for loop in loops)

        eventually(forgotten, "nobody keeps a closed loop")
