"""The bell that wakes a supervisor: heard at once, and never waited for longer than was asked for."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

from holdfast._wire.aio_running import AsyncBell
from holdfast._wire.running import Bell, Flag
from tests.children import eventually


def test_a_handler_that_takes_its_time_does_not_make_a_wait_endless() -> None:
    """It ends after the wait should have: whoever counts what is left then has less than nothing."""
    bell, handled = Bell(), threading.Event()

    def handle(*_: object) -> None:
        time.sleep(1.2)
        handled.set()

    before = signal.signal(signal.SIGUSR2, handle)
    gives_up = threading.Timer(10.0, bell.ring)
    gives_up.start()
    interrupts = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR2))
    interrupts.start()
    try:
        bell.wait(1.0)
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


def test_on_a_loop_it_is_heard_by_who_begins_to_wait_as_it_rings() -> None:
    """It has looked whether somebody waits, and seen nobody: but somebody does, by the time that it rings."""
    looked, waits = threading.Event(), threading.Event()

    class Torn(AsyncBell):
        @property
        def _signal(self) -> Any:
            found = self.__dict__.get("made")
            if threading.current_thread() is ringing:
                looked.set()
                waits.wait(10)
            return found

        @_signal.setter
        def _signal(self, made: Any) -> None:
            self.__dict__["made"] = made

    async def wait() -> float:
        began = time.monotonic()
        asyncio.get_running_loop().call_later(0.01, waits.set)
        await bell.wait(3.0)
        return time.monotonic() - began

    bell = Torn()
    ringing = threading.Thread(target=bell.ring)
    ringing.start()
    assert looked.wait(10)
    assert asyncio.run(wait()) < 2
    waits.set()
    ringing.join()


def test_a_handler_may_set_the_flag_that_its_own_thread_waits_for() -> None:
    """It comes when that thread has taken the lock; or when it has looked, but not lain down yet to be woken."""
    taken, looked = Flag(), Flag()

    def wait() -> None:
        with taken._cond:
            taken.set()
        looked.wait()

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    eventually(taken.is_set, "it does not wait for itself")
    looked._flag = True  # type: ignore[attr-defined]
    waits.join(10)
    assert not waits.is_alive()
