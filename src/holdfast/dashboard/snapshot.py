"""A snapshot of everything that the overview shows, read from the database."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import holdfast
from holdfast.commands.problem_commands import ACKNOWLEDGE
from holdfast.dashboard.source import PageSource

READ_WITHIN = 4.0
"""Seconds after which a database that has not answered is shown as a problem."""
MAX_OPERATIONS = 200
"""Operations that are counted by status."""
MAX_RECORDS = 500
"""Sandboxes, agents and sessions that are read, of each."""
MAX_BYTES = 4 << 20
"""Of their payloads or texts, and of those of operations and reviews, of each."""
MAX_ACKNOWLEDGED = 200
WEBHOOK_TYPE = "dashboard:webhook"
"""The objects of webhooks."""
MAX_WEBHOOKS = 20
MAX_ENDED = 500
"""Grants that have ended which are read, for the problems and the timeline."""


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
    acknowledged: Sequence[Any] = ()
    """The latest audit entries of problems that were acknowledged."""
    operations: Sequence[Any] = ()
    unfinished: Sequence[Any] = ()
    schedules: Sequence[Any] = ()
    sandboxes: Sequence[Any] = ()
    agents: Sequence[Any] = ()
    sessions: Sequence[Any] = ()
    webhooks: Sequence[Any] = ()
    violations: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """Violations that this process has found between slots and sessions: count and last time, by pool and kind."""
    pools: Mapping[str, int] = field(default_factory=dict)
    elector: str | None = None
    """The lease whose holder leads the replicas."""
    object_pages: Mapping[str, str] = field(default_factory=dict)
    """The path of the page of an object, by its type."""


async def take_snapshot(source: PageSource, previous: Snapshot | None) -> Snapshot:
    """The current state. When the database does not answer, the previous one with the reason."""
    base = previous or Snapshot(time.time())
    base = replace(base, pools=source.pools, elector=source.elector(), object_pages=source.object_pages)
    try:
        async with asyncio.timeout(READ_WITHIN):
            return await _read(source, replace(base, trouble=None, unmigrated=None))
    except holdfast.SchemaMismatch as error:
        return replace(base, at=time.time(), unmigrated=str(error))
    except holdfast.HoldfastError as error:
        return replace(base, at=time.time(), trouble=str(error))
    except TimeoutError:
        return replace(base, at=time.time(), trouble=f"the database has not answered in {READ_WITHIN:g} s")


async def _read(source: PageSource, base: Snapshot) -> Snapshot:
    client, rows = source.client, source.rows
    leases = await source.call(client.leases.list)
    at = database_time(leases)
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
    reads = {
        "ended": rows(client.leases.history, limit=MAX_ENDED),
        "locks": rows(client.locks.list),
        "relays": rows(client.relays.list),
        "reviews": rows(client.reviews.list, limit=100, max_bytes=MAX_BYTES),
        "acknowledged": rows(client.audit.list, action=ACKNOWLEDGE, limit=MAX_ACKNOWLEDGED, max_bytes=MAX_BYTES),
        "operations": rows(client.operations.list, limit=MAX_OPERATIONS, max_bytes=MAX_BYTES),
        "partial": rows(client.operations.list, status="partial", limit=100, max_bytes=MAX_BYTES),
        "running": rows(client.operations.list, status="running", limit=100, max_bytes=MAX_BYTES),
        "schedules": rows(client.schedules.list),
        "sandboxes": rows(client.objects.list, "@sandbox", limit=MAX_RECORDS, max_bytes=MAX_BYTES),
        "agents": rows(client.objects.list, "@agent", limit=MAX_RECORDS, max_bytes=MAX_BYTES),
        "webhooks": rows(client.objects.list, WEBHOOK_TYPE, limit=MAX_WEBHOOKS),
        "sessions": rows(client.objects.list, "@session", limit=MAX_RECORDS, max_bytes=MAX_BYTES),
    }
    parts: dict[str, Any] = dict(zip(reads, await asyncio.gather(*reads.values()), strict=True))
    parts["locks"] = without_standbys(parts["locks"])
    parts["unfinished"] = [*parts.pop("partial"), *parts.pop("running")]
    return replace(base, at=at, leases=leases, violations=violations, **parts)


def database_time(leases: Sequence[Any]) -> float:
    """The database's clock, as far as a live lease shows it; else ours."""
    return max((lease.expires_at.timestamp() - lease.remaining for lease in leases), default=time.time())


def without_standbys(locks: Sequence[Any]) -> list[Any]:
    """The locks without the standbys that wait for them, in their counts as well."""
    standbys = Counter(lock.label for lock in locks if is_standby(lock))
    return [
        replace(lock, waiting=lock.waiting - standbys[lock.label]) if standbys[lock.label] else lock
        for lock in locks
        if not is_standby(lock)
    ]


def is_standby(lock: Any) -> bool:
    """Whether a standby waits for the leader's session to end (``failover="session"``). It waits as long as all is
    well, and breaking the session that it waits for would depose the leader."""
    return not lock.granted and lock.mode == "shared" and (lock.name or "").startswith("session of ")
