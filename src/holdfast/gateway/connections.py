"""How many connections a replica has, in all and per address, and which one is closed if there are too many.

A connection is idle until the head of a request is complete, and again when that request is answered. If there are too
many, the oldest idle one is closed: silent peers displace each other, and no request that is being answered. This
module decides, and closes nothing itself. The same holds for answers that clients do not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

MAX_CONNECTIONS = 4096
"""In all; half of it from one address, which may be that of a proxy."""
SPARE_FILES = 512
"""Descriptors that connections leave to the database, to the driver, to files, and to connections that are accepted and
not counted yet."""
BACKLOG = 128
"""Connections that wait to be accepted; so many are accepted at a time."""
HEAD_WITHIN = 10.0
"""Seconds until the head of a request is complete. It has the token, too: an idle connection is not authenticated."""


MAX_UNSENT = 16 << 20
"""Bytes of answers that wait for clients which do not read, in all. Beyond it the client that has waited longest is cut
off."""
STALL_WITHIN = 20.0
"""Seconds without a byte read until a client is cut off."""


class ConnectionLimits:
    def __init__(self, total: int) -> None:
        self._total, self._per_address = total, max(1, total // 2)
        self._addresses: dict[Hashable, str] = {}
        self._counts: Counter[str] = Counter()
        self._idle: dict[Hashable, None] = {}
        """The oldest first."""
        self._idle_of: dict[str, dict[Hashable, None]] = {}
        self._unsent: dict[Hashable, int] = {}
        """The one that has waited longest first."""

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: Hashable, address: str) -> Hashable | None:
        """Count a new, idle connection. Returns the one to close: perhaps the new one, when all others are busy. Each
        is returned once: many may be added before the first of them is removed."""
        self._addresses[connection] = address
        self._counts[address] += 1
        self.set_idle(connection)
        if self._counts[address] > self._per_address:
            surplus = next(iter(self._idle_of[address]))
        elif len(self._addresses) > self._total:
            surplus = next(iter(self._idle))
        else:
            return None
        self.set_busy(surplus)
        return surplus

    def set_idle(self, connection: Hashable) -> None:
        if (address := self._addresses.get(connection)) is not None:
            self._idle[connection] = self._idle_of.setdefault(address, {})[connection] = None

    def set_busy(self, connection: Hashable) -> None:
        self._idle.pop(connection, None)
        address = self._addresses.get(connection, "")
        if idle := self._idle_of.get(address):
            idle.pop(connection, None)
            if not idle:
                del self._idle_of[address]

    def set_unsent(self, connection: Hashable, size: int) -> list[Hashable]:
        """Count the bytes that wait for the client. Returns the connections to close; never all that wait."""
        self._unsent.pop(connection, None)
        if size:
            self._unsent[connection] = size
        surplus = []
        while len(self._unsent) > 1 and sum(self._unsent.values()) > MAX_UNSENT:
            surplus.append(oldest := next(iter(self._unsent)))
            del self._unsent[oldest]
        return surplus

    def remove(self, connection: Hashable) -> None:
        self._unsent.pop(connection, None)
        self.set_busy(connection)
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]
