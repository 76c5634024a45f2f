"""How long a holder may believe in its lease, and what the keeper does next.

Trust is counted from *before* the question was asked, and ends a margin before the TTL does: whatever the network did
meanwhile, the database cannot have forgotten us yet. Only a renewal extends it. An unknown answer never does.
"""

from enum import Enum
from typing import NamedTuple, Self


class Answer(Enum):
    """What the database said to a heartbeat."""

    RENEWED = "renewed"
    LOST = "lost"
    UNKNOWN = "unknown"


class Step(Enum):
    KEEP = "keep"  # all is well until the next beat is due
    RETRY = "retry"  # ask again soon
    TELL_LOST = "tell lost"
    TELL_UNKNOWN = "tell unknown"


def margin(ttl: float) -> float:
    """For what no clock shows: drift, rounding, the time between the decision and the deed."""
    return min(ttl * 0.1, 1.0)


class Trust(NamedTuple):
    """Until when, on the local monotonic clock, a holder may act as one."""

    ttl: float
    until: float

    @classmethod
    def counted(cls, ttl: float, asked_at: float, remaining: float | None = None) -> Self:
        """``remaining`` is what the database said is left, where that is less than a whole TTL."""
        left = ttl if remaining is None else min(ttl, remaining)
        return cls(ttl, asked_at + left - margin(ttl))

    def renewed(self, asked_at: float) -> Self:
        """By a question of that moment: one that took its time takes nothing away from a later one, answered before."""
        return max(self, self.counted(self.ttl, asked_at))

    @property
    def over(self) -> float:
        """When it has passed on for certain, if nobody renews it."""
        return self.until + margin(self.ttl)

    def left(self, now: float) -> float:
        return max(0.0, self.until - now)

    def age(self, now: float) -> float:
        """Seconds since the database was asked for it, at the most."""
        return max(0.0, now + self.ttl - margin(self.ttl) - self.until)


def after(answer: Answer, trust: Trust, asked_at: float, now: float) -> tuple[Step, Trust]:
    """The decision after a heartbeat: what to do, and the trust from here on."""
    if answer is Answer.LOST:
        return Step.TELL_LOST, trust
    if now >= trust.until:  # somebody may have looked meanwhile and seen it lost: it stays so, even if this was renewed
        return Step.TELL_UNKNOWN, trust
    if answer is Answer.RENEWED:
        trust = trust.renewed(asked_at)
    return (Step.RETRY if answer is Answer.UNKNOWN else Step.KEEP), trust


def first_beat(ttl: float, every: float) -> float:
    """Seconds until the first heartbeat of a new beat: soon where opening a session may take a good part of the TTL."""
    return min(every, 0.2) if ttl < 5.0 else every


def budget(left: float) -> float:
    """How long one attempt may take: a third of the trust that is left, so that there is a second and a third."""
    return min(5.0, max(0.02, left / 3))


def backoff(failures: int, left: float) -> float:
    """The pause before the next attempt: short at first, never so long that trust ends in it."""
    return min(0.02 * 2.0 ** min(failures, 6), 1.0, left / 4)
