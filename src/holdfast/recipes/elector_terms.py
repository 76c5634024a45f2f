"""The decisions of an elector: its table of states, its checked arguments, and when a standby asks again.

A lease is released after its work has ended, never before, and is renewed until then. The lease of work that does not
stop within its grace is neither renewed nor released: it ends with its TTL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Literal, NamedTuple

from holdfast.lease.terms import Failover, LeaseTerms, MayRenew, OnBeat, Refusal
from holdfast.lease.trust import margin
from holdfast.names import MAX_TTL, Kind, check_name, check_seconds

Overrun = Literal["wait", "exit"]
HOLDER_LENGTH = 180
"""Characters of a holder's name, to which a nonce is appended."""
_LOCAL_POLL = 0.005
"""Seconds between two polls of a standby on the leader's machine, where a poll is one read of a file."""


class ElectorState(Enum):
    STANDBY = "standby"
    LEADING = "leading"
    YIELDING = "yielding"  # the work has to stop, and this replica stands by again after that
    LEAVING = "leaving"  # the work has to stop, and the run ends after that
    ENDED = "ended"


class ElectorEvent(Enum):
    GRANTED = "granted"
    LOST = "lost"  # or so little is left of the lease that the work needs it to stop
    RESIGN = "resign"
    STOP = "stop"
    GRACE_OVER = "grace over"
    WORK_ENDED = "work ended"


class ElectorAction(Enum):
    NOTHING = "nothing"
    START = "start the work"
    CANCEL = "make the work stop"
    LET_EXPIRE = "stop renewing"
    RELEASE = "release"


_TABLE: dict[tuple[ElectorState, ElectorEvent], tuple[ElectorState, ElectorAction]] = {
    (ElectorState.STANDBY, ElectorEvent.GRANTED): (ElectorState.LEADING, ElectorAction.START),
    (ElectorState.STANDBY, ElectorEvent.STOP): (ElectorState.ENDED, ElectorAction.NOTHING),
    (ElectorState.LEADING, ElectorEvent.LOST): (ElectorState.YIELDING, ElectorAction.CANCEL),
    (ElectorState.LEADING, ElectorEvent.RESIGN): (ElectorState.YIELDING, ElectorAction.CANCEL),
    (ElectorState.LEADING, ElectorEvent.STOP): (ElectorState.LEAVING, ElectorAction.CANCEL),
    (ElectorState.LEADING, ElectorEvent.WORK_ENDED): (ElectorState.ENDED, ElectorAction.RELEASE),
    (ElectorState.YIELDING, ElectorEvent.STOP): (ElectorState.LEAVING, ElectorAction.NOTHING),
    (ElectorState.YIELDING, ElectorEvent.GRACE_OVER): (ElectorState.YIELDING, ElectorAction.LET_EXPIRE),
    (ElectorState.YIELDING, ElectorEvent.WORK_ENDED): (ElectorState.STANDBY, ElectorAction.RELEASE),
    (ElectorState.LEAVING, ElectorEvent.GRACE_OVER): (ElectorState.LEAVING, ElectorAction.LET_EXPIRE),
    (ElectorState.LEAVING, ElectorEvent.WORK_ENDED): (ElectorState.ENDED, ElectorAction.RELEASE),
}


def transition(state: ElectorState, event: ElectorEvent) -> tuple[ElectorState, ElectorAction]:
    """The next state and what to do. An event that the table does not have for this state changes nothing."""
    return _TABLE.get((state, event), (state, ElectorAction.NOTHING))


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
    kind: Kind
    watchdog: bool

    @classmethod
    def check(
        cls,
        name: str,
        *,
        ttl: float,
        renew_every: float | None = None,
        retry_every: float | None = None,
        grace: float | None = None,
        holder: str | None = None,
        failover: Failover = "ttl",
        overrun: Overrun = "wait",
        kind: Kind = "elector",
        watchdog: bool = False,
    ) -> ElectorTerms:
        """Times that are not given follow from the TTL. ValueError unless a renewal, the grace and the margin of trust
        fit into it."""
        lease = LeaseTerms.check(name, ttl=ttl, holder=holder, renew_every=renew_every, failover=failover)
        renew_every = lease.renew_every
        if retry_every is None:
            retry_every = lease.ttl / 6
        elif check_seconds(retry_every, "retry_every", 0.001, MAX_TTL) > lease.ttl:
            raise ValueError(
                f"retry_every must be at most ttl={ttl:g}, not {retry_every!r}: a standby would take over too late"
            )
        grace = lease.ttl / 6 if grace is None else check_seconds(grace, "grace", 0.0, MAX_TTL)
        if renew_every + grace + margin(lease.ttl) >= lease.ttl:
            raise ValueError(
                f"ttl={ttl:g} is too short: renew_every={renew_every:g} and grace={grace:g} for the work to stop, and "
                f"{margin(lease.ttl):g} s of margin, must fit into it"
            )
        if overrun not in ("wait", "exit"):
            raise ValueError(f"overrun must be 'wait' or 'exit', not {overrun!r}")
        if holder is not None:
            check_name(holder, "holder", limit=HOLDER_LENGTH)
        return cls(
            lease.name, lease.ttl, renew_every, retry_every, grace, holder, failover, overrun, kind, bool(watchdog)
        )

    def lease_terms(
        self,
        holder: str,
        *,
        local: bool,
        on_beat: OnBeat,
        on_recall: Callable[[], object],
        may_renew: MayRenew | None = None,
    ) -> LeaseTerms:
        """The lease to ask for. ``local``: all replicas are on one machine, where the kernel frees a lock when the
        leader dies. Then the TTL is the longest possible and no heartbeat can be late: a renewal only detects that the
        lease was taken away."""
        return LeaseTerms(
            self.name, MAX_TTL if local else self.ttl, holder, at_least=0.0, auto_renew=True,
            renew_every=self.renew_every, on_lost="flag", failover="session" if local else self.failover,
            on_beat=on_beat, on_recall=on_recall, may_renew=may_renew, kind=self.kind,
        )  # fmt: skip

    def retry_delay(self, refusal: Refusal | None, *, local: bool, chance: float) -> float:
        """Seconds until a standby asks again, unless it is woken before. ``refusal``: the last answer, None if the
        database gave none. ``chance``, from 0 to 1, spreads the replicas, so that they do not ask at the same time.

        At most ``retry_every``, and at most a moment after the lease expires: so a leader that crashes has a successor
        after ``ttl + retry_every`` at the latest."""
        spread = 0.75 + 0.25 * chance
        if refusal is None:
            return self.retry_every * spread
        if refusal.remaining is None:  # the row is being changed
            return 0.002 + 0.018 * chance
        every = min(self.retry_every, _LOCAL_POLL) if local else self.retry_every
        return min(every * spread, max(0.0, refusal.remaining) + 0.001 + 0.009 * chance)


def replica_holder(holder: str | None, environment: Mapping[str, str], host: str, pid: int, nonce: str) -> str:
    """The holder of a replica's leases: ``holder:nonce``, or without a holder ``host:pid:nonce``, where
    HOLDFAST_REPLICA_ID or HOSTNAME replace the host. The nonce tells two replicas of one process apart."""
    if holder is None:
        name = environment.get("HOLDFAST_REPLICA_ID") or environment.get("HOSTNAME") or host
        name = re.sub(r"[^\x20-\x7e]", "?", name)[: HOLDER_LENGTH - 10]
        holder = f"{name}:{pid}"
    return f"{holder}:{nonce[:6]}"


@dataclass(frozen=True, slots=True)
class ElectorStatus:
    """For health endpoints: what this replica has seen. Reading it does not ask the database."""

    name: str
    holder: str
    """This replica, as the holder of the lease when it leads: ``host:pid:nonce``."""
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
