"""What the tests of the contract of a lease share: times, and somebody who waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Connect = Callable[..., Any]

LONG = 30.0
"""A TTL that does not run out during a test."""
SHORT = 0.25
"""A TTL whose end a test waits for."""
KEPT = 3.0
"""A TTL that a test outlives and its heartbeats must too, on a machine that stands still for a second now and then."""
SOON = 0.05
"""A heartbeat that tells of a loss while the test waits."""


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
    thread.join(LONG)
    assert answers, "the waiter never got it"
