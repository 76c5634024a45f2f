"""One beat row, and the leases of this process that it renews."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

from holdfast.errors import HoldfastError
from holdfast.lease.trust import Trust
from holdfast.runtime.identity import new_token

LINGER = 1.0
"""Seconds that a beat without leases is kept for the next acquire."""


class LeaseOwner(Protocol):
    """The process, or the event loop, that a client belongs to."""

    def alive(self) -> bool:
        """False for an event loop that was closed."""


class KeptLease(NamedTuple):
    """A lease that a beat renews. Its callbacks are called in the background thread."""

    name: str
    token: str
    owner: LeaseOwner
    on_lost: Callable[[HoldfastError], None]
    """Called once, when it is lost."""
    on_beat: Callable[[HoldfastError | None], None] | None = None
    """Called after each heartbeat that leaves it ours, with the error of that heartbeat."""
    on_recall: Callable[[], object] | None = None
    """Called when an operator asks for it back."""


class Beat:
    def __init__(self, id: str, trust: Trust, session_key: int | None) -> None:
        self.id, self.trust, self.session_key = id, trust, session_key
        self.every = self.due = math.inf
        self.exists = False
        """Whether its row is known to exist."""
        self.is_doubtful = False
        """Whether an acquire that would have created the row was never answered."""
        self.generation = 0
        self.failures = 0
        self.error: HoldfastError | None = None
        """Of the last heartbeat."""
        self.acquires = 0
        """Acquires in flight that will add a lease to it."""
        self.leases: dict[str, KeptLease] = {}
        """By token."""
        self._by_owner: dict[LeaseOwner, dict[str, KeptLease]] = {}
        self.empty_since: float | None = None
        self.is_shared = True
        """False for the beat of a single lease that is told of every heartbeat."""

    @classmethod
    def requested(cls, ttl: float, session_key: int | None) -> Self:
        """A beat whose row the next acquire creates. Until then it has no trust."""
        return cls(new_token(), Trust(ttl, -math.inf), session_key)

    def created(self, trust: Trust, every: float, due: float) -> None:
        self.trust, self.every, self.due, self.exists = trust, every, due, True

    def fits(self, ttl: float, session_key: int | None, now: float) -> bool:
        """Whether it can renew one more lease of this kind."""
        good = not self.exists or self.trust.left(now) > 0
        return self.is_shared and good and self.trust.ttl == ttl and self.session_key == session_key

    def add(self, lease: KeptLease) -> None:
        self.leases[lease.token] = self._by_owner.setdefault(lease.owner, {})[lease.token] = lease
        self.empty_since = None

    def remove(self, token: str) -> KeptLease | None:
        """Safe against a signal handler that removes another lease in between."""
        lease = self.leases.pop(token, None)
        if lease is not None:
            self._by_owner[lease.owner].pop(token, None)
        return lease

    def leases_of(self, owner: LeaseOwner) -> list[KeptLease]:
        return list(self._by_owner.get(owner, {}).values())

    def orphans(self) -> list[KeptLease]:
        """Leases of event loops that were closed. Forgets owners without leases."""
        self._by_owner = {owner: leases for owner, leases in self._by_owner.items() if leases}
        return [lease for owner, leases in self._by_owner.items() if not owner.alive() for lease in leases.values()]

    def next_beat(self) -> float:
        """When to renew it, or to report that trust in it has ended."""
        return min(self.due, self.trust.until)

    def ends_at(self) -> float | None:
        """When to end it, if it stays without leases."""
        if self.leases or self.acquires or self.empty_since is None:
            return None
        return min(self.due, self.empty_since + LINGER)
