"""A pytest plugin that records how long the machine stood still during a test, and prints it beside a failure.

A thread of each test process sleeps for 20 ms at a time. A wake-up that comes late means that this process did not run:
the machine was busy with other work, was suspended, or one of our own threads kept the interpreter. A test about time
takes the fixture ``standstill`` and subtracts what was lost from what it measured.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator
from typing import NamedTuple

import pytest

INTERVAL = 0.02
NOTICED = 0.05
"""Seconds. A wake-up that is less late than this is ordinary scheduling."""


class Pause(NamedTuple):
    end: float
    seconds: float


class Standstill:
    """The late wake-ups of this process. Times are those of ``time.monotonic()``."""

    def __init__(self) -> None:
        self._pauses: deque[Pause] = deque(maxlen=10_000)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._record, name="standstill", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _record(self) -> None:
        due = time.monotonic() + INTERVAL
        while not self._stopped.wait(INTERVAL):
            now = time.monotonic()
            self.note(due, now)
            due = now + INTERVAL

    def note(self, due: float, now: float) -> None:
        """Record a wake-up at ``now`` that was ``due`` before."""
        if now - due > NOTICED:
            self._pauses.append(Pause(now, now - due))

    def pauses(self, since: float) -> list[float]:
        """The length in seconds of each pause that ended after ``since``."""
        return [pause.seconds for pause in tuple(self._pauses) if pause.end > since]

    def seconds(self, since: float) -> float:
        """How long the machine stood still after ``since``, in all."""
        return sum(self.pauses(since))

    def report(self, since: float) -> str:
        pauses = self.pauses(since)
        if not pauses:
            return f"The machine never stood still for longer than {NOTICED:g} s."
        times = "once" if len(pauses) == 1 else f"{len(pauses)} times"
        return f"The machine stood still {times}, for {sum(pauses):.2f} s in all, {max(pauses):.2f} s at the longest."


_standstill = Standstill()
_started = pytest.StashKey[float]()


def pytest_sessionstart() -> None:
    _standstill.start()


def pytest_sessionfinish() -> None:
    _standstill.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_started] = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("Standstill", _standstill.report(item.stash[_started])))
    return report


@pytest.fixture
def standstill() -> Standstill:
    """How long the machine stood still: ``standstill.seconds(since)``."""
    return _standstill
