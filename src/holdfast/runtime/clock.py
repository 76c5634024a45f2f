"""The local clock that trust is counted on: it never steps, and where the system can, it runs on while it sleeps."""

from __future__ import annotations

import time
from functools import partial

now = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


def jitter(least: float, most: float) -> float:
    """Seconds, at random, so that nobody waits in step with others."""
    import random  # a millisecond that a start does not have: whoever waits has

    return random.uniform(least, most)
