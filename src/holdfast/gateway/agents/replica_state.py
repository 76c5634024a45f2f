"""What a replica keeps of its agents in memory: counters and pending stops.

All of it may be lost with the replica. Only the event loop uses it, so it needs no lock, and it excludes nothing: two
replicas would not see each other's locks.
"""

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
class WorkerCycle:
    """One cycle of a worker: which agents it changed, and which were locked."""

    at: float
    done: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


@dataclass(slots=True)
class AgentState:
    hooks: Counter[str] = field(default_factory=Counter)
    """By kind, since the start."""
    busy: int = 0
    """Hooks that were refused because the agent's lock was not acquired in time."""
    under_way: int = 0
    waiting_stops: int = 0
    stops: asyncio.Queue[DueStop] = field(default_factory=asyncio.Queue)
    cycles: dict[str, WorkerCycle] = field(default_factory=dict)
    """The last one of each worker."""
    summarising: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))
    """Bounds the summarisers that run at once, each in a thread."""
    _complete: dict[int, int] = field(default_factory=dict)

    def mark_complete(self, agent: int, version: int) -> None:
        """Remember that all commands and turns of this version of the agent are written."""
        if len(self._complete) >= 10_000:
            self._complete.clear()
        self._complete[agent] = version

    def is_complete(self, agent: int, version: int) -> bool:
        """False when that is not remembered."""
        return self._complete.get(agent) == version
