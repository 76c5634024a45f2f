"""The arguments of a relay, checked, and its decisions about errors of a sink. Pure."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.errors import SinkDown
from holdfast.names import MAX_TTL, MIN_TTL, check_name, check_seconds
from holdfast.operations.decide import causes, worded, writable

LEASE = "@relay:"
"""Prefix of the leases under which relays run."""
SUSPICIOUS = 3
"""After so many refused events in a row the sink is tested with an event that it has taken before."""
MAX_DELAY = 30.0
"""Seconds between two tries."""


class RelayTerms(NamedTuple):
    """The arguments of ``client.relay(…)``, checked."""

    name: str
    batch: int
    poll: float
    tries: int
    ttl: float

    @classmethod
    def check(cls, name: str, *, batch: int, poll: float, tries: int, ttl: float) -> RelayTerms:
        check_name(name, most=180)
        counts: tuple[tuple[object, str, int], ...] = ((batch, "batch", 10_000), (tries, "tries", 1000))
        for value, what, most in counts:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{what} must be a whole number from 1 to {most}, not {value!r}")
        return cls(
            name, batch, check_seconds(poll, "poll", 0.001, MAX_TTL), tries, check_seconds(ttl, "ttl", MIN_TTL, MAX_TTL)
        )

    @property
    def lease(self) -> str:
        return f"{LEASE}{self.name}"


def is_down(error: BaseException) -> bool:
    """Whether an error means that the sink cannot be reached, rather than that it refused the events."""
    chain = causes(error, lambda each: each.__cause__)
    return any(isinstance(each, (SinkDown, ConnectionError, TimeoutError)) for each in chain)


def describe(error: BaseException) -> str:
    """Type and message of an error, without characters that cannot be stored: a sink may quote any input."""
    return writable(f"{type(error).__name__}: {worded(error)}")


def retry_delay(failures: int, chance: float) -> float:
    """Seconds before the next try: doubled with each failure, and spread by ``chance`` (0 to 1)."""
    return float(min(MAX_DELAY, 0.1 * 2 ** min(failures - 1, 10))) * (0.5 + chance / 2)
