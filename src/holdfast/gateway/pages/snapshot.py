"""A snapshot of everything that the page shows, read from the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import holdfast
from holdfast.gateway.context import Gateway

READ_WITHIN = 4.0
"""Seconds after which a database that has not answered is shown as a problem."""
MAX_OPERATIONS = 200
"""Operations that are counted by status."""
MAX_RECORDS = 500
"""Sandboxes, agents and sessions that are read, of each."""
MAX_BYTES = 4 << 20
"""Of their payloads, of each."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    at: float
    """Seconds since 1970, by the database's clock where that is known."""
    trouble: str | None = None
    """Why the rest is older than ``at``: the database did not answer."""
    unmigrated: str | None = None
    """Why the rest is older than ``at``: the schema has another version."""
    leases: Sequence[Any] = ()
    ended: Sequence[Any] = ()
    """The latest grants that have ended."""
    locks: Sequence[Any] = ()
    relays: Sequence[Any] = ()
    reviews: Sequence[Any] = ()
    operations: Sequence[Any] = ()
    unfinished: Sequence[Any] = ()
    sandboxes: Sequence[Any] = ()
    agents: Sequence[Any] = ()
    sessions: Sequence[Any] = ()
    violations: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """Violations that this process has found between slots and sessions: count and last time, by pool and kind."""
    pools: Mapping[str, int] = field(default_factory=dict)
    elector: str | None = None
    """The lease whose holder leads the replicas."""


async def take_snapshot(gateway: Gateway, previous: Snapshot | None) -> Snapshot:
    """The current state. When the database does not answer, the previous one with the reason."""
    base = previous or Snapshot(time.time())
    base = replace(base, pools=gateway.settings.pools, elector=getattr(gateway.elector, "name", None))
    try:
        async with asyncio.timeout(READ_WITHIN):
            return await _read(gateway, replace(base, trouble=None, unmigrated=None))
    except holdfast.SchemaMismatch as error:
        return replace(base, at=time.time(), unmigrated=str(error))
    except holdfast.HoldfastError as error:
        return replace(base, at=time.time(), trouble=str(error))
    except TimeoutError:
        return replace(base, at=time.time(), trouble=f"the database has not answered in {READ_WITHIN:g} s")


async def _read(gateway: Gateway, base: Snapshot) -> Snapshot:
    client = gateway.client
    leases = await client.leases.list()
    clocks = [lease.expires_at.timestamp() - lease.remaining for lease in leases]
    at = max(clocks, default=time.time())
    counts = {
        (pool, kind): count
        for pool, capacity in base.pools.items()
        for kind, count in client.slots(pool, capacity).invariant_violation_total.items()
        if count
    }
    before = base.violations
    violations = {
        key: before[key] if before.get(key, (0, 0))[0] == count else (count, at) for key, count in counts.items()
    }
    return replace(
        base,
        at=at,
        leases=leases,
        ended=await client.leases.history(limit=100),
        locks=[lock for lock in await client.locks.list() if not _is_standby(lock)],
        relays=await client.relays.list(),
        reviews=await client.reviews.list(limit=100),
        operations=await client.operations.list(limit=MAX_OPERATIONS),
        unfinished=[
            *await client.operations.list(status="partial", limit=100),
            *await client.operations.list(status="running", limit=100),
        ],
        sandboxes=await client.objects.list("@sandbox", limit=MAX_RECORDS, max_bytes=MAX_BYTES),
        agents=await client.objects.list("@agent", limit=MAX_RECORDS, max_bytes=MAX_BYTES),
        sessions=await client.objects.list("@session", limit=MAX_RECORDS, max_bytes=MAX_BYTES),
        violations=violations,
    )


def _is_standby(lock: Any) -> bool:
    """Whether a standby waits for the leader's session to end (``failover="session"``). It waits as long as all is
    well, and breaking the session that it waits for would depose the leader."""
    return not lock.granted and lock.mode == "shared" and (lock.name or "").startswith("session of ")
