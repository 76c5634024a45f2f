"""Chooses what goes wrong and when. The same seed chooses the same faults in the same order."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from holdfast.testing.faults.fault import Fault

Phase = Literal["begin", "heal"]
Span = tuple[float, float]

_LOOK = 0.05
"""Seconds between two looks at whether it is time to stop."""


class Turn(NamedTuple):
    """``at`` is in seconds since the beginning, on a clock that stands still while a fault begins or heals."""

    at: float
    phase: Phase
    fault: Fault


def plan(faults: Sequence[Fault], seed: int, *, every: Span, lasting: Span, at_once: int) -> Iterator[Turn]:
    """What to do when, without end. Decided beforehand: how fast the machine is changes nothing about it."""
    choice = random.Random(seed)
    at = 0.0
    under_way: list[tuple[float, Fault]] = []
    while True:
        at += choice.uniform(*every)
        while under_way and under_way[0][0] <= at:
            yield Turn(under_way[0][0], "heal", under_way.pop(0)[1])
        busy = [fault.on for _, fault in under_way]
        free = [fault for fault in faults if fault.on not in busy]
        if free and len(under_way) < at_once:
            fault = choice.choice(free)
            yield Turn(at, "begin", fault)
            under_way.append((at + choice.uniform(*lasting), fault))
            under_way.sort(key=lambda each: each[0])


class Nemesis:
    """Makes ``faults`` happen at random, and tells ``record`` of each: its kind, and "begin" or "heal".

    A fault begins ``every`` so many seconds and is healed after ``lasting`` so many; ``at_once`` of them overlap at
    most. What is recorded as begun and not yet healed may be in force: it is told before it begins and after it heals.
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
            raise ValueError("faults: there must be one at least")
        self._plan = plan(faults, seed, every=every, lasting=lasting, at_once=at_once)
        self._record = record
        self._at = 0.0
        """How far the plan is carried out: a second run goes on where the first has ended."""
        self._under_way: list[Fault] = []
        self.counts: Counter[str] = Counter()
        """How often each kind has begun."""

    def run(self, until: float | Callable[[], bool]) -> Counter[str]:
        """For ``until`` seconds, or until it says so; then heal whatever is under way. The counts so far."""
        begun = time.monotonic()
        over = until if callable(until) else lambda: time.monotonic() - begun >= until
        try:
            for turn in self._plan:
                if not _wait(turn.at - self._at, over):
                    break
                self._at = turn.at
                self._take(turn)
        finally:
            self.heal()
        return self.counts

    def heal(self) -> None:
        """Heal everything, even if something cannot be healed: that is raised when the rest is."""
        problems: list[Exception] = []
        while self._under_way:
            fault = self._under_way.pop()
            try:
                fault.heal()
            except Exception as error:
                problems.append(error)
            else:
                self._record(fault.kind, "heal")
        if problems:
            raise ExceptionGroup("some faults could not be healed", problems)

    def _take(self, turn: Turn) -> None:
        fault = turn.fault
        if turn.phase == "begin":
            self.counts[fault.kind] += 1
            self._under_way.append(fault)
            self._record(fault.kind, "begin")
            fault.begin()
        elif fault in self._under_way:  # not after an earlier run, which healed it
            fault.heal()
            self._under_way.remove(fault)
            self._record(fault.kind, "heal")


def _wait(seconds: float, over: Callable[[], bool]) -> bool:
    """False when it was over before the time had passed."""
    deadline = time.monotonic() + seconds
    while not over():
        left = deadline - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(left, _LOOK))
    return False
