"""A fault as a value."""

from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    """For faults that heal by themselves, or that the affected processes heal."""


@dataclass(frozen=True)
class Fault:
    """``begin()`` causes it and ``heal()`` ends it; both return when it is in effect.

    A nemesis never lets two faults ``on`` the same thing overlap: a server cannot crash while it is being promoted.
    """

    kind: str
    on: object
    begin: Callable[[], object]
    heal: Callable[[], object] = _nothing
