"""The arguments of a relay, checked; what it knows from pass to pass; and its decisions about errors. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.errors import SinkDown, walk_causes
from holdfast.names import MAX_TTL, MIN_TTL, RELAY, check_name, check_seconds
from holdfast.operations.decide import error_text, storable_text
from holdfast.operations.events import Event

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
        check_name(name, limit=180)
        counts: tuple[tuple[object, str, int], ...] = ((batch, "batch", 10_000), (tries, "tries", 1000))
        for value, what, limit in counts:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise ValueError(f"{what} must be a whole number from 1 to {limit}, not {value!r}")
        return cls(
            name, batch, check_seconds(poll, "poll", 0.001, MAX_TTL), tries, check_seconds(ttl, "ttl", MIN_TTL, MAX_TTL)
        )

    @property
    def lease(self) -> str:
        return f"{RELAY}{self.name}"


@dataclass(slots=True)
class RelayProgress:
    """What a relay knows in this process, from pass to pass."""

    batch: int
    """Events to read at a time. It is halved when the sink is down, and doubled after a success: a sink that takes one
    event after the other and fails now and then would never get through a large batch."""
    refused_in_a_row: int = 0
    """Events that the sink has refused, each after all its tries, since it last took one."""
    last_taken: Event | None = None
    """The last event that the sink took, also from an earlier process: a sink that works takes it again."""
    is_proven: bool = False
    """Whether this process has got through a batch. Before that, a batch may be what killed earlier processes."""
    caught_up_at: float | None = None
    """When everything in the log was last published; None while another replica runs the relay."""
    unpublished: int = 0
    """Events that were read and not yet published."""


def is_down(error: BaseException) -> bool:
    """Whether an error means that the sink cannot be reached, rather than that it refused the events."""
    chain = walk_causes(error, lambda each: each.__cause__)
    return any(isinstance(each, (SinkDown, ConnectionError, TimeoutError)) for each in chain)


def describe(error: BaseException) -> str:
    """Type and message of an error, without characters that cannot be stored: a sink may quote any input."""
    return storable_text(f"{type(error).__name__}: {error_text(error)}")


def retry_delay(failures: int, chance: float) -> float:
    """Seconds before the next try: doubled with each failure, and spread by ``chance`` (0 to 1)."""
    return float(min(MAX_DELAY, 0.1 * 2 ** min(failures - 1, 10))) * (0.5 + chance / 2)
