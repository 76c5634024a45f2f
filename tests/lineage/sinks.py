"""Sinks for tests: they keep what they are given, and fail as they are told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast import Event


class Kept(list[Event]):
    """Everything that it was given, in order; ``trouble(events)`` may raise before it takes them, ``after`` then."""

    def __init__(self) -> None:
        super().__init__()
        self.trouble: Callable[[Sequence[Event]], Any] = lambda events: None
        self.after: Callable[[Sequence[Event]], Any] = lambda events: None

    def publish(self, events: Sequence[Event]) -> None:
        self.trouble(events)
        self.extend(events)
        self.after(events)

    def told(self) -> list[tuple[str, str]]:
        return [(each.label, each.type) for each in self]


def once(events: Sequence[Event]) -> list[Event]:
    """As a sink sees them that knows what it has: the first of each id. What comes again must be the very same."""
    known: dict[str, Event] = {}
    for each in events:
        assert known.setdefault(each.id, each) == each, "the same id, and something else"
    return list(known.values())
