"""What codecarbon measures of an execution, in place of an estimate from CPU time:

    from codecarbon import OfflineEmissionsTracker
    from holdfast.integrations.codecarbon import CodeCarbon

    tracker = OfflineEmissionsTracker(country_iso_code="AUT", output_methods=[])
    client = holdfast.Client(url, energy=CodeCarbon(tracker))

The package is not imported here. It looks at the whole machine, or with ``tracking_mode="process"`` at the process, and
at one task at a time: of executions that overlap, the first is measured and the others are not. That is an estimate,
too, and takes about a millisecond each time; the first time takes seconds, which are spent here, not in an operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from holdfast import Estimate

JOULES_PER_KWH, GRAMS_PER_KG = 3_600_000.0, 1000.0
_SAID = ("codecarbon_version", "country_iso_code", "region", "tracking_mode", "cpu_model", "cpu_power", "ram_power")


class CodeCarbon:
    """``tracker``: an EmissionsTracker, or an OfflineEmissionsTracker, that nobody else uses for tasks."""

    def __init__(self, tracker: Any) -> None:
        for name in ("start_task", "stop_task"):
            if not callable(getattr(tracker, name, None)):
                raise TypeError(f"tracker must have a method {name}, as an EmissionsTracker has: {tracker!r:.80}")
        self._tracker, self._numbers, self._busy = tracker, count(1), threading.Lock()
        self.begin()(0.0, 0.0, "")  # it finds out about the machine

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
                found = self._tracker.stop_task(name)
                # It keeps every task for a report at its end, and a service has none.
                getattr(self._tracker, "_tasks", {}).pop(name, None)
            finally:
                self._busy.release()
            if found is None:
                return None
            told = {each: getattr(found, each, None) for each in _SAID}
            joules, grams = found.energy_consumed * JOULES_PER_KWH, found.emissions * GRAMS_PER_KG
            return Estimate(joules, grams, "codecarbon", told)

        return end
