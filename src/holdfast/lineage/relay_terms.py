"""How a relay deals with its sink, as values: who is to blame when something is not taken, and how long to wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from holdfast.errors import SinkDown
from holdfast.names import MAX_TTL, MIN_TTL, check_name, check_seconds
from holdfast.operations.decide import causes, worded, writable
from holdfast.operations.events import Event
from holdfast.timestamps import as_datetime

LEASE = "@relay:"
"""What the names of the leases begin with under which relays work."""
SUSPICIOUS = 3
"""Events refused in a row, after all their tries, from which it is the sink that is at fault and not they."""
LONGEST = 30.0


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
    """Whether it says that the sink is not there, rather than something about what it was given."""
    found = causes(error, lambda each: each.__cause__)
    return any(isinstance(each, (SinkDown, ConnectionError, TimeoutError)) for each in found)


def words(error: BaseException) -> str:
    """What an error says: a sink may repeat whatever it was given."""
    return writable(f"{type(error).__name__}: {worded(error)}")


def pause(failures: int, chance: float) -> float:
    """Seconds before the sink is asked again: longer each time, and never in step with others."""
    return float(min(LONGEST, 0.1 * 2 ** min(failures - 1, 10))) * (0.5 + chance / 2)


@dataclass(frozen=True, slots=True)
class RelayRecord:
    """A relay as ``client.relays`` shows it."""

    name: str
    holder: str | None
    """Who runs it at present."""
    told: int
    entries: int
    """Of the log, written together, that it has not told yet; counted as far as 100,000."""
    lag: float
    """Seconds since the oldest of them was written."""
    parked: int
    problem: str | None
    """Why its sink takes nothing at present, and since when."""
    since: datetime | None
    moved_at: datetime
    fence: int
    cursor: str
    """Where in the log it stands."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RelayRecord:
        return cls(**{**row, "since": as_datetime(row["since"]), "moved_at": as_datetime(row["moved_at"])})


@dataclass(frozen=True, slots=True)
class ParkedRecord:
    """An event that a sink refused."""

    id: str
    key: str
    event: Event
    problem: str
    tries: int
    parked_at: datetime
    again: bool
    """Whether it is to be told again."""


def parked_of(row: Mapping[str, Any], event: Event) -> ParkedRecord:
    said = {**row, "event": event, "parked_at": as_datetime(row["parked_at"]), "again": bool(row["again"])}
    return ParkedRecord(**said)
