"""How many locks a client has, and how many wait for one: read from the books of the multiplexer when somebody asks, so
that whoever locks has nothing to count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.lock.tickets import Claim, Ticket


class Standing(NamedTuple):
    held: int
    waiting: int
    """Behind somebody else, of this client or not. A question that was not answered yet is no waiting."""


def standing(claims: Iterable[Claim | Ticket]) -> Standing:
    held = waiting = 0
    for each in claims:
        claim = each if isinstance(each, Claim) else each.heirs
        holder = each.holder if isinstance(each, Claim) else each
        held += holder is not None and holder.state == "held"
        if claim is not None and claim.stage != "asking":
            waiting += len(claim.queue)
    return Standing(held, waiting)
