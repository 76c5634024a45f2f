"""The cost of an advisory lock: pairs, many tasks, many held, memory. ``python -m bench locks`` runs them all."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import holdfast
from bench import rivals
from bench.aims import ASYNC_PAIR, PAIR
from bench.measure import Result, Run, compare
from bench.place import Place
from holdfast.testing import Postgres

NAME = "bench"
TASKS = 32
MANY = 10_000
ROOMY = {"max_locks_per_transaction": 512, "max_connections": 150}
"""Half of the server's lock table has room for more than 10,000 locks."""


def lock_pair(place: Place) -> list[Result]:
    """Lock and unlock without contention; 1.0 is two prepared statements through pgconn."""
    url = place.postgres_url()
    with asyncio.Runner() as loop, asyncio.Runner(loop_factory=_uvloop()) as fast_loop:
        clients, [bare] = [holdfast.AsyncClient(url) for _ in "12"], loop.run(rivals.bare_connections(url, 1))
        variants: list[tuple[str, Run]] = [
            ("prepared pair through pgconn", rivals.prepared_pair(place, url)),
            (PAIR, _pairs(place.client(url))),
            (ASYNC_PAIR, _async_pairs(loop, clients[0])),
            (f"{ASYNC_PAIR}, uvloop", _async_pairs(fast_loop, clients[1])),
            ("prepared pair through pgconn, awaited", _bare_pairs(loop, bare)),
            *rivals.others(place, url),
        ]
        results = compare("lock pair", variants, rounds=place.effort.rounds(), times=place.effort.times(400))
        for runner, client in zip((loop, fast_loop), clients, strict=True):
            runner.run(client.close())
        bare.close()
    return results


def lock_tasks(place: Place) -> list[Result]:
    """Pairs of 32 concurrent tasks, each on its own key; 1.0 is one connection per task, with prepared statements."""
    url = place.postgres_url()
    with asyncio.Runner() as loop:
        client = holdfast.AsyncClient(url)
        bare = loop.run(rivals.bare_connections(url, TASKS))
        theirs = loop.run(rivals.asyncpg_connections(url, TASKS))

        async def ours(task: int) -> None:
            async with client.lock(("task", task)):
                pass

        variants: list[tuple[str, Run]] = [
            (f"{TASKS} connections, pgconn", _at_once(loop, lambda task: bare[task].pair(task))),
            (f"{TASKS} connections, asyncpg", _at_once(loop, lambda task: rivals.asyncpg_pair(theirs[task], task))),
            ("one AsyncClient", _at_once(loop, ours)),
        ]
        rounds, times = place.effort.rounds(), place.effort.times(6400)
        results = compare(f"lock, {TASKS} tasks", variants, rounds=rounds, times=times)
        loop.run(client.close())
        for connection in bare:
            connection.close()
        for connection in theirs:
            loop.run(connection.close())
    return results


def lock_held(place: Place) -> list[Result]:
    """A pair while 10,000 locks are held; 1.0 is while no lock is held."""
    number = place.effort.times(MANY)
    few, many = (_holding(place, count) for count in (0, number))
    variants: list[tuple[str, Run]] = [("none held", _pairs(few)), (f"{number:,} held", _pairs(many))]
    return compare("lock pair, many held", variants, rounds=place.effort.rounds(), times=place.effort.times(400))


def lock_memory(place: Place) -> list[Result]:
    """Resident memory of a process per lock that it holds."""
    if not Path("/proc/self/statm").exists():
        return []
    number = place.effort.times(MANY)
    code = (
        "import holdfast, os, sys; client = holdfast.Client(sys.argv[1], lock_sessions=50)\n"
        "page = os.sysconf('SC_PAGE_SIZE')\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * page\n"
        "held = [client.lock(('warm', n)).acquire() for n in range(400)]\n"
        "before = resident()\n"
        "held += [client.lock(('held', n)).acquire() for n in range(int(sys.argv[2]))]\n"
        "print(resident() - before, flush=True); sys.stdin.read(); os._exit(0)"
    )
    command = [sys.executable, "-c", code, place.postgres_url(_roomy(place)), str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        size = int(process.stdout.readline()) / number
        process.kill()
    return [Result(f"memory, {number:,} locks", "client, a lock", size, "B")]


def _roomy(place: Place) -> Postgres:
    return place.keep(Postgres.create(settings=ROOMY))


def _holding(place: Place, number: int) -> holdfast.Client:
    """A client that holds ``number`` locks, on its own server."""
    client = holdfast.Client(place.postgres_url(_roomy(place)), lock_sessions=50)
    place.keep(client)
    place.grants += [client.lock(("held", each)).acquire() for each in range(number)]
    return client


def _pairs(client: holdfast.Client) -> Run:
    def run(times: int) -> None:
        for _ in range(times):
            with client.lock(NAME):
                pass

    return run


def _async_pairs(loop: asyncio.Runner, client: holdfast.AsyncClient) -> Run:
    async def pairs(times: int) -> None:
        for _ in range(times):
            async with client.lock(NAME):
                pass

    return lambda times: loop.run(pairs(times))


def _bare_pairs(loop: asyncio.Runner, bare: rivals.Bare) -> Run:
    async def pairs(times: int) -> None:
        for _ in range(times):
            await bare.pair(4711)

    return lambda times: loop.run(pairs(times))


def _at_once(loop: asyncio.Runner, pair: Callable[[int], Awaitable[None]]) -> Run:
    """All tasks together do ``times`` pairs."""

    async def work(task: int, times: int) -> None:
        for _ in range(times):
            await pair(task)

    async def all_of_them(times: int) -> None:
        await asyncio.gather(*(work(task, max(1, times // TASKS)) for task in range(TASKS)))

    return lambda times: loop.run(all_of_them(times))


def _uvloop() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
