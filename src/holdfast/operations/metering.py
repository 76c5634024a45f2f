"""Clocks around one execution. Whatever goes wrong with a meter is logged, and is no trouble of the operation's.
``metering_async`` has the same names for asyncio."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from threading import get_ident
from time import perf_counter, thread_time
from typing import Any

from holdfast.operations.energy import Clock, Estimate, Meter, facts
from holdfast.runtime.log import logger

log = logger("holdfast.operation")

BLOCK: Clock = "thread"
"""Whose CPU time is counted for a block that nobody but its writer calls."""


class Metering:
    """From ``with`` to its end; ``op.spent`` is what it cost then, if that is known. The CPU seconds are those of this
    thread, unless whoever uses it counts them itself: ``cpu``."""

    def __init__(self, op: Any, meter: Meter, clock: Clock) -> None:
        self.cpu: float | None = None
        self._op, self._meter, self._clock = op, meter, clock
        self._end: Callable[[float, float, Clock], Estimate | None] | None = None
        self._cpu = self._wall = 0.0
        self._thread = 0

    def __enter__(self) -> None:
        try:
            self._end = self._meter.begin()
        except Exception:
            log.exception(
                "the energy of %r is not measured: %r failed",
                self._op,
                self._meter,
                extra={"event": "operation.unmetered", "operation": str(self._op)},
            )
        self._thread, self._cpu, self._wall = get_ident(), thread_time(), perf_counter()

    def __exit__(self, *_: object) -> None:
        wall = perf_counter() - self._wall
        cpu = self._elapsed() if self.cpu is None else self.cpu
        try:
            said = None if self._end is None else self._end(cpu, wall, self._clock)
            self._op.spent = None if said is None else facts(cpu, wall, said)
        except Exception:
            log.exception(
                "the energy of %r is not measured: %r failed",
                self._op,
                self._meter,
                extra={"event": "operation.unmetered", "operation": str(self._op)},
            )

    def _elapsed(self) -> float:
        """Not known of a block that another thread leaves than entered it: that one's clock tells of other things."""
        return thread_time() - self._cpu if get_ident() == self._thread else nan


def spending(op: Any, meter: Meter, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it, and note what that costs."""
    with Metering(op, meter, "thread"):
        return function(*args, **kwargs)
