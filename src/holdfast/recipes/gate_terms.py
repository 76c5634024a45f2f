"""The names of the leases behind gates, and their checked arguments."""

from __future__ import annotations

from holdfast.lease.terms import LeaseTerms
from holdfast.names import OWN, check_name

GATE = f"{OWN}gate:"
RUNTIME = "holdfast:runtime"
"""The lease that every governed command runs inside: one operator at a time."""


def gate_lease(name: str) -> str:
    """The name of the gate's lease."""
    return f"{GATE}{check_name(name, limit=180)}"


def runtime_terms(ttl: float) -> LeaseTerms:
    return LeaseTerms.check(RUNTIME, ttl=ttl)


def gate_terms(name: str, *, actor: str, ttl: float, auto_renew: bool = True) -> LeaseTerms:
    """``actor`` is shown as the holder. Unlike a holder, the same actor cannot acquire the lease twice."""
    terms = LeaseTerms.check(gate_lease(name), ttl=ttl, holder=check_name(actor, "actor"), auto_renew=auto_renew)
    return terms._replace(reenter=False)
