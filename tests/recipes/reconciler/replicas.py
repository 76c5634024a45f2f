"""Helpers of the reconciler's tests: replicas of either flavour, and the records as a handler sees them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import holdfast
from holdfast import MustCreate
from holdfast.testing.fake_driver import AsyncFakeDriver, FakeDriver
from tests.children import PATIENCE, eventually

SLOW: dict[str, Any] = {"ttl": 3600.0, "renew_every": 600.0, "retry_every": 600.0}
NEVER = 80_000.0
Hook = Callable[..., object]


class Replica:
    """An elector that runs a reconciler, in a thread, of either flavour."""

    def __init__(self, url: str, yard: FakeDriver, flavour: str, elector: dict[str, Any] | None = None, **options: Any):
        self.ready = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        options = {"sweep_every": NEVER, "grace": NEVER} | options
        target = self._async if flavour == "async" else self._sync
        self.error: BaseException | None = None
        arguments = (url, yard, elector or SLOW, options)
        self.thread = threading.Thread(target=self._run, args=(target, arguments), daemon=True)
        self.thread.start()
        assert self.ready.wait(PATIENCE)

    def _run(self, target: Hook, arguments: tuple[Any, ...]) -> None:
        try:
            target(*arguments)
        except BaseException as error:
            self.error = error

    def _sync(self, url: str, yard: FakeDriver, elector: dict[str, Any], options: dict[str, Any]) -> None:
        with holdfast.Client(url) as client:
            self.reconciler: Any = client.reconciler("box", yard, **options)
            self.elector: Any = client.elector("reconciler", **elector)
            self.ready.set()
            self.elector.run(self.reconciler.run)

    def _async(self, url: str, yard: FakeDriver, elector: dict[str, Any], options: dict[str, Any]) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            async with holdfast.AsyncClient(url) as client:
                self.reconciler = client.reconciler("box", AsyncFakeDriver(yard), **options)
                self.elector = client.elector("reconciler", **elector)
                self.ready.set()
                await self.elector.run(self.reconciler.run)

        asyncio.run(main())

    @contextmanager
    def exclusive(self, id: str) -> Iterator[None]:
        if self.loop is None:
            with self.reconciler.exclusive(id):
                yield
            return
        block = self.reconciler.exclusive(id)
        asyncio.run_coroutine_threadsafe(block.__aenter__(), self.loop).result(PATIENCE)
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(block.__aexit__(None, None, None), self.loop).result(PATIENCE)

    @property
    def counts(self) -> Any:
        return self.reconciler.status()

    def end(self) -> None:
        self.elector.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        assert self.error is None, self.error


@contextmanager
def running(place: tuple[str, str], yard: FakeDriver, **options: Any) -> Iterator[Replica]:
    replica = Replica(place[0], yard, place[1], **options)
    try:
        yield replica
    finally:
        replica.end()


class Records:
    """The stored side, as a handler in another process sees it."""

    def __init__(self, url: str) -> None:
        self.objects = holdfast.Client(url).objects

    def make(self, id: str, **payload: Any) -> Any:
        return self.objects.put_if("box", id, payload, MustCreate())

    def phase(self, id: str) -> str | None:
        record = self.objects.get("box", id)
        return None if record is None else record.payload.get("status", {}).get("phase")

    def status(self, id: str) -> Any:
        return self.objects.get("box", id).payload.get("status")  # type: ignore[union-attr]

    def becomes(self, id: str, phase: str | None) -> None:
        eventually(lambda: self.phase(id) == phase, f"{id} becomes {phase}")


def fail(*_: object) -> None:
    raise ConnectionError("the driver is away")


def nothing(*_: object) -> None: ...
