"""Timeouts aimed at the unlock, and cancellations everywhere: not one lock is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self

import pytest

import holdfast
from holdfast.lock import executor_async
from holdfast.lock.pool import TURNS
from tests.children import PATIENCE, eventually, until
from tests.conftest import server
from tests.lock.looks import advisory, core, queued

ROUNDS = int(os.environ.get("HOLDFAST_LOCK_RACES", "30"))


def is_free(client: Any, name: Any) -> bool:
    grant = client.lock(name).try_acquire()
    return grant is not None and grant.release()


def nothing_left(url: str) -> None:
    if url.startswith("postgres"):
        eventually(lambda: advisory(url) == [], f"0 locks left: {advisory(url)}")
    with holdfast.Client(url) as fresh:
        names: list[Any] = ["a", ("agent", 7), *(f"a{number}" for number in range(7))]
        for name in names:  # the background thread may still be unlocking what was granted too late
            eventually(partial(is_free, fresh, name), f"{name!r} is unlocked")


def test_a_timeout_that_races_the_unlock_leaves_nothing_behind(connect: Callable[..., Any], either: str) -> None:
    """The server may answer with an error and hold the lock all the same (PostgreSQL bug 17686)."""
    holder, waiter = connect(either), connect(either)
    waiter.lock("warm").acquire().release()
    outcomes = {True: 0, False: 0}
    patience = freed_after = 0.012
    for number in range(50 * ROUNDS):
        if outcomes[False] >= ROUNDS and outcomes[True] > ROUNDS // 10:
            break
        name = ("agent", 7) if number % 2 else "a"
        held = holder.lock(name).acquire(timeout=PATIENCE)
        freeing = threading.Timer(max(0.0, freed_after + random.uniform(-0.001, 0.001)), held.release)
        freeing.start()
        try:
            waiter.lock(name).acquire(timeout=patience).release()
            outcomes[True] += 1
            freed_after += 0.0005
            if patience > 0.012 and freed_after > 0.75 * patience:  # it is quick again
                patience /= 2
                freed_after -= patience
        except (holdfast.AcquireTimeout, holdfast.EngineError):
            outcomes[False] += 1
            freed_after -= 0.0005
            if freed_after < 0:  # even at once is too late: the machine is slower than that
                freed_after, patience = patience, 2 * patience
        freeing.join()
    assert outcomes[False] >= ROUNDS, f"the aim was bad: {outcomes}"
    assert outcomes[True] > ROUNDS // 10, f"the aim was bad: {outcomes}"
    nothing_left(either)


def test_acquires_cancelled_anywhere_leave_no_lock(either: str) -> None:
    """Before they are sent, on the wire, answered but not yet heard, in line here and in the server's line."""
    cancelled = 0

    async def attempt(client: holdfast.AsyncClient, number: int) -> None:
        nonlocal cancelled
        task = asyncio.create_task(client.lock(f"a{number % 7}").acquire(timeout=PATIENCE))
        await asyncio.sleep(random.choice([0, 0, 0.0003, 0.001, 0.002, 0.004]))
        task.cancel()
        try:
            grant = await task
        except asyncio.CancelledError:
            cancelled += 1
        else:
            await asyncio.sleep(random.choice([0, 0.001]))
            assert await grant.release() is True

    async def main() -> None:
        async with holdfast.AsyncClient(either) as client, holdfast.AsyncClient(either) as other:
            await (await client.lock("a").acquire()).release()
            for first in range(0, 150 * ROUNDS, 30):
                if first >= 3 * ROUNDS and cancelled >= ROUNDS:
                    break
                held = [await other.lock(f"a{number}").acquire(timeout=PATIENCE) for number in range(3)]
                attempts = [asyncio.create_task(attempt(client, number)) for number in range(first, first + 30)]
                await asyncio.sleep(random.uniform(0, 0.004))
                for grant in held:
                    assert await grant.release() is True
                await asyncio.gather(*attempts)
            for number in range(7):
                grant = await client.lock(f"a{number}").acquire(timeout=PATIENCE)
                assert await grant.release() is True
            if either.startswith("postgres"):
                await asyncio.to_thread(eventually, lambda: advisory(either) == [], "before anything is closed")

    asyncio.run(main())
    assert cancelled >= ROUNDS
    nothing_left(either)


class Aim:
    """Sends SIGINT to the main thread, at a random instant of what it does while it is ``armed``.

    Not PyThreadState_SetAsyncExc: until Python 3.12 a thread that is just being started has the number of the thread
    that starts it, so the exception may end the new one, and the other waits for it for ever.
    """

    def __init__(self) -> None:
        self._mutex, self._armed = threading.Lock(), False
        self._sent = self._raised = 0
        self._over = threading.Event()
        self._shooting = threading.Thread(target=self._shoot)

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._raise)
        self._shooting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._shooting.join()
        signal.signal(signal.SIGINT, self._before)

    def arm(self) -> None:
        with self._mutex:
            self._armed = True

    def disarm(self) -> None:
        """A signal that was sent before is handled now, and none is sent after."""
        with self._mutex:
            self._armed = False
        eventually(lambda: self._raised == self._sent, "the signal is handled")

    def _raise(self, *_: object) -> None:
        self._raised += 1
        raise KeyboardInterrupt

    def _shoot(self) -> None:
        while not self._over.wait(random.choice([0.0, 0.0002, 0.001, 0.003])):
            with self._mutex:
                if self._armed:
                    self._armed = False
                    self._sent += 1
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may hit a callback of somebody else
def test_acquires_interrupted_by_a_signal_leave_no_lock(either: str) -> None:
    """What cancelling is to tasks: at any instant, free or not, answered or not."""
    interrupted = 0
    with holdfast.Client(either) as client, holdfast.Client(either) as other, Aim() as aim:
        kept = client.lock("kept").acquire()
        for number in range(300 * ROUNDS):
            if interrupted >= ROUNDS:
                break
            held = other.lock(f"a{number % 7}").acquire(timeout=PATIENCE) if number % 3 else None
            try:
                with suppress(holdfast.AcquireTimeout):
                    aim.arm()
                    with client.lock(f"a{number % 7}", timeout=0.004):
                        aim.disarm()
                aim.disarm()
            except KeyboardInterrupt:
                interrupted += 1
            if held is not None:
                assert held.release() is True
        for number in range(7):
            assert client.lock(f"a{number}").acquire(timeout=PATIENCE).release() is True
        if kept.lost:  # an interrupt in the middle of an event: reported, and free
            assert client.lock("kept").acquire(timeout=PATIENCE).release() is True
        else:
            assert kept.release() is True
        if either.startswith("postgres"):
            eventually(lambda: advisory(either) == [], "before anything is closed")
    assert interrupted >= ROUNDS
    nothing_left(either)


def test_releases_that_are_cancelled_free_the_lock(either: str) -> None:
    async def main() -> None:
        async with holdfast.AsyncClient(either) as client:
            for pause in [0.0, 0.0, 0.0002, 0.0005] * 5:
                grant = await client.lock("a").acquire(timeout=PATIENCE)
                task = asyncio.create_task(grant.release())
                await asyncio.sleep(pause)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    before = _unlocked_twice()
    asyncio.run(main())
    nothing_left(either)
    assert _unlocked_twice() == before, "each was unlocked once"


def _unlocked_twice() -> int:
    return server().log(10**6).count("you don't own a lock")


def test_a_first_acquire_cancelled_while_it_connects_leaves_nothing(either: str) -> None:
    async def main() -> None:
        for pause in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02):
            async with holdfast.AsyncClient(either) as client:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await client.lock("a").acquire()

    asyncio.run(main())
    nothing_left(either)


def test_thirty_two_tasks_and_thirty_two_threads_share_a_session_each(postgres_url: str) -> None:
    """Uncontended, with cancellations: the others never notice, and two connections are enough."""
    most = [0]

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], len({pid for *_, pid in advisory(postgres_url)}))
            done.wait(0.02)

    def work(client: holdfast.Client, number: int) -> None:
        for turn in range(20):
            with client.lock(f"thread {number} {turn % 2}"):
                pass

    async def work_too(client: holdfast.AsyncClient, number: int) -> None:
        for turn in range(20):
            task = asyncio.create_task(client.lock(f"task {number}").acquire())
            if turn % 5 == number % 5:
                await asyncio.sleep(random.choice([0, 0.0005]))
                task.cancel()
            with suppress(asyncio.CancelledError):
                assert await (await task).release() is True

    async def main() -> None:
        async with holdfast.AsyncClient(postgres_url) as client:
            await asyncio.gather(*(work_too(client, number) for number in range(32)))

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    with holdfast.Client(postgres_url) as client, client.lock("all along"):
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(32)]
        for thread in threads:
            thread.start()
        asyncio.run(main())
        for thread in threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive()
        eventually(lambda: most[0] > 0, "somebody was seen")
    done.set()
    watcher.join()
    assert most[0] <= 2
    nothing_left(postgres_url)


@pytest.mark.parametrize("held_by", ["us", "others"])
def test_waiting_in_line_here_is_first_come_first_served(
    connect: Callable[..., Any], either: str, held_by: str
) -> None:
    client = connect(either)
    client.lock("warm").acquire().release()
    held = (client if held_by == "us" else connect(either)).lock("a").acquire()
    served: list[int] = []

    def wait(number: int) -> None:
        with client.lock("a", timeout=PATIENCE):
            served.append(number)

    threads = []
    for number in range(8):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        eventually(lambda: queued(client) == len(threads), "it stands in line")
    held.release()
    for thread in threads:
        thread.join(PATIENCE)
    assert served == sorted(served)
    assert len(served) == 8


def test_whoever_stands_in_the_servers_line_gets_a_turn_however_long_the_line_is_here(postgres_url: str) -> None:
    """Handing on costs nothing, and so a busy process could keep a lock for ever."""
    before: list[int] = []

    async def work(client: holdfast.AsyncClient) -> None:
        while True:
            async with client.lock("a", timeout=PATIENCE):
                before.append(0)
                await asyncio.sleep(0)

    async def main() -> None:
        async with holdfast.AsyncClient(postgres_url) as client, holdfast.AsyncClient(postgres_url) as other:
            held = await client.lock("a").acquire()
            waiting = asyncio.create_task(other.lock("a").acquire(timeout=PATIENCE))
            await asyncio.to_thread(eventually, lambda: len(advisory(postgres_url)) == 2, "it stands in line")
            working = [asyncio.create_task(work(client)) for _ in range(20)]
            await asyncio.sleep(0)
            await held.release()
            grant = await waiting
            assert len(before) == TURNS
            for each in working:
                each.cancel()
            await grant.release()

    asyncio.run(main())


def test_one_handle_is_entered_by_many_threads(either: str) -> None:
    """A thread that leaves its block must not take another thread's grant along."""
    with holdfast.Client(either) as client, ThreadPoolExecutor(4) as threads:
        handle, counts = client.lock("a", timeout=PATIENCE), [0]

        def work() -> None:
            for _ in range(10 * ROUNDS):
                with handle as grant:
                    grant.check()
                    counts[0] += 1

        for done in [threads.submit(work) for _ in range(4)]:
            done.result()  # the test's own timeout ends it: how long so many turns take, depends on the machine
        assert counts == [40 * ROUNDS]
    nothing_left(either)


def test_who_hands_its_grant_to_another_thread_may_lock_meanwhile(postgres_url: str) -> None:
    """The other thread is in a call for what the first one has acquired; the first one is not in that call."""
    with holdfast.Client(postgres_url) as client, ThreadPoolExecutor(1) as other:
        for _ in range(10 * ROUNDS):
            release = other.submit(client.lock("a", timeout=PATIENCE).acquire().release)
            client.lock("b", timeout=PATIENCE).acquire().release()
            assert release.result(PATIENCE) is True
    nothing_left(postgres_url)


async def test_a_short_timeout_has_a_timer_on_a_new_client_and_after_an_idle_time(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_async, "SWEEP", 600.0)  # it would end the wait as well
    async with holdfast.AsyncClient(either) as client, holdfast.AsyncClient(either) as other:
        held = await other.lock("a").acquire()
        for _ in range(2):
            with pytest.raises(holdfast.AcquireTimeout):
                await asyncio.wait_for(client.lock("a").acquire(timeout=0.1), PATIENCE)
            executor: Any = client._locks.executor  # type: ignore[union-attr]
            executor._alarm_at = 0.0  # as after a long time
        await held.release()

        def closed() -> bool:
            core(client).sweep()
            return not core(client)._polls

        await until(closed, "no timer of a session that was closed is kept")
