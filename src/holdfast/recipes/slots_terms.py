"""The rules of slots: which are truly in use, given the live leases and the sessions that claim them; checked names.

A slot is in use when a session that has not ended claims it and owns its live lease; it counts once. Each other claim,
and each other lease, violates an invariant: see KINDS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast.errors import AcquireTimeout, NotAcquired
from holdfast.lease.terms import Refusal
from holdfast.names import SLOT, check_name

MAX_SLOTS = 100_000
KINDS = ("duplicate_claim", "wrong_owner", "missing_lease", "terminal_owner", "unclaimed_lease")
"""Several sessions claim one slot; another session owns the lease; no lease is live; a session that has ended owns the
lease; no session claims the lease."""


class SessionClaim(NamedTuple):
    """The slot that a session claims, None if it claims none, and whether the session has ended."""

    id: str
    slot: int | None
    terminal: bool

    @classmethod
    def of(cls, session: Any) -> SessionClaim:
        """From a mapping or an object with ``id``, ``slot`` and, if it has ended, ``terminal``; else ValueError."""
        fields = session
        if not isinstance(session, Mapping):
            fields = {name: getattr(session, name, None) for name in cls._fields}
        if fields.get("id") is None:
            raise ValueError(f"a session needs id, slot and, once it has ended, terminal=True: {session!r:.100}")
        slot = fields.get("slot")
        if slot is not None and (isinstance(slot, bool) or not isinstance(slot, int)):
            raise ValueError(f"slot must be a whole number, or None for a session without one: {session!r:.100}")
        return cls(str(fields["id"]), slot, bool(fields.get("terminal")))


class SlotLease(NamedTuple):
    """The live lease of a slot. The next grant of the same slot has another fence."""

    owner: str
    fence: int


class SlotViolation(NamedTuple):
    kind: str
    slot: int
    about: str
    fence: int | None = None
    """Of the slot's lease; None when there is none."""


def compare(
    sessions: Iterable[Any], before: Mapping[int, SlotLease], after: Mapping[int, SlotLease]
) -> tuple[set[int], list[SlotViolation]]:
    """The slots that are in use, and the violations. ``before`` and ``after``: the live leases before and after the
    sessions were read. A slot whose lease changed in between has no violation: it is unknown which of
    the two leases its session belongs to."""
    in_use, violations = _compare([SessionClaim.of(session) for session in sessions], after)
    return in_use, [each for each in violations if before.get(each.slot) == after.get(each.slot)]


def repeated(first: list[SlotViolation], second: list[SlotViolation]) -> list[SlotViolation]:
    """The violations of ``second`` that are also in ``first``. An honest session between two of its steps may look like
    a violation once, but not twice."""
    unmatched, both = list(first), []
    for violation in second:
        if violation in unmatched:
            unmatched.remove(violation)
            both.append(violation)
    return both


def _compare(claims: list[SessionClaim], leases: Mapping[int, SlotLease]) -> tuple[set[int], list[SlotViolation]]:
    claimants_of: dict[int, list[str]] = {}
    for claim in claims:
        if claim.slot is not None and not claim.terminal:
            claimants_of.setdefault(claim.slot, []).append(claim.id)
    violations: list[SlotViolation] = []
    in_use: set[int] = set()

    def add(kind: str, slot: int, about: str) -> None:
        violations.append(SlotViolation(kind, slot, about, leases[slot].fence if slot in leases else None))

    for slot, claimants in claimants_of.items():
        owner = leases[slot].owner if slot in leases else None
        rightful = owner if owner in claimants else claimants[0]
        others = list(claimants)
        others.remove(rightful)
        for other in others:
            add("duplicate_claim", slot, f"{other} claims it, too")
        if owner is None:
            add("missing_lease", slot, f"{rightful} claims it, and it has no live lease")
        elif owner != rightful:
            add("wrong_owner", slot, f"{rightful} claims it, and {owner} owns its lease")
        else:
            in_use.add(slot)
    ended = {claim.id for claim in claims if claim.terminal}
    for slot in sorted(leases.keys() - claimants_of.keys()):
        owner = leases[slot].owner
        if owner in ended:
            add("terminal_owner", slot, f"{owner}, which has ended, owns its lease")
        else:
            add("unclaimed_lease", slot, f"{owner} owns its lease and does not claim it")
    return in_use, violations


def check_pool(pool: str, capacity: int) -> str:
    """The prefix of the pool's leases."""
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        raise TypeError(f"capacity must be a whole number, not {type(capacity).__name__}")
    if not 1 <= capacity <= MAX_SLOTS:
        raise ValueError(f"capacity must be from 1 to {MAX_SLOTS}, not {capacity}")
    return f"{SLOT}{check_name(pool, 'pool', limit=180)}"


def check_slot(prefix: str, slot: object) -> str:
    """The name of the slot's lease. The capacity is no limit here: it may have been larger."""
    if isinstance(slot, bool) or not isinstance(slot, int) or not 1 <= slot <= MAX_SLOTS:
        raise ValueError(f"slot must be a whole number from 1 to {MAX_SLOTS}, not {slot!r}")
    return f"{prefix}:{slot}"


def refusal_error(pool: str, capacity: int, refusal: Refusal, waited: float | None) -> NotAcquired:
    """AcquireTimeout if ``waited`` is given."""
    if refusal.remaining is None:
        message = f"no slot of pool {pool!r} is free: all {capacity} are taken, or are being changed now"
    else:
        soonest = f"the first for {refusal.remaining:.1f} s more unless renewed"
        message = f"all {capacity} slots of pool {pool!r} are taken, {soonest}"
    if waited is None:
        return NotAcquired(message, name=pool, holder=refusal.holder)
    return AcquireTimeout(f"{message}; waited {waited:.1f} s", name=pool, holder=refusal.holder)
