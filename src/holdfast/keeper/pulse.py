"""What the keeper keeps: beats, the leases on them, and things still to be said to the database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.core.errors import HoldfastError
from holdfast.core.renewal import Trust

LINGER = 1.0
"""Seconds that a beat without leases stays, for the next acquire to use."""


class Owner(Protocol):
    """Whoever made the client: a process, or an event loop that may be closed without a word."""

    def alive(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Holding:
    """One lease on a pulse. ``tell`` is called once, in the keeper's thread, when it is lost."""

    name: str
    token: str
    owner: Owner
    tell: Callable[[HoldfastError], None]


@dataclass(slots=True, eq=False)
class Pulse:
    """One beat row, and all leases of this process that hang on it."""

    beat: str
    trust: Trust
    every: float
    due: float
    session_key: int | None
    generation: int = 0
    failures: int = 0
    borrowed: int = 0
    holdings: dict[str, Holding] = field(default_factory=dict)
    owners: Counter[Owner] = field(default_factory=Counter)
    empty_since: float | None = None

    def add(self, holding: Holding) -> None:
        self.holdings[holding.token] = holding
        self.owners[holding.owner] += 1
        self.empty_since = None

    def remove(self, token: str) -> Holding | None:
        holding = self.holdings.pop(token, None)
        if holding is not None:
            self.owners[holding.owner] -= 1
        return holding

    def of_owner(self, owner: Owner) -> list[Holding]:
        return [each for each in self.holdings.values() if each.owner is owner] if self.owners[owner] else []

    def ends_at(self) -> float | None:
        """When it may go, having nothing left to keep."""
        if self.holdings or self.borrowed or self.empty_since is None:
            return None
        return min(self.due, self.empty_since + LINGER)


@dataclass(slots=True, eq=False)
class Chore:
    """Something to say until it is answered, or answered so: what is to be undone may not have happened yet (True), and
    what there is to do may be more than one call does (False)."""

    statement: str
    parameters: dict[str, Any]
    due: float
    give_up: float
    until: bool | None = None
    tries: int = 0

    def settled(self, answer: bool | None, now: float) -> bool:
        return (answer is not None and self.until in (None, answer)) or now >= self.give_up

    def put_off(self, now: float) -> None:
        self.tries += 1
        self.due = now + min(0.05 * 4.0 ** min(self.tries, 5), 30.0)
