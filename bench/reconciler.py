"""The cost of a sweep: records that are up to date, records that all have to be written, four replicas at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import holdfast
from bench.measure import Result
from bench.place import Place

ANSWERS_IN = 0.005
SHARDS = 16
REPLICAS = 4


class SlowDriver:
    """Has a backend for every record, and takes 5 ms to answer."""

    def __init__(self, count: int, word: str) -> None:
        ready = holdfast.reconciler.BackendCondition("Ready", True, word)
        self._backends = {id: holdfast.reconciler.Backend(id, (ready,)) for id in map(_id, range(count))}

    async def list(self) -> list[holdfast.reconciler.Backend]:
        await asyncio.sleep(ANSWERS_IN)
        return list(self._backends.values())

    async def get(self, id: str) -> holdfast.reconciler.Backend | None:
        await asyncio.sleep(ANSWERS_IN)
        return self._backends.get(id)

    async def watch(self) -> AsyncIterator[holdfast.reconciler.DriverEvent | None]:
        while True:
            yield None
            await asyncio.sleep(1)


def _id(number: int) -> str:
    return f"sb-{number:06}"


def sweep(place: Place) -> list[Result]:
    """A sweep with a driver that answers in 5 ms, on PostgreSQL; 1.0 is 10,000 records that are up to date."""
    few, many = (50, 200) if place.effort.quick else (10_000, 100_000)
    url = place.postgres_url()
    written, true = asyncio.run(_alone(url, few, "A"))
    replicas, shards = (2, 4) if place.effort.quick else (REPLICAS, SHARDS)
    shared = _together(url, few, "B", replicas, shards)
    more_written, more_true = asyncio.run(_alone(url, many, "C"))
    timings = {
        f"{few:,} records, all true": true,
        f"{few:,} records, all to be written": written,
        f"{few:,} records, all to be written, {replicas} replicas with shards": shared,
        f"{many:,} records, all true": more_true,
        f"{many:,} records, all to be written": more_written,
    }
    aim = {label: "5 s" for label in timings if label.startswith(f"{few:,}")}
    return [
        Result("sweep", label, seconds, "s", seconds / true, aim.get(label, "")) for label, seconds in timings.items()
    ]


async def _alone(url: str, count: int, word: str) -> tuple[float, float]:
    async with holdfast.AsyncClient(url) as client:
        await client.migrate()
        await _make(client, count)
        took: list[float] = []

        async def work(term: Any) -> None:
            for _ in range(2):
                reconciler = client.reconciler("sandbox", SlowDriver(count, word))
                await reconciler._sweep(term)
                took.append(reconciler.status().sweep_seconds or 0.0)

        await client.elector("reconciler").run(work)
        return took[0], took[1]


async def _make(client: holdfast.AsyncClient, count: int) -> None:
    existing = await _ids(client)
    missing = [id for id in map(_id, range(count)) if id not in existing]
    for start in range(0, len(missing), 50):  # few: they share one session, and each has ten seconds
        created = (
            client.objects.put_if("sandbox", id, {}, holdfast.MustCreate()) for id in missing[start : start + 50]
        )
        await asyncio.gather(*created)


async def _ids(client: holdfast.AsyncClient) -> set[str]:
    ids: set[str] = set()
    after: str | None = None
    while page := await client.objects.list("sandbox", after=after, limit=10_000):
        ids |= {each.id for each in page}
        after = page[-1].id
    return ids


def _together(url: str, count: int, word: str, replicas: int, shards: int) -> float:
    """Seconds from the start signal until the last replica has swept its shards."""
    command = [sys.executable, "-m", "bench.reconciler", url, str(count), word, str(shards), str(shards // replicas)]
    root = Path(__file__).parent.parent
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        for _ in range(replicas)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return max(float(process.stdout.readline()) for process in running if process.stdout is not None) - began
    finally:
        for process in running:
            process.communicate()


async def _share(url: str, count: int, word: str, number: int, own: int) -> None:
    async with holdfast.AsyncClient(url) as client, client.shards("sweep", number) as shards:
        while len(shards.held) != own:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await client.reconciler("sandbox", SlowDriver(count, word))._sweep(shards)
        print(time.monotonic(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(_share(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
