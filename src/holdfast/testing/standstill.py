"""Records when this process did not run although it was ready to, so that checks of durations can subtract it.

A thread sleeps for 20 ms at a time. If it wakes up late, the machine was busy or suspended, or another thread held the
interpreter. Faults that stop other processes are not counted.
"""

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.testing.history import now
from holdfast.testing.resource import Resource

INTERVAL = 0.02
NOTICED = 0.002
"""Seconds. Waking up less late than this is ordinary on an idle machine."""


class Pause(NamedTuple):
    start: float
    end: float


class Standstill(Resource):
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
        """Record that the thread woke up at ``woke`` and not at ``due``."""
        if woke - due > NOTICED:
            self._pauses.append(Pause(due, woke))

    def pauses(self, since: float = -math.inf, until: float = math.inf) -> list[float]:
        """The length of each pause, as far as it lies between ``since`` and ``until``.

        A pause that has not ended counts until now: after it the caller may run before the recording thread.
        """
        due, woke = self._due, self._clock()
        current = [Pause(due, woke)] if woke - due > NOTICED and not self._stopped.is_set() else []
        spans = (min(pause.end, until) - max(pause.start, since) for pause in (*tuple(self._pauses), *current))
        return [span for span in spans if span > 0]

    def seconds(self, since: float, until: float = math.inf) -> float:
        """The total of the pauses between ``since`` and ``until``."""
        return sum(self.pauses(since, until))

    def figures(self, since: float = -math.inf) -> dict[str, Any]:
        """``total`` and ``longest`` in seconds."""
        lengths = self.pauses(since)
        return {"total": round(sum(lengths), 3), "longest": round(max(lengths, default=0.0), 3)}

    def _record(self) -> None:
        while not self._stopped.wait(INTERVAL):
            woke = self._clock()
            self.note(self._due, woke)
            self._due = woke + INTERVAL
