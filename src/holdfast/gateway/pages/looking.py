"""One look at the database: all that the page tells is in a sight, and nothing else is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import holdfast
from holdfast.gateway.context import Gateway

PATIENCE = 4.0
"""Seconds after which a database that has not answered is a problem to be shown, not one to wait for."""
LATEST = 200
"""Operations that are counted by status."""
RECORDS = 500
"""Sandboxes, agents and sessions that are looked at, of each."""


@dataclass(frozen=True, slots=True)
class Sight:
    at: float
    """Seconds since 1970, by the database's clock where it could be told."""
    trouble: str | None = None
    """Why this is not what is so now."""
    unmigrated: str | None = None
    leases: Sequence[Any] = ()
    ended: Sequence[Any] = ()
    locks: Sequence[Any] = ()
    relays: Sequence[Any] = ()
    reviews: Sequence[Any] = ()
    operations: Sequence[Any] = ()
    unfinished: Sequence[Any] = ()
    sandboxes: Sequence[Any] = ()
    agents: Sequence[Any] = ()
    sessions: Sequence[Any] = ()
    violations: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """What reconciling slots has found wrong in this process, by pool and kind: how often, and when we saw it last."""
    pools: Mapping[str, int] = field(default_factory=dict)
    elector: str | None = None
    """The lease whose holder leads the replicas."""


async def look(gateway: Gateway, before: Sight | None) -> Sight:
    """What is so now; when that cannot be told, what was, and why it cannot."""
    known = before or Sight(time.time())
    known = replace(known, pools=gateway.settings.pools, elector=getattr(gateway.elector, "name", None))
    try:
        async with asyncio.timeout(PATIENCE):
            return await _asked(gateway, replace(known, trouble=None, unmigrated=None))
    except holdfast.SchemaMismatch as error:
        return replace(known, at=time.time(), unmigrated=str(error))
    except holdfast.HoldfastError as error:
        return replace(known, at=time.time(), trouble=str(error))
    except TimeoutError:
        return replace(known, at=time.time(), trouble=f"the database has not answered in {PATIENCE:g} s")


async def _asked(gateway: Gateway, known: Sight) -> Sight:
    client = gateway.client
    leases = await client.leases.list()
    clocks = [each.expires_at.timestamp() - each.remaining for each in leases]
    at = max(clocks, default=time.time())
    found = {
        (pool, kind): count
        for pool, capacity in known.pools.items()
        for kind, count in client.slots(pool, capacity).invariant_violation_total.items()
        if count
    }
    before = known.violations
    violations = {
        key: before[key] if before.get(key, (0, 0))[0] == count else (count, at) for key, count in found.items()
    }
    return replace(
        known,
        at=at,
        leases=leases,
        ended=await client.leases.history(most=100),
        locks=[each for each in await client.locks.list() if not _stands_by(each)],
        relays=await client.relays.list(),
        reviews=await client.reviews.list(most=100),
        operations=await client.operations.list(most=LATEST),
        unfinished=[
            *await client.operations.list(status="partial", most=100),
            *await client.operations.list(status="running", most=100),
        ],
        sandboxes=await client.objects.list("sandbox", most=RECORDS),
        agents=await client.objects.list("agent", most=RECORDS),
        sessions=await client.objects.list("session", most=RECORDS),
        violations=violations,
    )


def _stands_by(lock: Any) -> bool:
    """A standby's, that waits for the session of whoever leads to end (``failover="session"``): it does so for as long
    as all is well, and to break that session would depose a leader."""
    return not lock.granted and lock.mode == "shared" and (lock.name or "").startswith("session of ")
