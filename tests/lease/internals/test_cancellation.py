"""An acquire that is given up leaves nothing behind, wherever it was when it was given up."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

import holdfast
from holdfast.runtime.concurrency_async import AsyncWakeup
from tests.children import NONE, PATIENCE, Child, eventually, query, rows
from tests.conftest import migrated
from tests.database.internals.test_connections import WAITING


@pytest.mark.parametrize("timeout", [0.0, 5.0], ids=["asking", "waiting"])
def test_acquires_cancelled_anywhere_leave_no_lease(either: str, timeout: float) -> None:
    """Before they are sent, on the wire, answered but not yet heard, and while they wait."""
    cancelled = 0

    async def attempt(client: holdfast.AsyncClient, number: int) -> None:
        nonlocal cancelled
        task = asyncio.create_task(client.lease(f"a{number % 7}", ttl=60).acquire(timeout=timeout))
        await asyncio.sleep(random.choice([0, 0, 0.0005, 0.001, 0.002, 0.004]))
        task.cancel()
        try:
            grant = await task
        except asyncio.CancelledError:
            cancelled += 1
        except holdfast.NotAcquired:
            pass
        else:
            await grant.release()

    async def main() -> None:
        async with holdfast.AsyncClient(either) as client:
            await client.leases.list()
            for first in range(0, 160, 20):
                await asyncio.gather(*(attempt(client, number) for number in range(first, first + 20)))
            await asyncio.to_thread(eventually, lambda: rows(either) == NONE, "nothing is left")

    asyncio.run(main())
    assert cancelled > 20


def test_a_first_acquire_cancelled_while_it_connects_leaves_no_lease(either: str) -> None:
    async def main() -> None:
        for pause in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02):
            async with holdfast.AsyncClient(either) as client:
                with suppress(TimeoutError, holdfast.NotAcquired):  # refused: the one before is not yet undone
                    async with asyncio.timeout(pause):
                        await client.lease("a", ttl=60).acquire()

    asyncio.run(main())
    migrated(either)  # on a slow machine none of them came that far
    eventually(lambda: rows(either) == NONE, "nothing is left")


_WAITING = """
import sys, time, holdfast
client = holdfast.Client(sys.argv[1])
client.leases.list()
client._engine.poll = 1e6
try:
    print("ready")
    client.lease("a", ttl=60).acquire(timeout=None)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(0)
"""


def test_ctrl_c_ends_a_waiting_acquire_at_once(either: str) -> None:
    """And not when it asks again: that is when the lease expires, in an hour."""
    with holdfast.Client(either) as client:
        held = client.lease("a", ttl=3600).acquire()
        with Child(_WAITING, either) as child:
            child.expect("ready")
            if either.startswith("postgres"):
                eventually(lambda: query(either, WAITING) != [], "it waits")
            child.signal(signal.SIGINT)
            child.expect("interrupted")
            assert child.wait() == 0
        held.release()
        assert client.leases.list() == []


_BUSY = """
import random, signal, sys, time, holdfast
client = holdfast.Client(sys.argv[1])
client.leases.list()
def interrupt(number, frame):
    if frame.f_code.co_name != "<module>":  # inside acquire, not between its return and our own variable
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
interrupted = number = 0
while number < 100 or (interrupted <= 20 and number < 6000):  # a fast machine is hit less often
    number += 1
    grant = None
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.001))
        grant = client.lease(f"a{number}", ttl=60).acquire()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except (KeyboardInterrupt, RuntimeError):  # threading itself makes a RuntimeError of one that hits its locks
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    if grant is not None:
        grant.release()
print(interrupted)
input()
"""


def test_ctrl_c_in_the_middle_of_an_acquire_leaves_no_lease(either: str) -> None:
    with Child(_BUSY, either) as child:
        assert int(child.line()) > 20
        eventually(lambda: rows(either)["lease"] == 0, "nothing is left")


class Interrupt:
    """Ctrl-C at the given moment: Python looks for signals when a function begins, and after one that is built in."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def __call__(self, frame: Any, event: str, _: object) -> None:
        if event in ("call", "c_return") and "holdfast" in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def test_ctrl_c_at_any_moment_of_leaving_a_block_leaves_no_lease(sqlite_url: str) -> None:
    """But for the very first one, before anything of ours has run. Those in the midst of the release come last."""
    with holdfast.Client(sqlite_url) as client:
        lease = client.lease("a", ttl=60, timeout=PATIENCE)
        blocks: list[Callable[[], Any]] = [lambda: lease, lease.acquire]
        for moment, block in product(range(2, 25), blocks):
            with suppress(KeyboardInterrupt), block():
                interrupt = Interrupt(moment)
                sys.setprofile(interrupt)
            assert interrupt.left == 0
        eventually(lambda: client.leases.list() == [], "nothing is left")


async def test_who_is_woken_and_cancelled_in_one_moment_is_cancelled() -> None:
    """Else an elector whose bell rings while it is told to end would go on."""
    signal = AsyncWakeup()
    task = asyncio.create_task(signal.wait(30))
    await asyncio.sleep(0)
    signal.set()
    await asyncio.sleep(0)  # set, and the waiter is about to hear of it
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
