"""A process with threads and tasks that contend for the same few locks, and increment a counter under each.

The counters are bytes in a shared file, read and written in two steps: two holders of one key would lose a count.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import holdfast
from holdfast.testing.history import Event, Recorder, now

KEYS = 50
LIMITS: dict[str, Any] = {"lock_sessions": 6, "lock_overflow": 4}
"""Fewer sessions than the keys that each client waits for."""
FIRST = ("agent", KEYS)
"""Locked before all others, so that the id of the namespace is cached."""


TASK = 1000
"""Numbers of tasks begin here, those of threads at 0."""


def is_task(event: Event) -> bool:
    return (event.fence or 0) >= TASK


class Counters:
    """One number per key, shared by all processes, protected by nothing but the lock."""

    def __init__(self, folder: Path) -> None:
        path = folder / "counters"
        if not path.exists():
            path.write_bytes(bytes(8 * KEYS))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 8 * KEYS)

    def read(self, key: int) -> int:
        return int.from_bytes(self._bytes[8 * key : 8 * key + 8])

    def write(self, key: int, value: int) -> None:
        self._bytes[8 * key : 8 * key + 8] = value.to_bytes(8)


class Rivals:
    def __init__(self, folder: Path, worker: str, seed: int) -> None:
        self._record, self._counters = Recorder(folder, worker), Counters(folder)
        self._random = random.Random(f"{seed}-{worker}")
        self.over = threading.Event()

    def thread(self, number: int, client: Any) -> None:
        while not self.over.is_set():
            key, requested = self._random_key(), now()
            try:
                if self._random.random() < 0.2:
                    with client.lock(("agent", key)).or_skip() as grant:
                        if grant is not None:
                            self._count(number, key, None)
                else:
                    with client.lock(("agent", key), timeout=self._random.choice([0.05, 0.5, 5])):
                        self._count(number, key, requested)
            except (holdfast.AcquireTimeout, holdfast.EngineError):  # too short even to connect
                pass
            time.sleep(self._random.uniform(0, 0.05))

    async def task(self, number: int, client: Any) -> None:
        while not self.over.is_set():
            key, requested = self._random_key(), now()
            limit = self._random.choice([0.2, 2, 10, None])
            try:
                async with asyncio.timeout(limit), client.lock(("agent", key), timeout=self._random.choice([0.2, 5])):
                    value, entered = self._counters.read(key), now()
                    await asyncio.sleep(self._random.choice([0, 0, 0.002]))
                    self._enter(number, key, requested, entered, value)
            except (TimeoutError, holdfast.EngineError):  # cancelled by us, or waited too long
                pass
            await asyncio.sleep(self._random.uniform(0, 1.0))

    def _random_key(self) -> int:
        """One in four takes the first key: fairness shows in long queues."""
        return int(KEYS * self._random.random() ** 3)

    def _count(self, number: int, key: int, requested: float | None) -> None:
        value, entered = self._counters.read(key), now()
        time.sleep(self._random.choice([0, 0, 0.002]))
        self._enter(number, key, requested, entered, value)

    def _enter(self, number: int, key: int, requested: float | None, entered: float, value: int) -> None:
        self._counters.write(key, value + 1)
        self._record.info(
            "believe", str(key), number, **{"from": entered, "until": now(), "asked": requested, "value": value}
        )


async def tasks(rivals: Rivals, url: str, count: int) -> None:
    async with holdfast.AsyncClient(url, **LIMITS) as client, asyncio.TaskGroup() as group:
        async with client.lock(FIRST):
            pass
        for number in range(count):
            group.create_task(rivals.task(TASK + number, client))


def main(url: str, folder: str, worker: str, threads: str, count: str) -> None:
    """``requested`` is recorded for those that waited."""
    rivals = Rivals(Path(folder), worker, 7)
    if url.startswith("postgres"):
        url += f"?application_name={worker}"
    with holdfast.Client(url, **LIMITS) as client:
        with client.lock(FIRST):
            pass
        running = [threading.Thread(target=rivals.thread, args=(number, client)) for number in range(int(threads))]
        running.append(threading.Thread(target=lambda: asyncio.run(tasks(rivals, url, int(count)))))
        for thread in running:
            thread.start()
        sys.stdin.read()
        rivals.over.set()
        for thread in running:
            thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
