"""Measurement on a noisy machine: every variant in turn, medians, ratios within a round.

A ratio compares neighbours of the same round, and the median of the ratios is reported, so that a slow minute of the
machine slows both sides. Absolute times are valid only for the machine they were measured on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

Run = Callable[[int], float | None]
"""Runs the variant so many times. Returns the seconds for all of them, or None if the caller shall measure."""


@dataclass(frozen=True, slots=True)
class Result:
    benchmark: str
    variant: str
    value: float
    unit: str
    ratio: float | None = None
    aim: str = ""
    """The target as text, or empty."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    quick: bool

    def rounds(self, full: int = 15) -> int:
        return 2 if self.quick else full

    def times(self, full: int) -> int:
        return max(5, full // 100) if self.quick else full


def pin() -> int | None:
    """Pin this process, and every server it starts, to one core: otherwise the cost of wake-ups depends on chance."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {core})
        return core
    return None


@contextlib.contextmanager
def unpinned() -> Iterator[None]:
    """Use all cores, for this process and those it starts: for servers that run concurrently."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def compare(
    benchmark: str, variants: Iterable[tuple[str, Run]], *, rounds: int, times: int, aim: str = ""
) -> list[Result]:
    """Seconds per run of each variant; the first variant is 1.0, and the others have the ``aim``."""
    runs = list(variants)
    taken: dict[str, list[float]] = {name: [] for name, _ in runs}
    for _, run in runs:
        run(max(2, times // 10))  # warm up: prepare statements, read pages
    for number in range(rounds):
        turn = number % len(runs)
        for name, run in runs[turn:] + runs[:turn]:
            began = perf_counter()
            seconds = run(times)
            taken[name].append((perf_counter() - began if seconds is None else seconds) / times)
    base = taken[runs[0][0]]
    return [
        Result(
            benchmark,
            name,
            median(samples),
            "s",
            median(seconds / least for seconds, least in zip(samples, base, strict=True)),
            "" if samples is base else aim,
        )
        for name, samples in taken.items()
    ]
