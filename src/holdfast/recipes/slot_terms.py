"""The truth about slots: which of them are held by whom, according to the leases and to those who claim them.

A slot counts once, when a session that has not ended claims it, its lease is alive, and that session owns the lease.
All else violates an invariant, and has a kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast.errors import AcquireTimeout, NotAcquired
from holdfast.lease.terms import Refusal
from holdfast.names import OWN, check_name

MOST = 100_000
KINDS = ("duplicate_claim", "wrong_owner", "missing_lease", "terminal_owner", "unclaimed_lease")
"""Two sessions claim one slot; the lease is another's; there is no live lease; the lease is that of a session which has
ended; the lease is nobody's who claims it."""


class Claim(NamedTuple):
    """What a session says of itself. ``slot`` is None when it claims none."""

    id: str
    slot: int | None
    terminal: bool

    @classmethod
    def of(cls, session: Any) -> Claim:
        """From a mapping or an object with ``id``, ``slot`` and, if it has ended, ``terminal``."""
        of = session if isinstance(session, Mapping) else {each: getattr(session, each, None) for each in cls._fields}
        if of.get("id") is None:
            raise ValueError(f"a session needs id, slot and, once it has ended, terminal=True: {session!r:.100}")
        slot = of.get("slot")
        if slot is not None and (isinstance(slot, bool) or not isinstance(slot, int)):
            raise ValueError(f"slot must be a whole number, or None for a session without one: {session!r:.100}")
        return cls(str(of["id"]), slot, bool(of.get("terminal")))


class Lease(NamedTuple):
    """Of a slot, as long as it lives: its next grant has another fence."""

    owner: str
    fence: int


class Violation(NamedTuple):
    kind: str
    slot: int
    about: str
    fence: int | None = None
    """Of the lease that is about; None when there was none."""


def judge(
    sessions: Iterable[Any], before: Mapping[int, Lease], after: Mapping[int, Lease]
) -> tuple[set[int], list[Violation]]:
    """The slots that are truly in use, and what contradicts. ``before`` and ``after``: the live leases when the
    sessions had not been read yet, and when they had. Where these differ, a slot has changed hands meanwhile, and
    nothing is said against anybody."""
    true, found = _compare([Claim.of(each) for each in sessions], after)
    return true, [each for each in found if before.get(each.slot) == after.get(each.slot)]


def lasting(found: list[Violation], again: list[Violation]) -> list[Violation]:
    """What was seen twice: one between two steps of an honest session is not."""
    left = list(found)
    kept = []
    for each in again:
        if each in left:
            left.remove(each)
            kept.append(each)
    return kept


def _compare(claims: list[Claim], leases: Mapping[int, Lease]) -> tuple[set[int], list[Violation]]:
    living: dict[int, list[str]] = {}
    for claim in claims:
        if claim.slot is not None and not claim.terminal:
            living.setdefault(claim.slot, []).append(claim.id)
    found: list[Violation] = []
    true: set[int] = set()

    def wrong(kind: str, slot: int, about: str) -> None:
        found.append(Violation(kind, slot, about, leases[slot].fence if slot in leases else None))

    for slot, claimants in living.items():
        owner = leases[slot].owner if slot in leases else None
        rightful = owner if owner in claimants else claimants[0]
        rest = list(claimants)
        rest.remove(rightful)
        for other in rest:
            wrong("duplicate_claim", slot, f"{other} claims it, too")
        if owner is None:
            wrong("missing_lease", slot, f"{rightful} claims it, and no lease is alive")
        elif owner != rightful:
            wrong("wrong_owner", slot, f"{rightful} claims it, and its lease is {owner}'s")
        else:
            true.add(slot)
    ended = {claim.id for claim in claims if claim.terminal}
    for slot in sorted(leases.keys() - living.keys()):
        owner = leases[slot].owner
        if owner in ended:
            wrong("terminal_owner", slot, f"its lease is that of {owner}, which has ended")
        else:
            wrong("unclaimed_lease", slot, f"its lease is {owner}'s, who does not claim it")
    return true, found


def check_pool(pool: str, capacity: int) -> str:
    """The prefix of its leases."""
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        raise TypeError(f"capacity must be a whole number, not {type(capacity).__name__}")
    if not 1 <= capacity <= MOST:
        raise ValueError(f"capacity must be from 1 to {MOST}, not {capacity}")
    return f"{OWN}slot:{check_name(pool, 'pool', most=180)}"


def check_slot(prefix: str, slot: object) -> str:
    """The name of its lease. Any number there can be: the capacity may have been another one."""
    if isinstance(slot, bool) or not isinstance(slot, int) or not 1 <= slot <= MOST:
        raise ValueError(f"slot must be a whole number from 1 to {MOST}, not {slot!r}")
    return f"{prefix}:{slot}"


def refusal(pool: str, capacity: int, held: Refusal, waited: float | None) -> NotAcquired:
    if held.remaining is None:
        message = f"no slot of pool {pool!r} is to be had: all {capacity} are taken, or just being changed by somebody"
    else:
        soonest = f"the first for {held.remaining:.1f} s more unless renewed"
        message = f"all {capacity} slots of pool {pool!r} are taken, {soonest}"
    if waited is None:
        return NotAcquired(message, name=pool, holder=held.holder)
    return AcquireTimeout(f"{message}; waited {waited:.1f} s", name=pool, holder=held.holder)
