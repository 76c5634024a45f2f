"""The local clock of leases: it never steps and, where the system can, goes on while the machine sleeps."""

from __future__ import annotations

import time
from functools import partial

now = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


def jitter(minimum: float, maximum: float) -> float:
    """Random seconds between the two, so that processes do not wait in step."""
    import random  # here: the import takes a millisecond, and only waiters need it

    return random.uniform(minimum, maximum)
