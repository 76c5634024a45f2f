"""Standing by, leading, giving back: what an elector does next, as a table, and which timings can hold.

The one rule behind it: a lease is released when its work has ended, never before, and renewed until then. For work that
does not end in time it is renewed no more, so it ends by itself, and not by our doing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Literal, NamedTuple

from holdfast.lease.terms import Failover, LeaseTerms, OnBeat, Refusal
from holdfast.lease.trust import margin
from holdfast.names import MAX_TTL, check_name, check_seconds

Overrun = Literal["wait", "exit"]
_LOOK = 0.005
"""Seconds between two looks of a standby on one machine, where looking costs next to nothing."""


class State(Enum):
    STANDBY = "standby"
    LEADING = "leading"
    YIELDING = "yielding"  # the work was told to stop; then we stand by again
    LEAVING = "leaving"  # the work was told to stop; then it is over
    ENDED = "ended"


class Event(Enum):
    GRANTED = "granted"
    LOST = "lost"  # certainly, or so nearly that the work needs what is left of it to stop
    RESIGN = "resign"
    STOP = "stop"
    GRACE_OVER = "grace over"
    WORK_ENDED = "work ended"


class Action(Enum):
    NOTHING = "nothing"
    START = "start the work"
    CANCEL = "tell the work to stop"
    LET_EXPIRE = "renew no more"
    RELEASE = "release"


_TABLE: dict[tuple[State, Event], tuple[State, Action]] = {
    (State.STANDBY, Event.GRANTED): (State.LEADING, Action.START),
    (State.STANDBY, Event.STOP): (State.ENDED, Action.NOTHING),
    (State.LEADING, Event.LOST): (State.YIELDING, Action.CANCEL),
    (State.LEADING, Event.RESIGN): (State.YIELDING, Action.CANCEL),
    (State.LEADING, Event.STOP): (State.LEAVING, Action.CANCEL),
    (State.LEADING, Event.WORK_ENDED): (State.ENDED, Action.RELEASE),
    (State.YIELDING, Event.STOP): (State.LEAVING, Action.NOTHING),
    (State.YIELDING, Event.GRACE_OVER): (State.YIELDING, Action.LET_EXPIRE),
    (State.YIELDING, Event.WORK_ENDED): (State.STANDBY, Action.RELEASE),
    (State.LEAVING, Event.GRACE_OVER): (State.LEAVING, Action.LET_EXPIRE),
    (State.LEAVING, Event.WORK_ENDED): (State.ENDED, Action.RELEASE),
}


def after(state: State, event: Event) -> tuple[State, Action]:
    """What an event leads to; whatever is not in the table changes nothing."""
    return _TABLE.get((state, event), (state, Action.NOTHING))


class ElectorTerms(NamedTuple):
    """The arguments of ``client.elector(…)``, checked."""

    name: str
    ttl: float
    renew_every: float
    retry_every: float
    grace: float
    holder: str | None
    failover: Failover
    overrun: Overrun

    @classmethod
    def check(
        cls,
        name: str,
        *,
        ttl: float,
        renew_every: float,
        retry_every: float,
        grace: float | None = None,
        holder: str | None = None,
        failover: Failover = "ttl",
        overrun: Overrun = "wait",
    ) -> ElectorTerms:
        lease = LeaseTerms.check(name, ttl=ttl, holder=holder, renew_every=renew_every, failover=failover)
        if check_seconds(retry_every, "retry_every", 0.001, MAX_TTL) > lease.ttl:
            raise ValueError(f"retry_every must be at most ttl={ttl:g}, not {retry_every!r}: nobody would take over")
        grace = lease.ttl / 6 if grace is None else check_seconds(grace, "grace", 0.0, MAX_TTL)
        if renew_every + grace + margin(lease.ttl) >= lease.ttl:
            raise ValueError(
                f"ttl={ttl:g} is too short: renew_every={renew_every:g} and grace={grace:g} for the work to stop, and "
                f"{margin(lease.ttl):g} s of margin, must fit into it"
            )
        if overrun not in ("wait", "exit"):
            raise ValueError(f"overrun must be 'wait' or 'exit', not {overrun!r}")
        if holder is not None:
            check_name(holder, "holder", most=180)  # an instance's nonce is added
        return cls(lease.name, lease.ttl, renew_every, retry_every, grace, holder, failover, overrun)

    def lease(self, holder: str, *, kernel: bool, on_beat: OnBeat) -> LeaseTerms:
        """What to ask the database for. ``kernel``: on one machine the kernel knows at once who lives, so there the TTL
        is the longest there is and nothing depends on a heartbeat: it only hears of a lease that was taken away."""
        ttl = MAX_TTL if kernel else self.ttl
        failover: Failover = "session" if kernel else self.failover
        return LeaseTerms(self.name, ttl, holder, 0.0, True, self.renew_every, "flag", failover, False, on_beat)

    def until_next(self, held: Refusal | None, *, kernel: bool, chance: float) -> float:
        """Seconds until a standby asks again, if nobody wakes it. ``held``: the last answer; None: there was none.
        ``chance``, from 0 to 1: where in its span, so that replicas do not ask in step.

        Never more than ``retry_every``, nor more than a moment after the lease ends by itself: so whoever crashes is
        succeeded after ``ttl`` and ``retry_every`` at the most."""
        spread = 0.75 + 0.25 * chance
        if held is None:
            return self.retry_every * spread
        if held.remaining is None:  # just being changed by somebody
            return 0.002 + 0.018 * chance
        every = min(self.retry_every, _LOOK) if kernel else self.retry_every
        return min(every * spread, max(0.0, held.remaining) + 0.001 + 0.009 * chance)


def replica(environment: Mapping[str, str], unique: str) -> str:
    """Who we are to people: HOLDFAST_REPLICA_ID, else HOSTNAME, else something unique."""
    found = environment.get("HOLDFAST_REPLICA_ID") or environment.get("HOSTNAME") or unique
    return re.sub(r"[^\x20-\x7e]", "?", found)[:180]


@dataclass(frozen=True, slots=True)
class ElectorStatus:
    """For health endpoints: what this replica knows, without asking anybody."""

    name: str
    replica: str
    """Who we are as a holder, with the nonce of this instance."""
    state: str
    leader: str | None
    """The holder last seen, None when there was none."""
    since: datetime | None
    """When we first saw it lead."""
    transitions: int
    """How often we have seen the leader change."""
    renewed_ago: float | None
    """Seconds since the leader's last renewal, as far as we know."""
    fence: int | None
    """Of our own term, if we lead."""

    @property
    def leading(self) -> bool:
        return self.fence is not None
