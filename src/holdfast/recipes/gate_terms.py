"""What the lease behind a gate is called and asked for with."""

from __future__ import annotations

from holdfast.lease.terms import LeaseTerms
from holdfast.names import OWN, check_name

GATE = f"{OWN}gate:"
RUNTIME = "holdfast:runtime"
"""The lease that every governed command runs inside: one operator at a time."""


def gate_lease(name: str) -> str:
    return f"{GATE}{check_name(name, most=180)}"


def runtime_terms(ttl: float) -> LeaseTerms:
    return LeaseTerms.check(RUNTIME, ttl=ttl)


def gate_terms(name: str, *, actor: str, ttl: float, auto_renew: bool = True) -> LeaseTerms:
    """``actor`` is who people see as its holder; unlike a holder, the same actor does not get it twice."""
    terms = LeaseTerms.check(gate_lease(name), ttl=ttl, holder=check_name(actor, "actor"), auto_renew=auto_renew)
    return terms._replace(reenter=False)
