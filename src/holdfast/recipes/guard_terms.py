"""The exit codes of a guarded process, and the checked arguments of a guard."""

from __future__ import annotations

from holdfast.lease.terms import LeaseTerms
from holdfast.names import MAX_TTL, MIN_TTL, check_free_name, check_seconds

REFUSED, UNPROVEN, LOST = 75, 69, 70
"""Exit codes, as in sysexits.h. Refused: another process holds the lease. Unproven: the database did not confirm that
this process holds it. Lost: this process held it and lost it. A process whose exit hooks take too long is killed by the
kernel instead."""


def check_guard(key: str, *, ttl: float, heartbeat: float, strict: bool) -> LeaseTerms:
    """The terms of the guard's lease. ValueError or TypeError when the arguments do not fit together."""
    check_seconds(heartbeat, "heartbeat", 0.001, MAX_TTL)
    check_seconds(ttl, "ttl", MIN_TTL, MAX_TTL)
    name, renew_every = check_free_name(key, "key"), min(heartbeat, ttl / 2)
    terms = LeaseTerms.check(name, ttl=ttl, renew_every=renew_every, strict=strict)
    if ttl < 2 * heartbeat:
        raise ValueError(
            f"ttl must be clearly above heartbeat, at least twice: ttl={ttl!r} and heartbeat={heartbeat!r} leave no "
            "time for a retry"
        )
    return terms
