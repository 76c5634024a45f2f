"""How long a released lock takes to reach the next waiter: within a client, between clients, between processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import holdfast
from bench.measure import Result, Run, compare
from bench.place import Place

NAME = "hand-over"
LINE = 16


def lock_handover(place: Place) -> list[Result]:
    """From one holder to the next waiter: a single one, and a queue of 16; 1.0 goes through the server."""
    url = place.postgres_url()
    other = _Other(place, url)
    rounds, times = place.effort.rounds(), 2 if place.effort.quick else 8
    with asyncio.Runner() as loop:
        clients, bare = [holdfast.AsyncClient(url) for _ in range(LINE)], _Bare()
        alone: list[tuple[str, Run]] = [
            ("another client, through the server", _alone(loop, clients[0], clients[1])),
            ("another process, through the server", other.hand_over),
            ("another task of the same client", _alone(loop, clients[0], clients[0])),
            ("another task, asyncio.Lock", _alone(loop, bare, bare)),
        ]
        line: list[tuple[str, Run]] = [
            (f"{LINE} clients, through the server", _in_line(loop, clients)),
            (f"{LINE} tasks of one client", _in_line(loop, clients[:1] * LINE)),
            (f"{LINE} tasks, asyncio.Lock", _in_line(loop, [bare] * LINE)),
        ]
        results = compare("lock hand-over, alone", alone, rounds=rounds, times=times)
        results += compare("lock hand-over, in a line", line, rounds=rounds, times=times)
        for client in clients:
            loop.run(client.close())
    return results


class _Locks(Protocol):
    def lock(self, name: str, /) -> Any: ...


class _Bare:
    """An ``asyncio.Lock`` with the interface of a client: the minimum within one loop, without a database."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def lock(self, _: str, /) -> _Bare:
        return self

    async def acquire(self) -> _Bare:
        await self._lock.acquire()
        return self

    async def release(self) -> None:
        self._lock.release()

    async def __aenter__(self) -> None:
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


def _alone(loop: asyncio.Runner, holder: _Locks, other: _Locks) -> Run:
    async def wait() -> float:
        async with other.lock(NAME):
            return time.perf_counter()

    async def hand_over(times: int) -> float:
        taken = []
        for _ in range(times):
            grant = await holder.lock(NAME).acquire()
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.02)  # long enough for the task to wait
            released_at = time.perf_counter()
            await grant.release()
            taken.append(await waiting - released_at)
        return median(taken) * times

    return lambda times: loop.run(hand_over(times))


def _in_line(loop: asyncio.Runner, clients: Sequence[_Locks]) -> Run:
    async def through_the_line(times: int) -> float:
        """The waiters get the lock in the order of arrival; returns the median hand-over."""
        taken: list[float] = []

        async def take(client: _Locks) -> None:
            async with client.lock(NAME):
                taken.append(time.perf_counter())

        grant = await clients[0].lock(NAME).acquire()
        waiting = [asyncio.create_task(take(client)) for client in clients]
        await asyncio.sleep(0.1)  # long enough for all tasks to wait
        await grant.release()
        await asyncio.gather(*waiting)
        return median(later - earlier for earlier, later in pairwise(taken)) * times

    return lambda times: loop.run(through_the_line(times))


class _Other:
    """Another process that waits for the lock, acquires it, reports the time, and releases it."""

    def __init__(self, place: Place, url: str) -> None:
        self._client = place.client(url)
        command = [sys.executable, "-m", "bench.lock_handover", url]
        here = Path(__file__).parent.parent
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=here)
        place.at_end(self._process.communicate)
        place.at_end(self._process.kill)

    def hand_over(self, times: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        taken = []
        for _ in range(times):
            grant = self._client.lock(("process", 1)).acquire()
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            self._process.stdout.readline()
            time.sleep(0.02)  # long enough for the process to wait
            released_at = time.monotonic()
            grant.release()
            taken.append(float(self._process.stdout.readline()) - released_at)
        return median(taken) * times


def _wait_and_report(url: str) -> None:
    with holdfast.Client(url) as client:
        for _ in sys.stdin:
            print("asking", flush=True)
            with client.lock(("process", 1), timeout=60):
                at = time.monotonic()
            print(at, flush=True)


if __name__ == "__main__":
    _wait_and_report(sys.argv[1])
