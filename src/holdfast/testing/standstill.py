"""How long this process did not run although it wanted to, so that a verdict about a span can allow for it.

A thread sleeps for 20 ms at a time. A wake-up that comes late means that the machine was busy with other work, was
suspended, or that another thread kept the interpreter. A fault that stops other processes is not counted.
"""

import math
import threading
from collections import deque
from collections.abc import Callable
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
    """Records from its creation until ``close()``. Times are those of ``clock``, by default ``history.now``."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._pauses: deque[Pause] = deque(maxlen=100_000)
        self._due = clock() + INTERVAL
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

    def pauses(self, since: float = -math.inf, until: float = math.inf) -> list[float]:
        """How long each pause was, as far as it lies in this span. One that has not ended counts until now: after a
        standstill the thread that asks may wake up first."""
        due, woke = self._due, self._clock()
        last = [Pause(due, woke)] if woke - due > NOTICED and not self._stopped.is_set() else []
        spans = (min(pause.end, until) - max(pause.start, since) for pause in (*tuple(self._pauses), *last))
        return [span for span in spans if span > 0]

    def seconds(self, since: float, until: float = math.inf) -> float:
        """How much of this span was lost."""
        return sum(self.pauses(since, until))

    def figures(self, since: float = -math.inf) -> dict[str, Any]:
        """In all, and at the longest, in seconds."""
        lengths = self.pauses(since)
        return {"total": round(sum(lengths), 3), "longest": round(max(lengths, default=0.0), 3)}

    def _record(self) -> None:
        while not self._stopped.wait(INTERVAL):
            woke = self._clock()
            self.note(self._due, woke)
            self._due = woke + INTERVAL
