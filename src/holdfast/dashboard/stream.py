"""The state of one page, shared by all clients that watch it, and its updates, panel by panel."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

EVERY = 1.0
"""Seconds between two reads, while a client watches."""
LOAD = 0.25
"""The largest share of the time that reads for one page may take: a page that is slow to read is read less often."""
CLOCK_EVERY = 10.0
"""Seconds without an update after which a client gets the current time."""

Panel = dict[str, Any]
Render = Callable[[str, Panel, float], str]


@dataclass(frozen=True, slots=True)
class PageView:
    """What a page shows."""

    title: str
    at: float
    """The database's clock when it was read."""
    panels: dict[str, Panel]
    subject: str = ""
    """The whole name of the thing that the page is about."""


@dataclass(slots=True)
class PageState:
    revision: int
    view: PageView
    taken: float
    """Our monotonic clock when the view was read."""
    changed: dict[str, int]
    """The revision in which each panel changed last."""

    def now(self) -> float:
        """What the database's clock says by now."""
        return self.view.at + time.monotonic() - self.taken


class PageStream:
    """``read`` returns the current view. ``stopping`` ends all streams; without it a stream ends after ``lifetime``
    seconds and its client opens the next one, so that a server which waits for its answers can stop."""

    def __init__(
        self,
        read: Callable[[], Awaitable[PageView]],
        render: Render,
        stopping: asyncio.Event,
        lifetime: float | None,
    ) -> None:
        self._read, self._render, self._stopping, self._lifetime = read, render, stopping, lifetime
        self._state: PageState | None = None
        self._pause = EVERY
        self._lock = asyncio.Lock()
        self._updated = asyncio.Event()
        """Set with the next state, and replaced then."""
        self._rendered: tuple[tuple[int, int], str] | None = None
        """The last message, and the two revisions that it is between."""
        self.clients = 0

    async def state(self) -> PageState:
        """The current state; read now unless the last one is less than a pause old."""
        async with self._lock:
            began = time.monotonic()
            if self._state is None or began - self._state.taken >= self._pause:
                view = await self._read()
                self._state = _next_state(self._state, view)
                self._pause = max(EVERY, (self._state.taken - began) / LOAD)
                self._updated.set()
                self._updated = asyncio.Event()
            return self._state

    async def subscribe(self) -> AsyncIterator[str]:
        """The events for one client: all panels, then those that change. The first client whose pause is over reads
        for all."""
        self.clients += 1
        try:
            state = await self.state()
            began = last = time.monotonic()
            yield f"retry: 2000\n{self._message(state, 0)}"
            while not self._stopping.is_set():
                seen, updated = state.revision, self._updated
                if not await _wait(updated, self._stopping, self._pause):
                    await self.state()
                state = self._state or state
                now = time.monotonic()
                if self._lifetime is not None and now - began > self._lifetime:
                    yield _event("again", {})
                    return
                if state.revision != seen:
                    last = now
                    yield self._message(state, seen)
                elif now - last > CLOCK_EVERY:
                    last = now
                    yield _event("clock", {"now": state.now()})
        finally:
            self.clients -= 1

    def _message(self, state: PageState, seen: int) -> str:
        """The panels that have changed since revision ``seen``; rendered once for all clients that have seen it."""
        if self._rendered is None or self._rendered[0] != (seen, state.revision):
            now = state.now()
            panels = {
                name: self._render(name, panel, now)
                for name, panel in state.view.panels.items()
                if state.changed[name] > seen
            }
            self._rendered = (seen, state.revision), _event("state", {"now": now, "panels": panels})
        return self._rendered[1]


def _next_state(before: PageState | None, view: PageView) -> PageState:
    """The revision rises when a panel has changed."""
    taken, panels = time.monotonic(), view.panels
    if before is None:
        return PageState(1, view, taken, dict.fromkeys(panels, 1))
    changed = {name: before.revision + 1 for name, panel in panels.items() if panel != before.view.panels.get(name)}
    revision = before.revision + bool(changed)
    return PageState(revision, view, taken, before.changed | changed)


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


async def _wait(updated: asyncio.Event, stopping: asyncio.Event, seconds: float) -> bool:
    """Wait until one of them is set, for ``seconds`` at most. Returns whether one was."""
    waits = [asyncio.ensure_future(event.wait()) for event in (updated, stopping)]
    try:
        done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return bool(done)
