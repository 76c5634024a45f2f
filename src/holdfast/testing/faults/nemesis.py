"""Chooses faults and times at random. The same seed chooses the same faults in the same order."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from holdfast.testing.faults.fault import Fault

Phase = Literal["begin", "heal"]
Span = tuple[float, float]

_CHECK_EVERY = 0.05
"""Seconds between two checks whether to stop."""


class FaultStep(NamedTuple):
    """The begin or the end of a fault. ``at`` is seconds since the start, on a clock that stops during a step."""

    at: float
    phase: Phase
    fault: Fault


def plan(faults: Sequence[Fault], seed: int, *, every: Span, lasting: Span, at_once: int) -> Iterator[FaultStep]:
    """An endless sequence of steps. It depends on the seed only, not on the speed of the machine."""
    choice = random.Random(seed)
    at = 0.0
    under_way: list[tuple[float, Fault]] = []
    while True:
        at += choice.uniform(*every)
        while under_way and under_way[0][0] <= at:
            yield FaultStep(under_way[0][0], "heal", under_way.pop(0)[1])
        busy = [fault.on for _, fault in under_way]
        free = [fault for fault in faults if fault.on not in busy]
        if free and len(under_way) < at_once:
            fault = choice.choice(free)
            yield FaultStep(at, "begin", fault)
            under_way.append((at + choice.uniform(*lasting), fault))
            under_way.sort(key=lambda entry: entry[0])


class Nemesis:
    """Begins and heals ``faults`` at random, and calls ``record`` with the kind of each and "begin" or "heal".

    ``every``: least and most seconds between two begins. ``lasting``: least and most seconds of a fault. ``at_once``:
    how many may overlap. A fault is recorded before it begins and after it is healed, so that it is never in effect
    unrecorded.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        seed: int,
        *,
        record: Callable[[str, Phase], object] = lambda kind, phase: None,
        every: Span = (0.2, 1.5),
        lasting: Span = (0.1, 2.0),
        at_once: int = 2,
    ) -> None:
        if not faults:
            raise ValueError("faults: give at least one")
        self._plan = plan(faults, seed, every=every, lasting=lasting, at_once=at_once)
        self._record = record
        self._at = 0.0
        """The time of the last step: a second run continues there."""
        self._under_way: list[Fault] = []
        self.counts: Counter[str] = Counter()
        """How often each kind has begun."""

    def run(self, until: float | Callable[[], bool]) -> Counter[str]:
        """Run for ``until`` seconds, or until it returns true; then heal all faults. Returns the counts so far."""
        started = time.monotonic()
        is_over = until if callable(until) else lambda: time.monotonic() - started >= until
        try:
            for step in self._plan:
                if not _wait(step.at - self._at, is_over):
                    break
                self._at = step.at
                self._execute(step)
        finally:
            self.heal()
        return self.counts

    def heal(self) -> None:
        """Heal all faults. Raises an ExceptionGroup at the end if some could not be healed."""
        errors: list[Exception] = []
        while self._under_way:
            fault = self._under_way.pop()
            try:
                fault.heal()
            except Exception as error:
                errors.append(error)
            else:
                self._record(fault.kind, "heal")
        if errors:
            raise ExceptionGroup("some faults could not be healed", errors)

    def _execute(self, step: FaultStep) -> None:
        fault = step.fault
        if step.phase == "begin":
            self.counts[fault.kind] += 1
            self._under_way.append(fault)
            self._record(fault.kind, "begin")
            fault.begin()
        elif fault in self._under_way:  # an earlier run may have healed it
            fault.heal()
            self._under_way.remove(fault)
            self._record(fault.kind, "heal")


def _wait(seconds: float, is_over: Callable[[], bool]) -> bool:
    """Returns False as soon as ``is_over()``, True after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not is_over():
        left = deadline - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(left, _CHECK_EVERY))
    return False
