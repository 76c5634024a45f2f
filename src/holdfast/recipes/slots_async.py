"""Slots: a counting semaphore made of leases, and a check of it against the sessions that claim the slots.

The database chooses a free slot in one statement, so two claims never get the same one. What violates an invariant is
decided in ``slots_terms``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from holdfast.database.engine_async import AsyncEngine
from holdfast.errors import LeaseLost, NotAcquired
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.lease.handle_async import AsyncHandle
from holdfast.lease.terms import LeaseTerms, Refusal
from holdfast.lease.trust import Trust
from holdfast.names import check_name
from holdfast.recipes.slots_terms import (
    KINDS,
    SlotLease,
    SlotViolation,
    check_pool,
    check_slot,
    compare,
    refusal_error,
    repeated,
)
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import maybe_await
from holdfast.runtime.identity import check_token
from holdfast.runtime.log import WARNING, logger

log = logger("holdfast.slots")

Sessions = Iterable[Any]


class AsyncSlot(AsyncLeaseGrant):
    """A slot we hold."""

    _kind = "slot"

    @property
    def slot(self) -> int:
        """Its number, from 1 to the capacity."""
        return int(self.name.rpartition(":")[2])

    @property
    def owner(self) -> str:
        """The session, or other owner, that it was claimed for."""
        return self.holder


class AsyncSlotClaim(AsyncHandle[AsyncSlot]):
    """Any free slot of a pool to acquire; used like a lease."""

    _kind = "slot"

    def __init__(self, engine: AsyncEngine, terms: LeaseTerms, timeout: float | None, pool: str, capacity: int) -> None:
        super().__init__(engine, terms, timeout)
        self._pool, self._capacity = pool, capacity
        self._more = {"pool": pool, "capacity": capacity}

    def _granted(self, row: dict[str, Any], token: str, trust: Trust) -> AsyncSlot:
        return AsyncSlot(self._engine, self._terms, self._holder, token, row["fence"], trust, row["name"])

    def _error(self, refusal: Refusal, waited: float | None) -> NotAcquired:
        return refusal_error(self._pool, self._capacity, refusal, waited)


class _AsyncSlotCounts:
    """The last results of ``reconcile`` for the pools of a client."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.violations: Counter[tuple[str, str]] = Counter()
        """By pool and kind."""
        self.in_use: dict[str, int] = {}
        telemetry.register(self)

    def _gauges(self) -> Iterator[tuple[str, float, str]]:
        if not self._engine.closed:
            for pool, count in list(self.in_use.items()):
                yield "slots_in_use", float(count), pool


class AsyncSlots:
    """The slots of a pool. The capacity is not stored: each caller states it, and it may change at any time."""

    def __init__(self, engine: AsyncEngine, pool: str, capacity: int, ttl: float, auto_renew: bool) -> None:
        self.pool, self.capacity = pool, capacity
        self._engine, self._prefix, self._ttl = engine, check_pool(pool, capacity), ttl
        self._auto_renew = auto_renew
        self._terms(None)  # checks ttl

    def __repr__(self) -> str:
        return f"<Slots {self.pool!r} of {self.capacity}>"

    def slot(self, *, owner: str | None = None, timeout: float | None = 0.0) -> AsyncSlotClaim:
        """A handle with ``acquire``, ``try_acquire``, ``async with`` and ``or_skip``. ``owner``: whom the slot is for,
        for example the id of a session; one owner may have several."""
        return AsyncSlotClaim(self._engine, self._terms(owner), timeout, self.pool, self.capacity)

    async def claim(self, *, owner: str | None = None, timeout: float | None = 0.0) -> AsyncSlot:
        """The grant of any free slot. NotAcquired when there is none, AcquireTimeout after ``timeout`` seconds (None:
        wait for ever)."""
        return await self.slot(owner=owner, timeout=timeout).acquire()

    async def adopt(self, slot: int, token: str) -> AsyncSlot:
        """The grant of a slot from its token, which the process that claimed it handed over: to ``renew()`` and to
        ``release()``. LeaseLost when the token is not valid."""
        name, asked_at = check_slot(self._prefix, slot), now()
        rows = await self._engine.call("lease_status", {"name": name, "token": check_token(token)})
        if not rows:
            raise LeaseLost(f"slot {slot} of pool {self.pool!r}: the token is not, or no longer, the one that holds it")
        [row] = rows
        trust = Trust.granted(row["ttl"], asked_at, row["remaining"])
        return AsyncSlot(
            self._engine, self._terms(row["holder"]), row["holder"], check_token(token), row["fence"], trust, name
        )

    async def release(self, grant: AsyncSlot) -> bool:
        """Release a slot; True if it was still held. ValueError for a grant of another pool."""
        if grant.name.rpartition(":")[0] != self._prefix:
            raise ValueError(f"{grant!r} is not a slot of pool {self.pool!r}")
        return await grant.release()

    async def in_use(self) -> int:
        """How many slots are held, by the database's clock. More than the capacity if that was reduced."""
        return len(await self.owners())

    async def owners(self) -> dict[int, str]:
        """The owner of each slot that is held."""
        return {slot: lease.owner for slot, lease in (await self._held()).items()}

    async def reconcile(self, sessions: Sessions | Callable[[], Sessions | Awaitable[Sessions]]) -> int:
        """How many slots are in use: claimed by a session that has not ended and owns the slot's live lease. Violations
        are logged, and counted by kind in ``invariant_violation_total``.

        ``sessions``: all of the pool's, as mappings or objects with ``id``, ``slot`` and ``terminal``; or, if they
        change meanwhile, a function that reads them. It is called between two readings of the leases, so that a slot
        that changes hands at this moment is not a violation, and violations are only reported if a second comparison
        has them, too."""
        read = sessions if callable(sessions) else list(sessions).copy
        in_use, violations = await self._compare(read)
        if violations:
            in_use, again = await self._compare(read)
            for violation in repeated(violations, again):
                log.event(
                    "slots.violation", WARNING,
                    "slot %(slot)d of pool %(pool)r and its sessions do not agree (%(kind)s): %(about)s",
                    pool=self.pool, slot=violation.slot, kind=violation.kind, about=violation.about,
                )  # fmt: skip
                self._counts.violations[self.pool, violation.kind] += 1
                telemetry.emit("slots.violation", kind=violation.kind)
        self._counts.in_use[self.pool] = len(in_use)
        return len(in_use)

    def forget(self) -> None:
        """Remove the pool from the gauge: another replica reconciles it from now on."""
        self._counts.in_use.pop(self.pool, None)

    @property
    def _counts(self) -> _AsyncSlotCounts:
        return self._engine.state(_AsyncSlotCounts)

    async def _compare(
        self, read: Callable[[], Sessions | Awaitable[Sessions]]
    ) -> tuple[set[int], list[SlotViolation]]:
        before = await self._held()
        sessions = list(await maybe_await(read()))
        return compare(sessions, before, await self._held())

    async def _held(self) -> dict[int, SlotLease]:
        rows = await self._engine.call("slot_list", {"pool": self.pool})
        return {row["slot"]: SlotLease(row["holder"], row["fence"]) for row in rows}

    @property
    def invariant_violation_total(self) -> Mapping[str, int]:
        """Violations by kind, since this client was created."""
        return {kind: self._counts.violations[self.pool, kind] for kind in KINDS}

    def _terms(self, owner: str | None) -> LeaseTerms:
        if owner is not None:
            check_name(owner, "owner")
        return LeaseTerms.check(self._prefix, ttl=self._ttl, holder=owner, auto_renew=self._auto_renew, kind="slot")
