"""What the keeper keeps: beats, the leases on them, and things still to be said to the database."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

from holdfast.errors import HoldfastError
from holdfast.lease.trust import Trust
from holdfast.runtime.identity import new_token

LINGER = 1.0
"""Seconds that a beat without leases stays, for the next acquire to use."""


class Owner(Protocol):
    """Whoever made the client: a process, or an event loop that may be closed without a word."""

    def alive(self) -> bool: ...


class Holding(NamedTuple):
    """One lease on a pulse. ``tell`` is called once, in the keeper's thread, when it is lost."""

    name: str
    token: str
    owner: Owner
    tell: Callable[[HoldfastError], None]
    heard: Callable[[HoldfastError | None], None] | None = None
    """Called there after each heartbeat that leaves it ours, with what went wrong."""
    recalled: Callable[[], object] | None = None
    """Called there when an operator asks it back."""


class Pulse:
    """One beat row, and all leases of this process that hang on it."""

    def __init__(self, beat: str, trust: Trust, session_key: int | None) -> None:
        self.beat, self.trust, self.session_key = beat, trust, session_key
        self.every = self.due = math.inf
        self.founded = False
        """Whether it is known that its row was made."""
        self.doubted = False
        """Whether one who asked never heard if it was."""
        self.generation = 0
        self.failures = 0
        self.problem: HoldfastError | None = None
        self.borrowed = 0
        self.holdings: dict[str, Holding] = {}
        self._by_owner: dict[Owner, dict[str, Holding]] = {}
        self.empty_since: float | None = None
        self.shared = True
        """With further leases, or that of one alone which is told of each heartbeat."""

    @classmethod
    def to_be(cls, ttl: float, session_key: int | None) -> Self:
        """Nobody trusts in it before its row has been made."""
        return cls(new_token(), Trust(ttl, -math.inf), session_key)

    def found(self, trust: Trust, every: float, due: float) -> None:
        self.trust, self.every, self.due, self.founded = trust, every, due, True

    def fits(self, ttl: float, session_key: int | None, now: float) -> bool:
        """Whether one more lease can live on it."""
        good = not self.founded or self.trust.left(now) > 0
        return self.shared and good and self.trust.ttl == ttl and self.session_key == session_key

    def add(self, holding: Holding) -> None:
        self.holdings[holding.token] = self._by_owner.setdefault(holding.owner, {})[holding.token] = holding
        self.empty_since = None

    def remove(self, token: str) -> Holding | None:
        """Each step by itself is whole: in between, a signal's handler may remove another one."""
        holding = self.holdings.pop(token, None)
        if holding is not None:
            self._by_owner[holding.owner].pop(token, None)
        return holding

    def of_owner(self, owner: Owner) -> list[Holding]:
        return list(self._by_owner.get(owner, {}).values())

    def orphans(self) -> list[Holding]:
        """Leases of an event loop that was closed without a word. Owners that have none left are forgotten."""
        self._by_owner = {owner: theirs for owner, theirs in self._by_owner.items() if theirs}
        return [each for owner, theirs in self._by_owner.items() if not owner.alive() for each in theirs.values()]

    def ends_at(self) -> float | None:
        """When it may go, having nothing left to keep."""
        if self.holdings or self.borrowed or self.empty_since is None:
            return None
        return min(self.due, self.empty_since + LINGER)


class Chore:
    """Something to say until it is answered, or answered so: what is to be undone may not have happened yet (True), and
    what there is to do may be more than one call does (False)."""

    def __init__(
        self, statement: str, parameters: dict[str, Any], due: float, give_up: float, until: bool | None = None
    ) -> None:
        self.statement, self.parameters = statement, parameters
        self.due, self.give_up, self.until = due, give_up, until
        self.tries = 0

    def settled(self, answer: bool | None, now: float) -> bool:
        return (answer is not None and self.until in (None, answer)) or now >= self.give_up

    def put_off(self, answer: bool | None, now: float) -> None:
        self.tries = self.tries + 1 if answer is None or self.until else 0  # when there is more to do, soon
        self.due = now + min(0.05 * 4.0 ** min(self.tries, 5), 30.0)
