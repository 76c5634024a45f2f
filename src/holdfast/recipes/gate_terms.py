"""The names of the leases behind gates, and their checked arguments."""

from __future__ import annotations

from holdfast.lease.terms import LeaseTerms
from holdfast.names import GATE, RUNTIME, check_name


def gate_lease(name: str) -> str:
    """The name of the gate's lease."""
    return f"{GATE}{check_name(name, limit=180)}"


def runtime_terms(ttl: float) -> LeaseTerms:
    return LeaseTerms.check(RUNTIME, ttl=ttl, kind="gate")


def gate_terms(name: str, *, actor: str, ttl: float, auto_renew: bool = True) -> LeaseTerms:
    """``actor`` is shown as the holder. Unlike a holder, the same actor cannot acquire the lease twice."""
    return LeaseTerms.check(
        gate_lease(name), ttl=ttl, holder=check_name(actor, "actor"), auto_renew=auto_renew, kind="gate"
    )
