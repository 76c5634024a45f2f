"""One replica: reconciles while it leads, serves requests all the time, and writes down what it knows of both. Started
by the play, with its errand as JSON; ends politely when its standard input does."""

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


class Errand(NamedTuple):
    url: str
    folder: str
    worker: str
    ids: list[str]
    ttl: float
    grace: float
    seed: int


class Replica:
    def __init__(self, errand: Errand, client: Any) -> None:
        self._errand, self._client = errand, client
        self._record = Recorder(Path(errand.folder) / "history", errand.worker)
        self._random = random.Random(f"{errand.seed}-{errand.worker}")
        driver = AsyncFakeDriver(FakeDriver(Path(errand.folder)))
        self._reconciler = client.reconciler(TYPE, driver, sweep_every=errand.ttl / 5, grace=errand.grace)
        self._standing: Pending | None = None

    async def run(self) -> None:
        ttl = self._errand.ttl
        elector = self._client.elector(
            ELECTOR, ttl=ttl, renew_every=ttl / 5, retry_every=ttl / 5, holder=self._errand.worker
        )
        self._standing = self._record.invoke("acquire", ELECTOR)
        serving = asyncio.create_task(self._serve())
        ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        ending.add_done_callback(lambda _: elector.stop())
        await elector.run(self._lead)
        serving.cancel()
        await asyncio.wait([serving])

    async def _lead(self, term: Any) -> None:
        """An acquire that nobody answered for is one that may have happened, and so is ours until we are told."""
        assert self._standing is not None
        self._standing.ok(term.fence)
        belief = Belief(self._record)
        belief.begin(term)
        looking = asyncio.create_task(self._look(belief))
        try:
            await self._reconciler.run(term)
        finally:
            looking.cancel()
            belief.end()
            self._standing = self._record.invoke("acquire", ELECTOR)

    async def _look(self, belief: Belief) -> None:
        while True:
            await asyncio.sleep(0.02)
            belief.look()

    async def _serve(self) -> None:
        """Requests: each notes something of its own in a record, whoever leads."""
        while True:
            await asyncio.sleep(self._random.uniform(0.005, 0.05))
            id = self._random.choice(self._errand.ids)
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
    errand = Errand(**json.loads(sys.argv[1]))
    async with holdfast.AsyncClient(errand.url) as client:
        await Replica(errand, client).run()


if __name__ == "__main__":
    asyncio.run(main())
