"""A pytest plugin that records how long the machine stood still during a test, and prints it beside a failure.

A test about time takes the fixture ``standstill`` and subtracts what was lost from what it measured with
``time.monotonic()``.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest

from holdfast.testing.standstill import Standstill

_recorder = pytest.StashKey[Standstill]()
_started = pytest.StashKey[float]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_recorder] = Standstill(time.monotonic)


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_recorder].close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_started] = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        pauses = item.config.stash[_recorder].figures(item.stash[_started])
        text = f"The machine stood still for {pauses['total']:.2f} s in all, {pauses['longest']:.2f} s at the longest."
        report.sections.append(("Standstill", text))
    return report


@pytest.fixture
def standstill(pytestconfig: pytest.Config) -> Standstill:
    """Records pauses of the machine: ``standstill.seconds(since)``."""
    return pytestconfig.stash[_recorder]
