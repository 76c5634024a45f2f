"""A replica: reconciles while it leads, serves requests all the time, and records both.

``SuccessionRun`` starts it, with its job as JSON. It ends in order when its standard input is closed."""

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import holdfast
from holdfast.testing.fake_driver import AsyncFakeDriver, FakeDriver
from holdfast.testing.history import Pending, Recorder
from proof.chaos.contender import Belief

TYPE, ELECTOR = "sandbox", "reconciler"


class Job(NamedTuple):
    url: str
    folder: str
    worker: str
    ids: list[str]
    ttl: float
    grace: float
    seed: int


class Replica:
    def __init__(self, job: Job, client: Any) -> None:
        self._job, self._client = job, client
        self._record = Recorder(Path(job.folder) / "history", job.worker)
        self._random = random.Random(f"{job.seed}-{job.worker}")
        driver = AsyncFakeDriver(FakeDriver(Path(job.folder)))
        self._reconciler = client.reconciler(TYPE, driver, sweep_every=job.ttl / 5, grace=job.grace)
        self._candidacy: Pending | None = None

    async def run(self) -> None:
        ttl = self._job.ttl
        elector = self._client.elector(
            ELECTOR, ttl=ttl, renew_every=ttl / 5, retry_every=ttl / 5, holder=self._job.worker
        )
        self._candidacy = self._record.invoke("acquire", ELECTOR)
        serving = asyncio.create_task(self._serve())
        ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        ending.add_done_callback(lambda _: elector.stop())
        await elector.run(self._lead)
        serving.cancel()
        await asyncio.wait([serving])

    async def _lead(self, term: Any) -> None:
        """The acquire is recorded when the replica becomes a candidate, and completed here."""
        assert self._candidacy is not None
        self._candidacy.ok(term.fence)
        belief = Belief(self._record)
        belief.begin(term)
        looking = asyncio.create_task(self._look(belief))
        try:
            await self._reconciler.run(term)
        finally:
            looking.cancel()
            belief.end()
            self._candidacy = self._record.invoke("acquire", ELECTOR)

    async def _look(self, belief: Belief) -> None:
        while True:
            await asyncio.sleep(0.02)
            belief.look()

    async def _serve(self) -> None:
        """Serve requests: each writes a unique note to a record."""
        while True:
            await asyncio.sleep(self._random.uniform(0.005, 0.05))
            id = self._random.choice(self._job.ids)
            try:
                record = await self._client.objects.get(TYPE, id)
            except holdfast.HoldfastError:
                continue
            if record is not None:
                await self._note(id, record)

    async def _note(self, id: str, record: Any) -> None:
        old, value = record.payload.get("note"), uuid4().hex
        with self._record.invoke("cas", id, old=old, value=value) as call:
            try:
                condition = holdfast.MatchVersion(record.version)
                await self._client.objects.put_if(TYPE, id, record.payload | {"note": value}, condition)
            except holdfast.Conflict:
                call.fail()
            except holdfast.EngineError as error:
                call.unknown(error=f"{type(error).__name__}: {error}"[:200])
            else:
                call.ok()


async def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    async with holdfast.AsyncClient(job.url) as client:
        await Replica(job, client).run()


if __name__ == "__main__":
    asyncio.run(main())
