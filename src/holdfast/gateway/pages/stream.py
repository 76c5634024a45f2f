"""The state of the page, shared by all clients of a replica, and its updates, panel by panel."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from holdfast.gateway.context import Gateway
from holdfast.gateway.pages.panels import Panel, build_panels
from holdfast.gateway.pages.snapshot import Snapshot, take_snapshot
from holdfast.problem_json import Problem

EVERY = 1.0
"""Seconds between two snapshots, while a client watches."""
CLOCK_EVERY = 10.0
"""Seconds without an update after which a client gets the current time."""
MAX_CLIENTS = 200

Render = Callable[[str, Panel, float], str]


@dataclass(slots=True)
class PageState:
    revision: int
    at: float
    """The database's clock when the snapshot was taken, and ours."""
    taken: float
    panels: dict[str, Panel]
    changed: dict[str, int]
    """The revision in which each panel changed last."""

    def now(self) -> float:
        """What the database's clock says by now."""
        return self.at + time.monotonic() - self.taken


class PageStream:
    def __init__(self, gateway: Gateway, render: Render) -> None:
        self._gateway, self._render = gateway, render
        self._snapshot: Snapshot | None = None
        self._state: PageState | None = None
        self._lock = asyncio.Lock()
        self._updated = asyncio.Event()
        """Set with the next snapshot, and replaced then; set for good at the end."""
        self._rendered: tuple[tuple[int, int], str] | None = None
        """The last message, and the two revisions that it is between."""
        self._clients = 0

    async def state(self) -> PageState:
        """The current state; taken now unless the last snapshot is less than EVERY seconds old."""
        async with self._lock:
            now = time.monotonic()
            if self._state is None or now - self._state.taken >= EVERY:
                self._snapshot = await take_snapshot(self._gateway, self._snapshot)
                self._state = _next_state(self._state, self._snapshot)
                self._updated.set()
                self._updated = asyncio.Event()
            return self._state

    async def run(self) -> None:
        """A loop of the gateway: take snapshots while clients watch."""
        stopping = self._gateway.stopping
        try:
            while not stopping.is_set():
                if self._clients:
                    await self.state()
                await _wait(stopping, EVERY)
        finally:
            self._updated.set()

    async def subscribe(self) -> AsyncIterator[str]:
        """The events for one client: all panels, then those that change. Raises Problem 503 beyond MAX_CLIENTS."""
        if self._clients >= MAX_CLIENTS:
            raise Problem(503, f"{MAX_CLIENTS} clients watch this replica already", headers={"Retry-After": "10"})
        self._clients += 1
        try:
            state = await self.state()
            yield f"retry: 2000\n{self._message(state, 0)}"
            while not self._gateway.stopping.is_set():
                seen, updated = state.revision, self._updated
                if await _wait(updated, CLOCK_EVERY):
                    state = self._state or state
                    if state.revision != seen:
                        yield self._message(state, seen)
                else:
                    yield _event("clock", {"now": state.now()})
        finally:
            self._clients -= 1

    def _message(self, state: PageState, seen: int) -> str:
        """The panels that have changed since revision ``seen``; rendered once for all clients that have seen it."""
        if self._rendered is None or self._rendered[0] != (seen, state.revision):
            now = state.now()
            panels = {
                name: self._render(name, panel, now)
                for name, panel in state.panels.items()
                if state.changed[name] > seen
            }
            self._rendered = (seen, state.revision), _event("state", {"now": now, "panels": panels})
        return self._rendered[1]


def _next_state(before: PageState | None, snapshot: Snapshot) -> PageState:
    """The revision rises when a panel has changed."""
    taken, panels = time.monotonic(), build_panels(snapshot)
    if before is None:
        return PageState(1, snapshot.at, taken, panels, dict.fromkeys(panels, 1))
    changed = {name: before.revision + 1 for name, panel in panels.items() if panel != before.panels[name]}
    revision = before.revision + bool(changed)
    return PageState(revision, snapshot.at, taken, panels, before.changed | changed)


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` was set within that time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
