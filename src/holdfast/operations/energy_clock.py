"""Measures CPU and wall time of one execution, and asks a meter for the energy that it took.

An error of the meter is logged and never fails the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from threading import get_ident
from time import perf_counter, thread_time
from typing import Any

from holdfast.operations.energy import Clock, Estimate, Meter, energy_record
from holdfast.runtime.log import ERROR, logger

log = logger("holdfast.operation")


class EnergyClock:
    """Measures from ``start`` to ``stop``, which sets ``op._energy`` when the meter returns an estimate.

    CPU seconds are those of this thread, unless the caller counts them itself and sets ``cpu_seconds``.
    """

    def __init__(self, op: Any, meter: Meter, clock: Clock) -> None:
        self.cpu_seconds: float | None = None
        self._op, self._meter, self._clock = op, meter, clock
        self._end: Callable[[float, float, Clock], Estimate | None] | None = None
        self._cpu_start = self._wall_start = 0.0
        self._thread = 0

    def start(self) -> None:
        try:
            self._end = self._meter.begin()
        except Exception:
            self._log_failure()
        self._thread, self._cpu_start, self._wall_start = get_ident(), thread_time(), perf_counter()

    def stop(self) -> None:
        wall = perf_counter() - self._wall_start
        cpu = self._thread_seconds() if self.cpu_seconds is None else self.cpu_seconds
        try:
            estimate = None if self._end is None else self._end(cpu, wall, self._clock)
            self._op._energy = None if estimate is None else energy_record(cpu, wall, estimate)
        except Exception:
            self._log_failure()

    def _thread_seconds(self) -> float:
        """NaN (unknown) when a block was entered in one thread and left in another, whose clocks are not comparable."""
        return thread_time() - self._cpu_start if get_ident() == self._thread else nan

    def _log_failure(self) -> None:
        log.event(
            "operation.unmetered", ERROR, "the energy of %(operation)s is not measured: %(meter)s failed",
            exc_info=True, operation=str(self._op), meter=repr(self._meter),
        )  # fmt: skip
