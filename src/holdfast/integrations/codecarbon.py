"""Energy and emissions of operations as codecarbon measures them, in place of an estimate from CPU time:

    from codecarbon import OfflineEmissionsTracker
    from holdfast.integrations.codecarbon import CodeCarbon

    tracker = OfflineEmissionsTracker(country_iso_code="AUT", output_methods=[])
    client = holdfast.Client(url, energy=CodeCarbon(tracker))

The package is not imported here. It measures the whole machine, or with ``tracking_mode="process"`` the process, and
one task at a time: of overlapping executions only the first is measured. Its result is an estimate, too. A measurement
takes about a millisecond; the first takes seconds, so it is done in the constructor and not in an operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from holdfast.lineage import Estimate

JOULES_PER_KWH, GRAMS_PER_KG = 3_600_000.0, 1000.0
_DETAILS = ("codecarbon_version", "country_iso_code", "region", "tracking_mode", "cpu_model", "cpu_power", "ram_power")


class CodeCarbon:
    """``tracker``: an EmissionsTracker, or an OfflineEmissionsTracker, that is used for no other tasks."""

    def __init__(self, tracker: Any) -> None:
        for name in ("start_task", "stop_task"):
            if not callable(getattr(tracker, name, None)):
                raise TypeError(f"tracker must have a method {name}, as an EmissionsTracker has: {tracker!r:.80}")
        self._tracker, self._numbers, self._busy = tracker, count(1), threading.Lock()
        self.begin()(0.0, 0.0, "")  # the first task detects the hardware, which takes seconds

    def __repr__(self) -> str:
        return f"<CodeCarbon {type(self._tracker).__name__}>"

    def begin(self) -> Callable[[float, float, str], Estimate | None]:
        if not self._busy.acquire(blocking=False):
            return lambda *_: None
        name = f"holdfast-{next(self._numbers)}"
        try:
            self._tracker.start_task(name)
        except BaseException:
            self._busy.release()
            raise

        def end(cpu_seconds: float, wall_seconds: float, clock: str) -> Estimate | None:
            try:
                emissions = self._tracker.stop_task(name)
                # The tracker keeps every task for a final report: in a service that would leak memory.
                # private: codecarbon EmissionsTracker._tasks, tested in tests/test_private_names.py
                getattr(self._tracker, "_tasks", {}).pop(name, None)
            finally:
                self._busy.release()
            if emissions is None:
                return None
            details = {name: getattr(emissions, name, None) for name in _DETAILS}
            joules, grams = emissions.energy_consumed * JOULES_PER_KWH, emissions.emissions * GRAMS_PER_KG
            return Estimate(joules, grams, "codecarbon", details)

        return end
