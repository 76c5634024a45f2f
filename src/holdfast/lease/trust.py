"""How long a holder may believe in its lease, and what the keeper does next.

Trust is counted from the moment *before* the database was asked, and ends a margin before the TTL does: however long
the answer took, the lease cannot have expired in the database yet. Only a renewal extends it; an unknown answer never.
"""

from enum import Enum
from typing import NamedTuple, Self


class BeatAnswer(Enum):
    """What the database said to a heartbeat."""

    RENEWED = "renewed"
    LOST = "lost"
    UNKNOWN = "unknown"


class BeatStep(Enum):
    """What the keeper does after a heartbeat."""

    KEEP = "keep"  # until the next one is due
    RETRY = "retry"  # ask again soon
    LOST = "lost"  # report LeaseLost
    UNKNOWN = "unknown"  # report OwnershipUnknown


def margin(ttl: float) -> float:
    """For clock drift, rounding, and the time between a check and the act that it allows."""
    return min(ttl * 0.1, 1.0)


class Trust(NamedTuple):
    """Until when, on the local monotonic clock, a holder may act as one."""

    ttl: float
    until: float

    @classmethod
    def granted(cls, ttl: float, asked_at: float, remaining: float | None = None) -> Self:
        """``remaining``: what is left according to the database, if that is less than the TTL."""
        left = ttl if remaining is None else min(ttl, remaining)
        return cls(ttl, asked_at + left - margin(ttl))

    def renewed(self, asked_at: float) -> Self:
        """Renewed by a call sent at ``asked_at``. Never shortens trust: a later call may have been answered before."""
        return max(self, self.granted(self.ttl, asked_at))

    @property
    def over(self) -> float:
        """When the lease has certainly expired, unless it is renewed."""
        return self.until + margin(self.ttl)

    def left(self, now: float) -> float:
        return max(0.0, self.until - now)

    def age(self, now: float) -> float:
        """Seconds since the database last confirmed it, at most."""
        return max(0.0, now + self.ttl - margin(self.ttl) - self.until)


def after(answer: BeatAnswer, trust: Trust, asked_at: float, now: float) -> tuple[BeatStep, Trust]:
    """What to do after a heartbeat, and the trust from then on."""
    if answer is BeatAnswer.LOST:
        return BeatStep.LOST, trust
    if now >= trust.until:  # the user may have seen it lost meanwhile: it stays lost, even if it was renewed
        return BeatStep.UNKNOWN, trust
    if answer is BeatAnswer.RENEWED:
        trust = trust.renewed(asked_at)
    return (BeatStep.RETRY if answer is BeatAnswer.UNKNOWN else BeatStep.KEEP), trust


def first_beat(ttl: float, every: float) -> float:
    """Seconds until the first heartbeat of a new beat: soon if opening the session may take a good part of the TTL."""
    return min(every, 0.2) if ttl < 5.0 else every


def budget(left: float) -> float:
    """How long one call may take: a third of the trust that is left, which leaves room for two more."""
    return min(5.0, max(0.02, left / 3))


def backoff(failures: int, left: float) -> float:
    """The pause before the next call: short at first, never so long that trust ends in it."""
    return min(0.02 * 2.0 ** min(failures, 6), 1.0, left / 4)
