"""The bell that wakes a supervisor: heard at once, and never waited for longer than was asked for."""

from __future__ import annotations

import signal
import threading
import time

from holdfast._wire.running import Bell


def test_a_handler_that_takes_its_time_does_not_make_a_wait_endless() -> None:
    """It ends after the wait should have: whoever counts what is left then has less than nothing."""
    bell, handled = Bell(), threading.Event()

    def handle(*_: object) -> None:
        time.sleep(0.3)
        handled.set()

    before = signal.signal(signal.SIGUSR2, handle)
    gives_up = threading.Timer(10.0, bell.ring)
    gives_up.start()
    interrupts = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR2))
    interrupts.start()
    try:
        bell.wait(0.2)
        assert handled.is_set(), "the signal came in time"
        assert gives_up.is_alive(), "nobody had to ring"
    finally:
        gives_up.cancel()
        interrupts.join()
        signal.signal(signal.SIGUSR2, before)


def test_it_is_heard_however_early_it_rings_and_once_however_often() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    gives_up = threading.Timer(10.0, bell.ring)
    gives_up.start()
    bell.wait(30.0)
    assert gives_up.is_alive()
    bell.wait(0.01)
    assert gives_up.is_alive()
    gives_up.cancel()
