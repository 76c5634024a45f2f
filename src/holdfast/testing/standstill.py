"""How long this process did not run although it wanted to, so that a verdict about a span can allow for it.

A thread sleeps for 20 ms at a time. A wake-up that comes late means that the machine was busy with other work, was
suspended, or that another thread kept the interpreter. A fault that stops other processes is not counted.
"""

import threading
from typing import Any, NamedTuple

from holdfast.testing.closing import Closing
from holdfast.testing.history import now

INTERVAL = 0.02
NOTICED = 0.002
"""Seconds. A wake-up that is less late than this is ordinary on an idle machine."""


class Pause(NamedTuple):
    start: float
    end: float


class Standstill(Closing):
    """Records from its creation until ``close()``. Times are those of ``history.now()``."""

    def __init__(self) -> None:
        self._pauses: list[Pause] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._record, name="standstill", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def note(self, due: float, woke: float) -> None:
        """Record a wake-up that was due before."""
        if woke - due > NOTICED:
            self._pauses.append(Pause(due, woke))

    def seconds(self, since: float, until: float) -> float:
        """How much of this span was lost."""
        spans = (min(pause.end, until) - max(pause.start, since) for pause in tuple(self._pauses))
        return sum(span for span in spans if span > 0)

    def figures(self) -> dict[str, Any]:
        """In all, and at the longest, in seconds."""
        lengths = [pause.end - pause.start for pause in tuple(self._pauses)]
        return {"total": round(sum(lengths), 3), "longest": round(max(lengths, default=0.0), 3)}

    def _record(self) -> None:
        due = now() + INTERVAL
        while not self._stopped.wait(INTERVAL):
            woke = now()
            self.note(due, woke)
            due = woke + INTERVAL
