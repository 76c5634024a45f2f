"""What has happened, for those who watch: numbered, and kept for a while, so that a watch goes on where it was cut."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

KEPT = 10_000


class Expired(Exception):
    """What came after that cursor is not known any more: list, and watch from now on."""


class Events:
    def __init__(self, kept: int = KEPT) -> None:
        self._epoch = os.urandom(6).hex()
        self._kept: deque[dict[str, Any]] = deque(maxlen=kept)
        self._last = 0
        self._news = asyncio.Event()

    @property
    def cursor(self) -> str:
        return self._cursor(self._last)

    def add(self, kind: str, id: str, **more: Any) -> dict[str, Any]:
        self._last += 1
        event = {"cursor": self.cursor, "kind": kind, "id": id, **more}
        self._kept.append(event)
        self._news.set()
        self._news = asyncio.Event()
        return event

    def position(self, cursor: str) -> int:
        """ValueError if it is none of ours; Expired if it is of another driver's life, or too old."""
        epoch, _, number = cursor.partition(".")
        if not (epoch.isalnum() and number.isdecimal() and len(number) < 19):
            raise ValueError("since is no cursor")
        at = int(number)
        if epoch != self._epoch or at < self._last - len(self._kept):
            raise Expired("this driver does not know what happened since then: list, and watch from now on")
        if at > self._last:
            raise ValueError("since is a cursor that has not been given out yet")
        return at

    async def since(self, at: int, beat: float) -> AsyncIterator[dict[str, Any]]:
        """Everything after it, and a bookmark at once and whenever it is quiet for ``beat`` seconds. Ends when the
        watcher is so slow that it would miss something."""
        yield {"cursor": self._cursor(at), "kind": "bookmark"}
        while True:
            first = self._last - len(self._kept)
            if at < first:
                return
            if at < self._last:
                event = self._kept[at - first]
                at += 1
                yield event
                continue
            try:
                async with asyncio.timeout(beat):
                    await self._news.wait()
            except TimeoutError:
                yield {"cursor": self._cursor(at), "kind": "bookmark"}

    def _cursor(self, number: int) -> str:
        return f"{self._epoch}.{number}"
