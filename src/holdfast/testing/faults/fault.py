"""One thing that can go wrong, as a value."""

from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    """Heals by itself, or is healed by those it befell."""


@dataclass(frozen=True)
class Fault:
    """``begin()`` makes it happen, ``heal()`` makes it good again; both return when that is so.

    Two faults ``on`` the same thing are never under way together: a server cannot crash while it is being promoted.
    """

    kind: str
    on: object
    begin: Callable[[], object]
    heal: Callable[[], object] = _nothing
