"""How a guarded process ends, and what a guard may be asked for."""

from __future__ import annotations

from holdfast.lease.terms import LeaseTerms
from holdfast.names import MAX_TTL, MIN_TTL, check_free_name, check_seconds

REFUSED, UNPROVEN, LOST = 75, 69, 70
"""Exit codes, as in sysexits.h: somebody else has it; nobody could prove that it is ours; it was ours, and is lost. A
process whose hooks take too long is ended by the kernel instead."""


def check_guard(key: str, *, ttl: float, heartbeat: float, strict: bool) -> LeaseTerms:
    check_seconds(heartbeat, "heartbeat", 0.001, MAX_TTL)
    check_seconds(ttl, "ttl", MIN_TTL, MAX_TTL)
    name, renew_every = check_free_name(key, "key"), min(heartbeat, ttl / 2)
    terms = LeaseTerms.check(name, ttl=ttl, renew_every=renew_every, strict=strict)
    if ttl < 2 * heartbeat:
        raise ValueError(
            f"ttl must be clearly above heartbeat, twice at least: ttl={ttl!r} and heartbeat={heartbeat!r} leave no "
            "room to try again"
        )
    return terms
