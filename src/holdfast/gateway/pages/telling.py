"""One picture of what is so, shared by everybody who watches this replica, and told part by part when it changes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from holdfast.gateway.context import Gateway
from holdfast.gateway.pages.looking import Sight, look
from holdfast.gateway.pages.parts import Part, tell
from holdfast.gateway.problem import Problem

EVERY = 1.0
"""Seconds between two looks, while somebody watches."""
QUIET = 10.0
"""Seconds after which those who were told nothing are told what time it is."""
MOST = 200
"""Who may watch one replica."""

Render = Callable[[str, Part, float], str]


@dataclass(slots=True)
class Picture:
    """``parts`` with the number of the picture in which each changed last."""

    number: int
    at: float
    """The database's clock when it was taken, and ours."""
    taken: float
    parts: dict[str, Part]
    changed: dict[str, int]

    def now(self) -> float:
        """What the database's clock says by now."""
        return self.at + time.monotonic() - self.taken


class Teller:
    def __init__(self, gateway: Gateway, render: Render) -> None:
        self._gateway, self._render = gateway, render
        self._sight: Sight | None = None
        self._picture: Picture | None = None
        self._looking = asyncio.Lock()
        self._bell = asyncio.Event()
        self._latest: tuple[tuple[int, int], str] | None = None
        self._watching = 0

    async def picture(self) -> Picture:
        """As it is now, or was less than a look ago."""
        async with self._looking:
            now = time.monotonic()
            if self._picture is None or now - self._picture.taken >= EVERY:
                self._sight = await look(self._gateway, self._sight)
                self._picture = _next(self._picture, self._sight)
                self._bell.set()
                self._bell = asyncio.Event()
            return self._picture

    async def serve(self) -> None:
        """Look as long as somebody watches."""
        stopping = self._gateway.stopping
        try:
            while not stopping.is_set():
                if self._watching:
                    await self.picture()
                await _waited(stopping, EVERY)
        finally:
            self._bell.set()

    async def watch(self) -> AsyncIterator[str]:
        """The stream of one who watches: all of it first, then what changes."""
        if self._watching >= MOST:
            raise Problem(503, f"{MOST} are watching this replica already", headers={"Retry-After": "10"})
        self._watching += 1
        try:
            picture = await self.picture()
            yield f"retry: 2000\n{self._message(picture, 0)}"
            while not self._gateway.stopping.is_set():
                seen, bell = picture.number, self._bell  # which is rung at the end, too
                if await _waited(bell, QUIET):
                    picture = self._picture or picture
                    if picture.number != seen:
                        yield self._message(picture, seen)
                else:
                    yield _event("clock", {"now": picture.now()})
        finally:
            self._watching -= 1

    def _message(self, picture: Picture, seen: int) -> str:
        """What is new since; rendered once for all who have seen the same."""
        if self._latest is None or self._latest[0] != (seen, picture.number):
            now = picture.now()
            parts = {
                name: self._render(name, part, now)
                for name, part in picture.parts.items()
                if picture.changed[name] > seen
            }
            self._latest = (seen, picture.number), _event("state", {"now": now, "parts": parts})
        return self._latest[1]


def _next(before: Picture | None, sight: Sight) -> Picture:
    """The same number as long as every part is the same."""
    taken, parts = time.monotonic(), tell(sight)
    if before is None:
        return Picture(1, sight.at, taken, parts, dict.fromkeys(parts, 1))
    changed = {name: before.number + 1 for name, part in parts.items() if part != before.parts[name]}
    number = before.number + bool(changed)
    return Picture(number, sight.at, taken, parts, before.changed | changed)


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


async def _waited(event: asyncio.Event, seconds: float) -> bool:
    """Whether it has come to pass in that time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
