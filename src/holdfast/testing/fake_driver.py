"""A reconciler's driver for tests. Its backends are files in a folder, so that every process sees the same ones and a
test can create, change and break them. Its events are the lines of a journal file."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.reconciler import Backend, BackendCondition, DriverEvent

_POLL = 0.02
"""Seconds between two reads of the journal."""


def _nothing(*_: object) -> None: ...


class FakeDriver:
    """The folder, and the sync driver. The hooks ``before_…`` and ``after_…`` run inside the calls and may raise."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.journal = folder / "backends", folder / "journal"
        self.folder.mkdir(exist_ok=True)
        self.journal.touch()
        self.before_list: Callable[[], object] = _nothing
        self.before_get: Callable[[str], object] = _nothing
        self.after_get: Callable[[str], object] = _nothing
        self.before_watch: Callable[[], object] = _nothing
        self.calls: list[str] = []
        """Every call, in order: "list", "watch" or "get ID"."""
        self.inside = self.most_inside = 0
        """Calls of ``get`` under way now, and at most so far."""
        self.took = 0.0
        """Seconds that each ``get`` takes."""
        self._mutex = threading.Lock()

    def put(self, id: str, ready: bool | None = True, *, publish: bool = True, **options: Any) -> None:
        """Create or replace a backend; with ``publish``, publish an event about it, too."""
        terminal = options.pop("terminal", False)
        backend = Backend(id, (BackendCondition("Ready", ready, "Told", terminal=terminal),), **options)
        unfinished = self.folder / f".{id}.{threading.get_ident()}"
        unfinished.write_text(json.dumps(asdict(backend)))
        unfinished.replace(self.folder / id)
        if publish:
            self.publish("status", id)

    def remove(self, id: str, *, publish: bool = True) -> None:
        (self.folder / id).unlink()
        if publish:
            self.publish("deleted", id)

    def publish(self, kind: str, id: str, reason: str = "") -> None:
        """Publish an event to all who watch."""
        with self.journal.open("a") as file:
            file.write(json.dumps([kind, id, reason]) + "\n")

    def list(self) -> list[Backend]:
        self.calls.append("list")
        self.before_list()
        backends = [self._read(entry.name) for entry in os.scandir(self.folder) if entry.name[0] != "."]
        return [backend for backend in backends if backend is not None]

    def get(self, id: str) -> Backend | None:
        self._enter(id)
        try:
            time.sleep(self.took)
            return self._read(id)
        finally:
            self._leave(id)

    def watch(self) -> Iterator[DriverEvent | None]:
        with self._open() as file:
            yield None
            while True:
                line = file.readline()
                if not line:
                    time.sleep(_POLL)
                yield _parse_event(line)

    def _open(self) -> Any:
        self.calls.append("watch")
        self.before_watch()
        file = self.journal.open()
        file.seek(0, os.SEEK_END)
        return file

    def _read(self, id: str) -> Backend | None:
        try:
            fields = json.loads((self.folder / id).read_text())
        except FileNotFoundError:
            return None
        conditions = tuple(BackendCondition(**condition) for condition in fields["conditions"])
        return Backend(fields["id"], conditions, fields["deleting"], fields["details"])

    def _enter(self, id: str) -> None:
        with self._mutex:
            self.calls.append(f"get {id}")
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        self.before_get(id)

    def _leave(self, id: str) -> None:
        with self._mutex:
            self.inside -= 1
        self.after_get(id)


class AsyncFakeDriver:
    """The same driver for asyncio. Its hooks run in threads."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    async def list(self) -> list[Backend]:
        return await asyncio.to_thread(self._driver.list)

    async def get(self, id: str) -> Backend | None:
        await asyncio.to_thread(self._driver._enter, id)
        try:
            await asyncio.sleep(self._driver.took)
            return self._driver._read(id)
        finally:
            await asyncio.to_thread(self._driver._leave, id)

    async def watch(self) -> AsyncIterator[DriverEvent | None]:
        with await asyncio.to_thread(self._driver._open) as file:
            yield None
            while True:
                line = file.readline()
                if not line:
                    await asyncio.sleep(_POLL)
                yield _parse_event(line)


def _parse_event(line: str) -> DriverEvent | None:
    """None for an empty or unfinished line."""
    if not line.endswith("\n"):
        return None
    kind, id, reason = json.loads(line)
    return DriverEvent(kind, id, reason)
