"""The exit codes of a guarded process, and the checked arguments of a guard."""

from __future__ import annotations

from holdfast.lease.terms import LeaseTerms
from holdfast.names import MAX_TTL, MIN_TTL, check_free_name, check_seconds

REFUSED, UNPROVEN, LOST = 75, 69, 70
"""Exit codes, as in sysexits.h. Refused: another process holds the lease. Unproven: the database did not confirm that
this process holds it. Lost: this process held it and lost it. A process whose exit hooks take too long is killed by the
kernel instead."""


def check_guard(name: str, *, ttl: float, renew_every: float | None, strict: bool) -> LeaseTerms:
    """The terms of the guard's lease. ValueError or TypeError when the arguments do not fit together."""
    check_seconds(ttl, "ttl", MIN_TTL, MAX_TTL)
    if renew_every is not None and check_seconds(renew_every, "renew_every", 0.001, MAX_TTL) > ttl / 2:
        raise ValueError(f"renew_every must leave time for a retry: at most half of ttl={ttl:g}, not {renew_every!r}")
    return LeaseTerms.check(check_free_name(name), ttl=ttl, renew_every=renew_every, strict=strict, kind="guard")
