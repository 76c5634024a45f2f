"""What a replica keeps of its agents in memory: counters and pending stops.

All of it may be lost with the replica. Only the event loop uses it, so it needs no lock. It never decides who may
change an agent: replicas do not see each other's memory, so a lock in the database decides that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class DueStop(NamedTuple):
    """A command to complete in ``delay`` seconds, unless the agent continues: then its ``stop_at`` is another."""

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
    """Hooks that are being answered."""
    waiting_stops: int = 0
    """Stops whose delay has not passed yet."""
    stops: asyncio.Queue[DueStop] = field(default_factory=asyncio.Queue)
    cycles: dict[str, WorkerCycle] = field(default_factory=dict)
    """The last one of each worker."""
    summarising: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))
    """Bounds the summarisers that run at once, each in a thread."""
    _complete: dict[int, int] = field(default_factory=dict)

    def mark_complete(self, agent: int, version: int) -> None:
        """Remember that everything that follows from this version of the agent's record is in the database."""
        if len(self._complete) >= 10_000:
            self._complete.clear()
        self._complete[agent] = version

    def is_complete(self, agent: int, version: int) -> bool:
        """Whether ``mark_complete`` was called for this version. False when it was forgotten."""
        return self._complete.get(agent) == version
