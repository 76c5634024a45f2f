"""Durations that the tests of the lease contract share, and a waiter in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import holdfast

Connect = Callable[..., Any]

LONG = 60.0
"""A TTL that does not run out during a test, and the limit of every wait."""
SHORT = 0.25
"""A TTL whose end a test waits for."""
OUTLIVED = (0.5, 4.0, 20.0)
"""TTLs that a lease must outlive. A machine that stands still for longer than one of them has the next to show it."""
SOON = 0.05
"""A heartbeat that tells of a loss while the test waits."""


def refused_after_waiting(acquire: Callable[[], Any]) -> holdfast.AcquireTimeout:
    """The AcquireTimeout of an ``acquire`` that gives up soon. A database that did not answer within the second that it
    has then is asked again."""
    while True:
        try:
            grant = acquire()
        except holdfast.AcquireTimeout as refused:
            return refused
        except holdfast.EngineError:
            continue
        raise AssertionError(f"it was acquired: {grant}")


@contextmanager
def waiting(acquire: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run ``acquire`` in a thread meanwhile; its answer is in the list afterwards."""
    answers: list[Any] = []
    begun = threading.Event()

    def run() -> None:
        begun.set()
        answers.append(acquire())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    yield answers
    thread.join(2 * LONG)
    assert answers, "the waiter never got it"
