# Generated from slots_async.py by scripts/unasync.py. Do not edit.
"""Slots: a counting semaphore made of leases, and the truth about who holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from holdfast.database.engine import Engine
from holdfast.errors import LeaseLost, NotAcquired
from holdfast.lease.grant import LeaseGrant
from holdfast.lease.handle import Handle
from holdfast.lease.terms import LeaseTerms, Refusal
from holdfast.lease.trust import Trust
from holdfast.names import check_name
from holdfast.recipes import slot_terms as slots
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import maybe_await
from holdfast.runtime.identity import check_token
from holdfast.runtime.log import logger

log = logger("holdfast.slots")

Sessions = Iterable[Any]


class SlotGrant(LeaseGrant):
    """A slot we hold: ``slot`` is its number, from 1 to the capacity."""

    kind = "slot"

    @property
    def slot(self) -> int:
        """Its number."""
        return int(self.name.rpartition(":")[2])

    @property
    def owner(self) -> str:
        """Whom it was claimed for."""
        return self.holder


class SlotClaim(Handle[SlotGrant]):
    """A slot to be had, whichever is free; used like a lease."""

    _kind, _statement = "slot", "slot_claim"

    def __init__(self, engine: Engine, terms: LeaseTerms, timeout: float | None, pool: str, capacity: int) -> None:
        super().__init__(engine, terms, timeout)
        self._pool, self._capacity = pool, capacity
        self._more = {"pool": terms.name, "capacity": capacity}

    def _granted(self, row: dict[str, Any], token: str, trust: Trust) -> SlotGrant:
        return SlotGrant(self._engine, self._terms, self._holder, token, row["fence"], trust, row["name"])

    def _error(self, refusal: Refusal, waited: float | None) -> NotAcquired:
        return slots.refusal(self._pool, self._capacity, refusal, waited)


class _SlotCounts:
    """What ``reconcile`` last found in the pools of a client."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.violations: Counter[tuple[str, str]] = Counter()
        """By pool and kind."""
        self.in_use: dict[str, int] = {}
        telemetry.register(self)

    def gauges(self) -> Iterator[tuple[str, float]]:
        if not self._engine.closed:
            yield "slots_in_use", float(sum(self.in_use.values()))


class Slots:
    """The slots of a pool. The capacity is the caller's: another one, larger or smaller, may follow at any time."""

    def __init__(self, engine: Engine, pool: str, capacity: int, ttl: float, auto_renew: bool) -> None:
        self.pool, self.capacity = pool, capacity
        self._engine, self._prefix, self._ttl = engine, slots.check_pool(pool, capacity), ttl
        self._auto_renew = auto_renew
        self._terms(None)
        engine.state(_SlotCounts)  # a pool in which nothing is held yet has a gauge, too

    def __repr__(self) -> str:
        return f"<Slots {self.pool!r} of {self.capacity}>"

    def slot(self, *, owner: str | None = None, timeout: float | None = 0.0) -> SlotClaim:
        """A handle: ``acquire``, ``try_acquire``, ``with``, ``or_skip``. ``owner``: whose it is, e.g. a session's
        id; one owner may have several."""
        return SlotClaim(self._engine, self._terms(owner), timeout, self.pool, self.capacity)

    def claim(self, *, owner: str | None = None, timeout: float | None = 0.0) -> SlotGrant:
        """Any free slot, as a grant with ``slot``; NotAcquired when there is none, AcquireTimeout after ``timeout``
        seconds (None: wait for ever)."""
        return self.slot(owner=owner, timeout=timeout).acquire()

    def adopt(self, slot: int, token: str) -> SlotGrant:
        """The grant of a slot from its token, handed over by whoever claimed it: to ``renew()``, to ``release()``.
        LeaseLost when it is not good."""
        name, asked_at = slots.check_slot(self._prefix, slot), now()
        rows = self._engine.call("lease_status", {"name": name, "token": check_token(token)})
        if not rows:
            raise LeaseLost(f"slot {slot} of pool {self.pool!r}: the token is not, or no longer, the one that holds it")
        [row] = rows
        trust = Trust.granted(row["ttl"], asked_at, row["remaining"])
        return SlotGrant(
            self._engine, self._terms(row["holder"]), row["holder"], check_token(token), row["fence"], trust, name
        )

    def release(self, grant: SlotGrant) -> bool:
        """Give it back; True if it was still ours."""
        if grant.name.rpartition(":")[0] != self._prefix:
            raise ValueError(f"{grant!r} is not a slot of pool {self.pool!r}")
        return grant.release()

    def in_use(self) -> int:
        """How many slots are held, by the database's clock; more than the capacity after it shrank."""
        return len(self.owners())

    def owners(self) -> dict[int, str]:
        """Who holds which slot."""
        return {slot: lease.owner for slot, lease in (self._held()).items()}

    def reconcile(self, sessions: Sessions | Callable[[], Sessions]) -> int:
        """How many slots are truly in use: claimed by a session that has not ended and owns the slot's living lease,
        each counted once. Everything else is logged, and counted by kind in ``invariant_violation_total``.

        ``sessions``: all of the pool's, as mappings or objects with ``id``, ``slot`` and ``terminal``; where they
        change meanwhile, a function that reads them. It is called between two looks at the leases, so that what is
        claimed or released in this moment is told from what is wrong, and again before anything is said to be."""
        read = sessions if callable(sessions) else list(sessions).copy
        true, found = self._judge(read)
        if found:
            true, again = self._judge(read)
            for each in slots.lasting(found, again):
                log.warning(
                    "pool %r, slot %d: %s: %s",
                    self.pool,
                    each.slot,
                    each.kind,
                    each.about,
                    extra={"event": "slots.violation", "pool": self.pool, "slot": each.slot, "kind": each.kind},
                )
                self._counts.violations[self.pool, each.kind] += 1
                telemetry.tell("slots.violation", kind=each.kind)
        self._counts.in_use[self.pool] = len(true)
        return len(true)

    def forget(self) -> None:
        """What was reconciled here last is no gauge any more: somebody else goes on."""
        self._counts.in_use.pop(self.pool, None)

    @property
    def _counts(self) -> _SlotCounts:
        return self._engine.state(_SlotCounts)

    def _judge(self, read: Callable[[], Sessions]) -> tuple[set[int], list[slots.Violation]]:
        before = self._held()
        told = list(maybe_await(read()))
        return slots.judge(told, before, self._held())

    def _held(self) -> dict[int, slots.Lease]:
        rows = self._engine.call("slot_list", {"pool": self._prefix})
        return {row["slot"]: slots.Lease(row["holder"], row["fence"]) for row in rows}

    @property
    def invariant_violation_total(self) -> Mapping[str, int]:
        """By kind, since this client was made."""
        return {kind: self._counts.violations[self.pool, kind] for kind in slots.KINDS}

    def _terms(self, owner: str | None) -> LeaseTerms:
        if owner is not None:
            check_name(owner, "owner")
        terms = LeaseTerms.check(self._prefix, ttl=self._ttl, holder=owner, auto_renew=self._auto_renew)
        return terms._replace(reenter=False)
