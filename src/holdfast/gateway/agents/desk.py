"""What a replica keeps of its agents in its own memory: counts, and stops that wait. Nothing else depends on it: all of
it may be lost with the replica. It belongs to the event loop, so it needs no lock, and keeps nobody out of anything."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class DueStop(NamedTuple):
    agent: int
    command: int
    at: float
    delay: float


@dataclass(slots=True)
class Swept:
    """One cycle of a worker: whom it has done something about, and who was busy."""

    at: float
    done: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Desk:
    hooks: Counter[str] = field(default_factory=Counter)
    """By kind, since the start."""
    busy: int = 0
    """Hooks that were refused because the agent's lock was not to be had."""
    under_way: int = 0
    waiting_stops: int = 0
    stops: asyncio.Queue[DueStop] = field(default_factory=asyncio.Queue)
    cycles: dict[str, Swept] = field(default_factory=dict)
    """The last one of each worker."""
    summarising: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))
    """Each has a connection of its own."""
    _settled: dict[int, int] = field(default_factory=dict)

    def settled(self, agent: int, version: int) -> None:
        """All that this commit of the agent has to write is written, which stays true."""
        if len(self._settled) >= 10_000:
            self._settled.clear()
        self._settled[agent] = version

    def is_settled(self, agent: int, version: int) -> bool:
        """False: not as far as we know."""
        return self._settled.get(agent) == version
