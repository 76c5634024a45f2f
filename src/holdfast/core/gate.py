"""What the lease behind a gate is called and asked for with."""

from __future__ import annotations

from holdfast.core.grant import OWN, LeaseTerms, check_name


def gate_lease(name: str) -> str:
    return f"{OWN}gate:{name}"


def gate_terms(name: str, *, actor: str, ttl: float, auto_renew: bool = True) -> LeaseTerms:
    """``actor`` is who people see as its holder; unlike a holder, the same actor does not get it twice."""
    terms = LeaseTerms.check(
        gate_lease(check_name(name, "name", most=180)), ttl=ttl, holder=check_name(actor, "actor"), at_least=0.0,
        auto_renew=auto_renew, renew_every=None, on_lost="flag", failover="ttl",
    )  # fmt: skip
    return terms._replace(reenter=False)
