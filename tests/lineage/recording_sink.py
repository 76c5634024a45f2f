"""A sink for tests: it records what it receives, and can fail on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.lineage import Event


class RecordingSink(list[Event]):
    """All events received, in order. ``before(events)`` is called first and may raise, ``after(events)`` last."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[Sequence[Event]], Any] = lambda events: None
        self.after: Callable[[Sequence[Event]], Any] = lambda events: None

    def publish(self, events: Sequence[Event]) -> None:
        self.before(events)
        self.extend(events)
        self.after(events)

    def received(self) -> list[tuple[str, str]]:
        return [(event.label, event.type) for event in self]


def deduplicated(events: Sequence[Event]) -> list[Event]:
    """The first event of each id. Asserts that repeated events are equal."""
    first: dict[str, Event] = {}
    for event in events:
        assert first.setdefault(event.id, event) == event, "two different events with the same id"
    return list(first.values())
