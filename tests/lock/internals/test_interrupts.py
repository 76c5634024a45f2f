"""KeyboardInterrupt at every instruction of an acquire and of a release: no lock is left behind, none is lost silently.

Left out is what the interpreter never interrupts: what returns, and the few instructions between the end of a ``with``
block and the call of its ``__exit__``. Nor are the first instructions of ``release`` and ``__exit__``: there the grant
is as if the call had not been made. And ``__del__``, where it ignores what is raised. With asyncio, the interrupt ends
the loop, which then goes on; left out are the two functions in which a task is suspended and resumed: an interrupt
there loses the task, as it does in the same steps of asyncio itself. ``asyncio.run`` cancels a task instead.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dis import get_instructions
from functools import cache, partial
from inspect import CO_COROUTINE
from pathlib import Path
from types import CodeType
from typing import Any
from urllib.parse import urlsplit

import pytest

import holdfast
from holdfast.lock import executor_async
from holdfast.lock.executor_async import AsyncExecutor, LoopExecutor, _Answer, background
from tests import interrupts
from tests.children import PATIENCE, eventually, until
from tests.interrupts import returns
from tests.lock.looks import advisory, core, is_idle, queued, sessions

STRIDE = int(os.environ.get("HOLDFAST_INTERRUPT_STRIDE", "41"))
"""Every so many instructions; 1 for all of them. A prime, so that it does not keep step with a loop."""
LONG_STRIDE, LONGEST_STRIDE = 3 * STRIDE - 2, 6 * STRIDE - 5
"""For attempts that take long, as those that open sessions."""
ENGINE = "/holdfast/database/"
"""The session that is asked for the number of a namespace is not one for locks. After an interrupt at some instructions
of it, its next call waits for ten seconds and fails."""


SPARED = ("/errors.py", "/names.py", "/holdfast/lease/", "/database/statements.py")
"""The keeper of leases has a thread of its own."""
FIRST = ("__exit__", "release", "__aexit__")
SWITCHES = (AsyncExecutor._resume.__code__, _Answer.add_done_callback.__code__)
"""Where a task is resumed and suspended."""


class Interrupt(interrupts.Interrupt):
    def __init__(self, at: int, *without: str) -> None:
        super().__init__(at, "/src/holdfast/", without=(*SPARED, *without))

    def spares(self, code: CodeType, place: int) -> bool:
        start = 8 if code.co_flags & CO_COROUTINE else 4
        is_first = code.co_name in FIRST and place < start
        return returns(code, place) or is_first or code in SWITCHES or place in ends_of_with_blocks(code)


@cache
def ends_of_with_blocks(code: CodeType) -> frozenset[int]:
    """Three times None for ``__exit__``, and its call; before them, a value that the block returns is put aside. The
    interpreter handles signals only after that."""
    instructions = list(get_instructions(code))
    places: set[int] = set()
    for number in range(len(instructions) - 4):
        calling = instructions[number : number + 5]
        if all((each.opname, each.argval) == ("LOAD_CONST", None) for each in calling[:3]):
            names = [each.opname for each in calling[3:]]
            if "CALL" in names:
                places.update(each.offset for each in calling[: 4 + names.index("CALL")])
                if number and instructions[number - 1].opname == "SWAP":
                    places.add(instructions[number - 1].offset)
    return frozenset(places)


class Others:
    """Other grants of the client: each is intact after an interrupt, or reports its loss, and its lock is free."""

    def __init__(self, acquire: Callable[..., Any], names: Iterable[str]) -> None:
        self._acquire = acquire
        self._reports: list[Any] = []
        self.grants = [acquire(name, self._reports.append) for name in names]

    def check(self, other: holdfast.Client, where: object) -> None:
        for number, grant in enumerate(self.grants):
            if grant.lost:
                eventually(partial(self._reports.__contains__, grant), f"its loss is reported, {where}")
                other.lock(grant.name).acquire(timeout=PATIENCE).release()
                self.grants[number] = self._acquire(grant.name, self._reports.append)
            else:
                assert other.lock(grant.name).try_acquire() is None, f"{where}: it is lost silently"


def sweep(attempt: Callable[[Interrupt], Any], least: int, stride: int = STRIDE, *without: str) -> Iterator[str]:
    """Interrupt ``attempt`` further and further in, until it gets through; every place is one to be checked."""
    at = 0
    while True:
        interrupt = Interrupt(at, *without)
        grant = None
        with suppress(KeyboardInterrupt):
            grant = attempt(interrupt)
        if not interrupt.raised:
            assert at > least, f"only {at} instructions: what has been interrupted?"
            if grant is not None:
                grant.release()
            return
        assert grant is None
        yield f"at {at}, {interrupt.where}"
        at += stride


@pytest.fixture
def client(either: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(either) as client:
        client.lock("warm").acquire().release()
        eventually(lambda: is_idle(client), "there is a session to use")
        yield client


def is_free(client: holdfast.Client, other: holdfast.Client, name: Any, where: str) -> None:
    """For another client, and for the next thread of this one."""
    try:
        other.lock(name).acquire(timeout=PATIENCE).release()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: client.lock(name).acquire(timeout=PATIENCE).release()).result(2 * PATIENCE)
    except holdfast.AcquireTimeout as error:
        raise AssertionError(f"{where}: it is still locked") from error


@pytest.mark.parametrize("how", ["acquire", "try_acquire", "with", "or_skip"])
def test_an_acquire_interrupted_anywhere_leaves_no_lock(client: holdfast.Client, either: str, how: str) -> None:
    def attempt(interrupt: Interrupt) -> Any:
        lock = client.lock("a")
        with interrupt:
            if how in ("acquire", "try_acquire"):
                return getattr(lock, how)()
            with lock if how == "with" else lock.or_skip():
                pass
        return None

    with holdfast.Client(either) as other:
        others = Others(lambda name, report: client.lock(name, on_lost=report).acquire(timeout=PATIENCE), "xyz")
        for where in sweep(attempt, 200):
            is_free(client, other, "a", where)
            others.check(other, where)
        assert [grant.release() for grant in others.grants] == [True] * 3
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


def test_a_release_interrupted_anywhere_frees_the_lock(client: holdfast.Client, either: str) -> None:
    def attempt(interrupt: Interrupt) -> None:
        with interrupt:
            grants[-1].release()

    with holdfast.Client(either) as other:
        grants = [client.lock("a").acquire()]
        others = Others(lambda name, report: client.lock(name, on_lost=report).acquire(timeout=PATIENCE), "xyz")
        for where in sweep(attempt, 50):
            is_free(client, other, "a", where)
            others.check(other, where)
            grants.append(client.lock("a").acquire(timeout=PATIENCE))
        is_free(client, other, "a", "at the end")


def test_a_waiting_acquire_interrupted_anywhere_leaves_no_lock_and_its_followers_finish(
    client: holdfast.Client, either: str
) -> None:
    """Somebody else has it, or lets it go this very moment; and another thread of ours stands in line behind."""
    with holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:

        def follow() -> bool:
            grant = client.lock("a").acquire(timeout=PATIENCE)
            return grant.release() or grant.lost

        def attempt(interrupt: Interrupt) -> Any:
            holder = other.lock("a").acquire(timeout=PATIENCE)
            freeing = threading.Timer(0.002 if interrupt.at % 2 else 0.03, holder.release)
            followers.append(pool.submit(follow))
            freeing.start()
            try:
                with interrupt:
                    return client.lock("a").acquire(timeout=0.02)
            except holdfast.AcquireTimeout:
                return None
            finally:
                freeing.join()

        followers: list[Any] = []
        for where in sweep(attempt, 100):
            with suppress(holdfast.EngineError):  # the interrupt has ended its wait, too
                assert followers[-1].result(2 * PATIENCE) is True
            is_free(client, other, "a", where)
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


@pytest.fixture
def stop_background(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Stops the background thread, so that the next lock starts it, as the first one of a process does. The thread that
    other tests have started is left alone."""
    monkeypatch.setattr(background, "_running", {})

    def stop() -> None:
        while background._running:
            _, (loop, thread) = background._running.popitem()
            loop.call_soon_threadsafe(loop.stop)
            thread.join(PATIENCE)
            loop.close()

    yield stop
    stop()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the loop of a thread that was not started
def test_the_first_acquire_of_a_client_interrupted_anywhere_leaves_no_lock_and_no_session(
    either: str, stop_background: Callable[[], None]
) -> None:
    """It makes the executor, starts the background thread, and has the first session opened."""
    clients: list[holdfast.Client] = []

    def attempt(interrupt: Interrupt) -> Any:
        stop_background()
        clients.append(holdfast.Client(either))
        with interrupt:
            return clients[-1].lock("a").acquire(timeout=PATIENCE)

    for where in sweep(attempt, 200, LONG_STRIDE):
        with clients.pop() as client, holdfast.Client(either) as other:
            is_free(client, other, "a", where)
        eventually(lambda: not sessions(either), f"{where}: no session is left")
    clients.pop().close()
    eventually(lambda: not sessions(either), "no session is left")


def test_the_first_lock_in_a_namespace_interrupted_anywhere_leaves_no_lock(
    client: holdfast.Client, either: str
) -> None:
    """The database is asked for its number first."""
    names: list[tuple[str, int]] = []

    def attempt(interrupt: Interrupt) -> Any:
        names.append((f"namespace {interrupt.at}", 7))
        with interrupt:
            return client.lock(names[-1]).acquire(timeout=PATIENCE)

    with holdfast.Client(either) as other:
        client.lock(("warm", 7)).acquire().release()
        others = Others(lambda name, report: client.lock(name, on_lost=report).acquire(timeout=PATIENCE), "xy")
        for where in sweep(attempt, 200, STRIDE, ENGINE):
            is_free(client, other, names[-1], where)
            with client.lock(names[-1], timeout=PATIENCE):
                assert other.lock(names[-1]).try_acquire() is None, f"{where}: its number is another one"
            others.check(other, where)
        assert [grant.release() for grant in others.grants] == [True] * 2
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


@pytest.mark.parametrize("beside", ["nobody", "a thread", "a client"])
def test_a_shared_lock_interrupted_anywhere_leaves_no_reader(client: holdfast.Client, either: str, beside: str) -> None:
    """Acquired and released: as the only reader, as one that joins and leaves another reader of this client, and beside
    a reader of another client. The other reader is intact, or its loss is reported."""
    readers: list[Any] = []
    reports: list[Any] = []

    def attempt(interrupt: Interrupt) -> None:
        if beside != "nobody":
            lock = (client if beside == "a thread" else other).lock("a", shared=True, on_lost=reports.append)
            readers.append(threads.submit(lock.acquire, timeout=PATIENCE).result(2 * PATIENCE))
        with interrupt:
            client.lock("a", shared=True).acquire(timeout=PATIENCE).release()

    def check(where: str) -> None:
        client.lock("warm").acquire(timeout=PATIENCE).release()  # after an interrupted event, this waits for the repair
        if readers and (reader := readers.pop()).lost:
            assert beside == "a thread", f"{where}: a reader of another client is lost"
            eventually(partial(reports.__contains__, reader), f"its loss is reported, {where}")
        elif beside != "nobody":
            assert stranger.lock("a").try_acquire() is None, f"{where}: it is lost silently"
            assert reader.release() is True, where
        is_free(client, stranger, "a", where)

    with holdfast.Client(either) as other, holdfast.Client(either) as stranger, ThreadPoolExecutor(1) as threads:
        for where in sweep(attempt, 200):
            check(where)
        check("at the end")
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


@pytest.mark.parametrize("held_by", ["a thread", "a client"])
def test_a_writer_interrupted_anywhere_behind_a_reader_leaves_no_lock_and_its_followers_finish(
    client: holdfast.Client, either: str, held_by: str
) -> None:
    """The reader releases when the writer waits for it, and another reader waits behind the writer."""
    followers: list[Any] = []

    def follow() -> bool:
        grant = client.lock("a", shared=True).acquire(timeout=PATIENCE)
        return grant.release() or grant.lost

    def stand_behind(reader: Any, over: threading.Event) -> None:
        for count in (1, 2):
            while queued(client) < count and not over.wait(0.0005):
                pass
            if count == 1:
                followers.append(threads.submit(follow))
        reader.release()

    def attempt(interrupt: Interrupt) -> Any:
        lock = (client if held_by == "a thread" else other).lock("a", shared=True)
        reader = holder.submit(lock.acquire, timeout=PATIENCE).result(2 * PATIENCE)
        over = threading.Event()
        behind = threads.submit(stand_behind, reader, over)
        try:
            with interrupt:
                return client.lock("a").acquire(timeout=PATIENCE)
        finally:
            over.set()
            behind.result(2 * PATIENCE)

    with holdfast.Client(either) as other, ThreadPoolExecutor(1) as holder, ThreadPoolExecutor(2) as threads:
        for where in sweep(attempt, 100):
            with suppress(holdfast.EngineError):  # the interrupt has ended its wait, too
                assert followers[-1].result(2 * PATIENCE) is True, where
            is_free(client, other, "a", where)
        assert followers[-1].result(2 * PATIENCE) is True
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("how", ["with", "or_skip", "acquire"])
def test_an_event_loop_interrupted_anywhere_leaves_no_lock_and_loses_none_silently(
    either: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it in the task, or in what hears the answer: the task ends, and the session serves whoever comes next."""
    monkeypatch.setattr(executor_async, "SWEEP", 0.05)  # it finds what an interrupt has left
    loop = asyncio.new_event_loop()

    def run(work: Any) -> Any:
        return loop.run_until_complete(asyncio.wait_for(work, 2 * PATIENCE))

    async def pair(name: str) -> None:
        await (await client.lock(name).acquire(timeout=PATIENCE)).release()

    async def attempt() -> None:
        if how == "acquire":
            await pair("a")
            return
        lock = client.lock("a")
        async with lock if how == "with" else lock.or_skip():
            pass

    async def is_over(task: Any) -> None:
        await asyncio.wait([task], timeout=PATIENCE)
        assert task.done(), f"at {at}, {interrupt.where}: it has been forgotten"

    client = holdfast.AsyncClient(either)
    at = 0
    with holdfast.Client(either) as other:
        run(pair("warm"))
        kept = Others(lambda name, report: run(client.lock(name, on_lost=report).acquire(timeout=PATIENCE)), ["kept"])
        while True:
            task, interrupt = loop.create_task(attempt()), Interrupt(at)
            with suppress(KeyboardInterrupt), interrupt:
                loop.run_until_complete(asyncio.wait([task]))
            run(is_over(task))
            if not task.cancelled():
                task.exception()
            del task  # and with it a block that was not exited
            gc.collect()
            if not interrupt.raised:
                assert at > 200
                break
            where = f"at {at}, {interrupt.where}"
            try:
                run(asyncio.to_thread(lambda: other.lock("a").acquire(timeout=PATIENCE).release()))
            except holdfast.AcquireTimeout as error:
                raise AssertionError(f"{where}: it is still locked") from error
            run(pair("a"))
            run(asyncio.sleep(0))
            kept.check(other, where)
            at += STRIDE
        assert run(kept.grants[0].release()) is True
        run(client.close())
    loop.close()
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


class Loop:
    """An event loop that goes on after an interrupt."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 2 * PATIENCE))

    def interrupt(
        self, at: int, client: holdfast.AsyncClient, *works: Coroutine[Any, Any, None], without: tuple[str, ...] = ()
    ) -> Interrupt:
        """Run tasks, and interrupt the loop, be it in a task or in what receives an answer. Then it goes on until all
        tasks have ended. At most one ends with the interrupt; others may end with an error that names it, or that says
        that the database did not answer in time."""
        tasks, interrupt = [self._loop.create_task(work) for work in works], Interrupt(at, *without)
        with suppress(KeyboardInterrupt), interrupt:
            self._loop.run_until_complete(asyncio.wait(tasks))
        with suppress(RuntimeError):  # all had ended when it came, and the callback that stops the loop was left
            self._loop.run_until_complete(asyncio.sleep(0))
        where = f"at {at}, {interrupt.where}"
        try:
            self.run(self._finish(client, tasks))
        except TimeoutError as error:
            raise AssertionError(f"{where}: a task is forgotten") from error
        ends = [task.exception() for task in tasks if not task.cancelled()]
        errors = [end for end in ends if end is not None]
        others = [error for error in errors if not isinstance(error, KeyboardInterrupt)]
        assert len(errors) - len(others) <= 1, f"{where}: {errors}"
        assert all("interrupt" in str(error) or "in time" in str(error) for error in others), f"{where}: {errors}"
        return interrupt

    async def _finish(self, client: holdfast.AsyncClient, tasks: list[asyncio.Task[None]]) -> None:
        """Sweep before the timer does, because the sweep finds what an interrupt has left: a few times, and then as
        often as it takes until sessions that did not answer, or were not opened, are given up."""
        for count in (1, 1, 1, int(2 * executor_async.CALL_TIMEOUT / executor_async.SWEEP) + 2):
            if client._locks is not None and client._locks.executor._core is not None:
                for _ in range(count):
                    core(client).sweep()
            if not (await asyncio.wait(tasks, timeout=0.02))[1]:
                return
        await asyncio.wait(tasks)

    def is_free(self, client: holdfast.AsyncClient, other: holdfast.Client, name: Any, where: str) -> None:
        """For another client, and for the next task of this one."""
        gc.collect()  # a grant or a block of a task that was interrupted
        try:
            self.run(asyncio.to_thread(lambda: other.lock(name).acquire(timeout=PATIENCE).release()))
            self.run(pair(client.lock(name)))
        except holdfast.AcquireTimeout as error:
            raise AssertionError(f"{where}: it is still locked") from error
        self.run(asyncio.sleep(0))

    def close(self) -> None:
        self._loop.close()


async def pair(lock: holdfast.AsyncLock) -> None:
    await (await lock.acquire(timeout=PATIENCE)).release()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the loop of a thread that was not started
def test_the_first_acquire_of_a_loop_interrupted_anywhere_leaves_no_lock_and_no_session(
    either: str, loop: Loop, stop_background: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the executor, begins to open the first session, and starts the sweep, without which a timeout of more
    than a second never ends."""
    swept: list[LoopExecutor] = []
    monkeypatch.setattr(executor_async, "_sweep", swept.append)
    monkeypatch.setattr(executor_async, "SWEEP", 0.05)

    async def attempt(client: holdfast.AsyncClient) -> None:
        await pair(client.lock("a"))

    at = 0
    while True:
        stop_background()
        client = holdfast.AsyncClient(either)
        interrupt = loop.interrupt(at, client, attempt(client))
        where = f"at {at}, {interrupt.where}"
        with holdfast.Client(either) as other:
            loop.is_free(client, other, "a", where)
        loop.run(until(partial(swept.__contains__, core(client)), f"{where}: the sweep begins"))
        loop.run(client.close())
        if "_file:" in interrupt.where:
            close_lost_descriptor(either)
        eventually(lambda: not sessions(either), f"{where}: no session is left")
        if not interrupt.raised:
            break
        at += LONGEST_STRIDE
    assert at > 300


def close_lost_descriptor(url: str) -> None:
    """Of a lock file: one that is open and not stored yet is lost with the interrupt. Nothing is locked there."""
    file = f"{os.path.realpath(urlsplit(url).path)}.holdfast-locks"
    for descriptor in Path("/proc/self/fd").iterdir():
        if os.path.realpath(descriptor) == file:
            os.close(int(descriptor.name))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_loop_interrupted_anywhere_in_the_first_use_of_a_namespace_leaves_no_lock(either: str, loop: Loop) -> None:
    client, at = holdfast.AsyncClient(either), 0

    async def attempt(name: tuple[str, int]) -> None:
        await pair(client.lock(name))

    with holdfast.Client(either) as other:
        loop.run(attempt(("warm", 7)))
        kept = Others(
            lambda name, report: loop.run(client.lock(name, on_lost=report).acquire(timeout=PATIENCE)), ["kept"]
        )
        while True:
            name = (f"namespace {at}", 7)
            interrupt = loop.interrupt(at, client, attempt(name), without=(ENGINE,))
            where = f"at {at}, {interrupt.where}"
            loop.is_free(client, other, name, where)
            kept.check(other, where)
            if not interrupt.raised:
                break
            at += LONG_STRIDE
        assert at > 400
        assert loop.run(kept.grants[0].release()) is True
    loop.run(client.close())
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("beside", ["nobody", "a task", "a client"])
def test_a_loop_interrupted_anywhere_in_a_shared_lock_leaves_no_reader(either: str, loop: Loop, beside: str) -> None:
    """As for threads."""
    client, at = holdfast.AsyncClient(either), 0

    async def attempt() -> None:
        await pair(client.lock("a", shared=True))

    with holdfast.Client(either) as other:
        loop.run(pair(client.lock("warm")))
        while True:
            reports: list[Any] = []
            reader: Any = None
            if beside == "a task":
                lock = client.lock("a", shared=True, on_lost=reports.append)
                reader = loop.run(lock.acquire(timeout=PATIENCE))
            elif beside == "a client":
                reader = other.lock("a", shared=True).acquire(timeout=PATIENCE)
            interrupt = loop.interrupt(at, client, attempt())
            where = f"at {at}, {interrupt.where}"
            gc.collect()
            loop.run(pair(client.lock("warm")))  # after an interrupted event, this begins with the repair
            if beside == "a task" and reader.lost:
                loop.run(until(partial(reports.__contains__, reader), f"its loss is reported, {where}"))
            elif beside == "a task":
                assert other.lock("a").try_acquire() is None, f"{where}: it is lost silently"
                assert loop.run(reader.release()) is True, where
            elif beside == "a client":
                assert reader.release() is True, where
            loop.is_free(client, other, "a", where)
            if not interrupt.raised:
                break
            at += LONG_STRIDE
        assert at > 200
    loop.run(client.close())
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("held_by", ["a task", "a client"])
def test_a_loop_interrupted_anywhere_while_a_writer_waits_behind_a_reader_leaves_no_lock(
    either: str, loop: Loop, held_by: str
) -> None:
    """The reader releases when the writer waits for it, and another reader waits behind the writer."""
    client, at = holdfast.AsyncClient(either), 0
    order: list[str] = []

    async def write() -> None:
        try:
            async with client.lock("a", timeout=PATIENCE):
                order.append("writer")
        finally:
            over.set()

    async def follow() -> None:
        try:
            await behind(1)
            async with client.lock("a", shared=True, timeout=PATIENCE):
                order.append("reader")
        finally:
            over.set()

    async def behind(count: int) -> None:
        """Until an interrupt has ended one of them, at most."""
        while queued(client) < count and not over.is_set():  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0.001)

    async def leave(reader: Any) -> None:
        await behind(2)
        released = reader.release()
        if held_by == "a task":
            await released

    with holdfast.Client(either) as other:
        loop.run(pair(client.lock("warm")))
        while True:
            over = threading.Event()
            if held_by == "a task":
                reader: Any = loop.run(client.lock("a", shared=True).acquire(timeout=PATIENCE))
            else:
                reader = other.lock("a", shared=True).acquire(timeout=PATIENCE)
            order.clear()
            interrupt = loop.interrupt(at, client, write(), follow(), leave(reader))
            where = f"at {at}, {interrupt.where}"
            del reader
            loop.is_free(client, other, "a", where)
            if not interrupt.raised:
                assert order == ["writer", "reader"]
                break
            at += LONGEST_STRIDE
        assert at > 300
    loop.run(client.close())
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


@pytest.mark.parametrize("how", ["with", "acquire"])
def test_a_wait_that_is_cancelled_and_then_interrupted_anywhere_leaves_no_lock(postgres_url: str, how: str) -> None:
    """As by a second Ctrl-C: what the first has begun to put right, it must not leave half done."""
    loop, client = asyncio.new_event_loop(), holdfast.AsyncClient(postgres_url)

    def run(work: Any) -> Any:
        return loop.run_until_complete(asyncio.wait_for(work, 2 * PATIENCE))

    async def attempt() -> None:
        if how == "acquire":
            await client.lock("a").acquire(timeout=600)
            return
        async with client.lock("a", timeout=600):
            pass

    async def in_line() -> asyncio.Task[None]:
        task = asyncio.create_task(attempt())
        await until(lambda: queued(client), "it stands in line")
        return task

    with holdfast.Client(postgres_url) as other:
        at = 0
        while True:
            kept = run(client.lock("a").acquire(timeout=PATIENCE))
            pool = core(client).pool
            task, interrupt = run(in_line()), Interrupt(at)
            task.cancel()
            with suppress(KeyboardInterrupt), interrupt:
                loop.run_until_complete(asyncio.wait([task]))
            run(asyncio.wait([task]))
            assert task.cancelled() or isinstance(task.exception(), KeyboardInterrupt)
            del task  # and with it a grant that was not abandoned
            gc.collect()
            run(asyncio.sleep(0))
            core(client).recover()
            assert run(kept.release()) is True or core(client).pool is not pool
            try:
                run(asyncio.to_thread(lambda: other.lock("a").acquire(timeout=PATIENCE).release()))
            except holdfast.AcquireTimeout as error:
                raise AssertionError(f"at {at}, {interrupt.where}: it is still locked") from error
            if not interrupt.raised:
                break
            at += max(1, STRIDE // 3)
        assert at > 30
        run(client.close())
    loop.close()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_batch_interrupted_anywhere_is_finished_and_loses_nothing_silently(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tasks ask at once, two of them for one key, and one for a key that another client has: whoever the interrupt
    hits, be it in the task that asks or in what hears the answers, all others have theirs when the loop goes on, or an
    error that tells of the interrupt."""
    monkeypatch.setattr(executor_async, "SWEEP", 0.05)
    loop, client = asyncio.new_event_loop(), holdfast.AsyncClient(either)
    wrong: list[Any] = []
    loop.set_exception_handler(lambda _, context: wrong.append(context))

    async def attempt(name: str) -> None:
        async with client.lock(name, timeout=PATIENCE):
            await asyncio.sleep(0)

    async def all_of(names: Iterable[str]) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(attempt(name)) for name in names]

    def run(work: Any) -> Any:
        return loop.run_until_complete(asyncio.wait_for(work, 3 * PATIENCE))

    def free(other: holdfast.Client, name: str) -> None:
        other.lock(name).acquire(timeout=PATIENCE).release()

    at = 0
    with holdfast.Client(either) as other:
        run(attempt("warm"))
        kept = Others(lambda name, report: run(client.lock(name, on_lost=report).acquire(timeout=PATIENCE)), ["kept"])
        while True:
            taken, interrupt = other.lock("a").acquire(timeout=PATIENCE), Interrupt(at)
            tasks = run(all_of("abbcd"))
            loop.call_later(0.002, taken.release)
            with suppress(KeyboardInterrupt), interrupt:
                loop.run_until_complete(asyncio.wait(tasks))
            with suppress(RuntimeError):  # all were done when it came, and what then stops the loop was still to run
                loop.run_until_complete(asyncio.sleep(0))
            run(asyncio.wait(tasks, timeout=2 * PATIENCE))
            assert all(task.done() for task in tasks), f"at {at}, {interrupt.where}: one has been forgotten"
            failed = [error for task in tasks if (error := task.exception()) is not None]
            interrupted = [error for error in failed if isinstance(error, KeyboardInterrupt)]
            assert len(interrupted) <= 1, f"at {at}, {interrupt.where}: {failed}"
            assert all("interrupt" in str(error) for error in failed if error not in interrupted), (
                f"at {at}, {interrupt.where}: {failed}"
            )
            del tasks, failed, interrupted  # and with them a block that was not exited
            gc.collect()
            assert wrong == [], f"at {at}, {interrupt.where}"
            taken.release()
            if not interrupt.raised:
                break
            try:
                for name in "abcd":
                    run(asyncio.to_thread(free, other, name))
                    run(attempt(name))
            except holdfast.AcquireTimeout as error:
                raise AssertionError(f"at {at}, {interrupt.where}: one is still locked") from error
            run(asyncio.sleep(0))
            kept.check(other, f"at {at}, {interrupt.where}")
            at += 2 * STRIDE - 1
        assert at > 500
        assert run(kept.grants[0].release()) is True
        run(client.close())
    loop.close()
    if either.startswith("postgres"):
        eventually(lambda: not advisory(either), "nothing is left")


def test_an_interrupt_before_a_session_arrives_forgets_nobody(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it came with the very first instruction, where nothing can be caught yet. It counts as a session that was
    not opened in time."""
    loop, client, arrive = asyncio.new_event_loop(), holdfast.AsyncClient(either), LoopExecutor._arrive
    interrupted: list[object] = []

    def arrives(executor: LoopExecutor, *brought: Any) -> None:
        if not interrupted:
            interrupted.append(brought)
            raise KeyboardInterrupt
        arrive(executor, *brought)

    async def attempt() -> None:
        with pytest.raises(holdfast.Unanswered, match="in time"):
            await client.lock("a", timeout=PATIENCE).acquire()
        hurried.undo()
        async with client.lock("a", timeout=PATIENCE) as grant:
            grant.check()
        await client.close()

    monkeypatch.setattr(LoopExecutor, "_arrive", arrives)
    hurried = pytest.MonkeyPatch()
    hurried.setattr(executor_async, "SWEEP", 0.02)
    hurried.setattr(executor_async, "CALL_TIMEOUT", 0.1)
    task = loop.create_task(attempt())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    loop.run_until_complete(task)
    loop.close()


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_a_task_that_ends_the_loop_takes_nobody_else_along(postgres_url: str, ending: type[BaseException]) -> None:
    """Several are answered together, and the first one, which runs at once, raises: all others have their answers."""
    loop, client = asyncio.new_event_loop(), holdfast.AsyncClient(postgres_url)
    done: list[int] = []

    async def work(number: int) -> None:
        async with client.lock(f"a{number}", timeout=PATIENCE):
            if not number:
                raise ending
        done.append(number)

    async def begin() -> list[Any]:
        await (await client.lock("warm").acquire()).release()
        kept = asyncio.create_task(client.lock("kept").acquire())
        await asyncio.sleep(0)
        return [kept, *(asyncio.create_task(work(number)) for number in range(5))]

    kept, *tasks = loop.run_until_complete(begin())
    with pytest.raises(ending):
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(asyncio.wait(tasks, timeout=PATIENCE))
    assert sorted(done) == [1, 2, 3, 4]
    assert tasks[0].exception() is not None
    assert not kept.result().lost
    with holdfast.Client(postgres_url) as other:
        for number in range(5):
            assert other.lock(f"a{number}").acquire(timeout=PATIENCE).release() is True
    loop.run_until_complete(client.close())
    loop.close()
