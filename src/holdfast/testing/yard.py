"""A driver whose backends are files in a folder: every process sees the same ones, and a test can make, change and
break them. Its events are the lines of a journal."""

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

from holdfast import Backend, BackendCondition, DriverEvent

_LOOK = 0.02


def _nothing(*_: object) -> None: ...


class Yard:
    """The folder, and the driver in the blocking flavour. ``before_…`` hooks run inside the calls, and may raise."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.journal = folder / "backends", folder / "journal"
        self.folder.mkdir(exist_ok=True)
        self.journal.touch()
        self.before_list: Callable[[], object] = _nothing
        self.before_get: Callable[[str], object] = _nothing
        self.after_get: Callable[[str], object] = _nothing
        self.before_watch: Callable[[], object] = _nothing
        self.calls: list[str] = []
        self.inside = self.most_inside = 0
        self.took = 0.0
        self._mutex = threading.Lock()

    def put(self, id: str, ready: bool | None = True, *, tell: bool = True, **options: Any) -> None:
        """There is such a backend, and how it is."""
        terminal = options.pop("terminal", False)
        backend = Backend(id, (BackendCondition("Ready", ready, "Told", terminal=terminal),), **options)
        fresh = self.folder / f".{id}.{threading.get_ident()}"
        fresh.write_text(json.dumps(asdict(backend)))
        fresh.replace(self.folder / id)
        if tell:
            self.tell("status", id)

    def remove(self, id: str, *, tell: bool = True) -> None:
        (self.folder / id).unlink()
        if tell:
            self.tell("deleted", id)

    def tell(self, kind: str, id: str, reason: str = "") -> None:
        with self.journal.open("a") as file:
            file.write(json.dumps([kind, id, reason]) + "\n")

    def list(self) -> list[Backend]:
        self.calls.append("list")
        self.before_list()
        found = [self._read(entry.name) for entry in os.scandir(self.folder) if entry.name[0] != "."]
        return [each for each in found if each is not None]

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
                    time.sleep(_LOOK)
                yield _event(line)

    def _open(self) -> Any:
        self.calls.append("watch")
        self.before_watch()
        file = self.journal.open()
        file.seek(0, os.SEEK_END)
        return file

    def _read(self, id: str) -> Backend | None:
        try:
            told = json.loads((self.folder / id).read_text())
        except FileNotFoundError:
            return None
        return Backend(
            told["id"],
            tuple(BackendCondition(**each) for each in told["conditions"]),
            told["deleting"],
            told["details"],
        )

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


class AsyncYard:
    """The same for asyncio; hooks may be coroutine functions or plain ones that do not block for long."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard

    async def list(self) -> list[Backend]:
        return await asyncio.to_thread(self._yard.list)

    async def get(self, id: str) -> Backend | None:
        await asyncio.to_thread(self._yard._enter, id)
        try:
            await asyncio.sleep(self._yard.took)
            return self._yard._read(id)
        finally:
            await asyncio.to_thread(self._yard._leave, id)

    async def watch(self) -> AsyncIterator[DriverEvent | None]:
        with await asyncio.to_thread(self._yard._open) as file:
            yield None
            while True:
                line = file.readline()
                if not line:
                    await asyncio.sleep(_LOOK)
                yield _event(line)


def _event(line: str) -> DriverEvent | None:
    if not line.endswith("\n"):
        return None
    kind, id, reason = json.loads(line)
    return DriverEvent(kind, id, reason)
