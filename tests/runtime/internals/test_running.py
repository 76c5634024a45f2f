"""The bell that wakes a supervisor: heard at once, and never waited for longer than was asked for."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from typing import Any

import pytest

from holdfast.runtime.concurrency import StopEvent, Wakeup
from holdfast.runtime.concurrency_async import AsyncWakeup, call_blocking
from tests.children import PATIENCE, eventually


def test_a_handler_that_takes_its_time_does_not_make_a_wait_endless() -> None:
    """It ends after the wait should have: whoever counts what is left then has less than nothing."""
    bell, ends = Wakeup(), math.inf
    handled: list[bool] = []

    def handle(*_: object) -> None:
        handled.append(time.monotonic() < ends)
        while time.monotonic() < ends + 0.1:
            time.sleep(0.01)

    before = signal.signal(signal.SIGUSR2, handle)
    gives_up = threading.Timer(PATIENCE, bell.set)
    gives_up.start()
    try:
        for seconds in (0.2, 1.0, 5.0, 25.0):  # until the signal comes in time
            ends = time.monotonic() + seconds
            interrupts = threading.Timer(seconds / 4, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
            interrupts.start()
            bell.wait(seconds)
            interrupts.join()
            if handled.pop():
                break
        else:
            pytest.fail("the signal came too late, four times")
        assert gives_up.is_alive(), "the wait has ended by itself"
    finally:
        gives_up.cancel()
        signal.signal(signal.SIGUSR2, before)


def test_it_is_heard_however_early_it_rings_and_once_however_often() -> None:
    bell = Wakeup()
    bell.set()
    bell.set()
    gives_up = threading.Timer(PATIENCE, bell.set)
    gives_up.start()
    bell.wait(600.0)
    assert gives_up.is_alive()
    bell.wait(0.01)
    assert gives_up.is_alive()
    gives_up.cancel()


def test_on_a_loop_it_is_heard_by_who_begins_to_wait_as_it_rings() -> None:
    """It has looked whether somebody waits, and seen nobody: but somebody does, by the time that it rings."""
    looked, waits = threading.Event(), threading.Event()

    class Torn(AsyncWakeup):
        @property
        def _loop(self) -> Any:
            found = self.__dict__.get("made")
            if threading.current_thread() is ringing:
                looked.set()
                waits.wait(PATIENCE)
            return found

        @_loop.setter
        def _loop(self, made: Any) -> None:
            self.__dict__["made"] = made

    async def wait() -> None:
        asyncio.get_running_loop().call_later(0.01, waits.set)
        async with asyncio.timeout(PATIENCE):
            await bell.wait(600.0)

    bell = Torn()
    ringing = threading.Thread(target=bell.set)
    ringing.start()
    assert looked.wait(PATIENCE)
    asyncio.run(wait())
    waits.set()
    ringing.join()


def test_a_handler_may_set_the_flag_that_its_own_thread_waits_for() -> None:
    """It comes when that thread has taken the lock; or when it has looked, but not lain down yet to be woken."""
    taken, looked = StopEvent(), StopEvent()

    def wait() -> None:
        with taken._cond:
            taken.set()
        looked.wait()

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    eventually(taken.is_set, "it does not wait for itself")
    looked._flag = True  # type: ignore[attr-defined]
    waits.join(PATIENCE)
    assert not waits.is_alive()


async def test_a_cancellation_waits_for_a_blocking_function_that_runs_in_a_thread() -> None:
    """A relay releases its lease after that: two relays must not write to one file."""
    begun, may_end = asyncio.Event(), threading.Event()
    loop, ended = asyncio.get_running_loop(), []

    def publish() -> None:
        loop.call_soon_threadsafe(begun.set)
        ended.append(may_end.wait(PATIENCE))

    call = asyncio.create_task(call_blocking(publish))
    await begun.wait()
    call.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended == [True]
