"""Events for watchers: numbered, and kept for a while, so that a watch can continue after a disconnect."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

MAX_EVENTS = 10_000


class EventCursorExpired(Exception):
    """Events after this cursor are not kept any more: list, and watch from now on."""


class Events:
    def __init__(self, limit: int = MAX_EVENTS) -> None:
        self._epoch = os.urandom(6).hex()
        self._events: deque[dict[str, Any]] = deque(maxlen=limit)
        self._last = 0
        self._added = asyncio.Event()

    @property
    def cursor(self) -> str:
        return self._cursor(self._last)

    def add(self, kind: str, id: str, **more: Any) -> dict[str, Any]:
        self._last += 1
        event = {"cursor": self.cursor, "kind": kind, "id": id, **more}
        self._events.append(event)
        self._added.set()
        self._added = asyncio.Event()
        return event

    def position(self, cursor: str) -> int:
        """The number of a cursor. Raises ValueError when it is malformed, EventCursorExpired when it is too old or
        of an earlier process of the driver."""
        epoch, _, number = cursor.partition(".")
        if not (epoch.isalnum() and number.isdecimal() and len(number) < 19):
            raise ValueError("since is no cursor")
        at = int(number)
        if epoch != self._epoch or at < self._last - len(self._events):
            raise EventCursorExpired("this driver does not know what happened since then: list, and watch from now on")
        if at > self._last:
            raise ValueError("since is a cursor that has not been given out yet")
        return at

    async def since(self, at: int, every: float) -> AsyncIterator[dict[str, Any]]:
        """All events after number ``at``, and a bookmark at once and after ``every`` seconds without an event. Ends
        when the watcher is too slow: it would miss events."""
        yield {"cursor": self._cursor(at), "kind": "bookmark"}
        while True:
            first = self._last - len(self._events)
            if at < first:
                return
            if at < self._last:
                event = self._events[at - first]
                at += 1
                yield event
                continue
            try:
                async with asyncio.timeout(every):
                    await self._added.wait()
            except TimeoutError:
                yield {"cursor": self._cursor(at), "kind": "bookmark"}

    def _cursor(self, number: int) -> str:
        return f"{self._epoch}.{number}"
