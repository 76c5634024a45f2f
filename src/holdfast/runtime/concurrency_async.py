"""What the asyncio flavour does with tasks: the same names as in ``concurrency``."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from time import thread_time
from types import TracebackType
from typing import Any, Self, TypeVar

from holdfast.errors import HoldfastError
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import Notices

T = TypeVar("T")

BLOCKS = False
"""Whether a waiter blocks its thread."""

sleep = asyncio.sleep
AsyncMutex = asyncio.Lock
AsyncStopEvent = asyncio.Event


def current_id() -> int:
    """Identifies the caller: its task. 0 outside a loop, where the garbage collector may end a block."""
    # private: asyncio._get_running_loop, tested in tests/test_private_names.py
    return id(asyncio.current_task()) if asyncio._get_running_loop() is not None else 0


# Functions of the user


async def maybe_await(value: T | Awaitable[T]) -> T:
    """The result of a user's function, which may be plain or async."""
    if inspect.isawaitable(value):
        return await value
    return value


async def call_blocking(function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function that may block: a plain one is called in a thread.

    A cancellation waits for the thread: until it has ended, the caller must not release what it holds."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    thread = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await maybe_await(await asyncio.shield(thread))
    finally:
        await asyncio.wait([thread])


def check_function(function: Callable[..., Any]) -> None:
    """For a decorator: the function must do its work when it is awaited."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is not a coroutine function: decorate an async def, or use Client")


def check_callable(function: Callable[..., Any], what: str) -> None:
    """For a callback: plain or async, but not a generator."""
    if not callable(function):
        raise TypeError(f"{what} must be a function, not {function!r:.80}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{what} must be a function, not a generator function: {function!r:.80}")


def check_async_callable(function: Callable[..., Any], what: str) -> None:
    """For a callback that asks another service: it must not block the loop."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{what} must be an async def, not {function!r:.80}: or use Client")


def check_work(work: Callable[..., Any]) -> None:
    if not inspect.iscoroutinefunction(work) and not inspect.iscoroutinefunction(getattr(work, "__call__", None)):  # noqa: B004
        raise TypeError(f"work must be an async def that takes the term, not {work!r}")


CALL_CLOCK, BLOCK_CLOCK = "task", "loop"
"""Whose CPU time is counted for a call, and for an ``async with`` block, whose steps cannot be told from those of other
tasks on the loop."""


async def count_cpu(counter: Any, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> Any:
    """Await ``function(…)``; ``counter.cpu_seconds`` is the CPU time of its own steps."""
    return await _CountedSteps(function(*args, **kwargs), counter)


class _CountedSteps:
    """Awaits a coroutine and counts the CPU time of its own steps: neither what else the loop runs in between, nor the
    tasks and threads that it starts."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], counter: Any) -> None:
        self._coroutine, self._counter = coroutine, counter

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, value, seconds = self._coroutine.__await__(), None, 0.0
        resume: Callable[[Any], Any] = steps.send
        while True:
            began = thread_time()
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                seconds += thread_time() - began
                self._counter.cpu_seconds = seconds
            try:
                value, resume = (yield awaited), steps.send
            except BaseException as error:
                value, resume = error, steps.throw


# Waiting


async def wait_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, at most ``seconds``; whether it is."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


class AsyncWakeup:
    """Set by any thread, waited for by one task. A wait clears it. Belongs to the loop of the first wait."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._was_set = False

    def set(self) -> None:
        self._was_set = True  # before the look at the loop: a wait that begins at this moment sees one or the other
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed, so there is no waiter
                self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout: float) -> bool:
        """True when it was set. Not with ``wait_for``: in Python 3.11 that forgets a cancellation that comes at the
        moment it is set."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            if self._was_set:
                return True
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class AsyncLoopWatchdog:
    """Shows another thread whether the event loop turns in which ``begin`` was called."""

    RECENT = 0.25
    """Seconds for which a turn counts."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turned_at = -math.inf
        self._is_asked = False

    def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turned_at, self._is_asked = -math.inf, False

    def turns(self, notify: Callable[[], object]) -> bool:
        """Whether the loop has turned a moment ago. If not, it is asked to, and calls ``notify`` when it does."""
        if now() - self._turned_at < self.RECENT:
            return True
        if self._loop is not None and not self._is_asked:
            self._is_asked = True
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._turn, notify)
        return False

    def _turn(self, notify: Callable[[], object]) -> None:
        self._turned_at, self._is_asked = now(), False
        notify()


class AsyncKeyedLock:
    """One task at a time for each key."""

    def __init__(self) -> None:
        self._locks: dict[str, list[Any]] = {}

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        entry = self._locks.setdefault(key, [asyncio.Lock(), 0])
        entry[1] += 1
        try:
            async with entry[0]:
                yield
        finally:
            entry[1] -= 1
            if not entry[1]:
                del self._locks[key]


# The owner of a client, and the block under a grant


class AsyncOwner:
    """What a client belongs to: the event loop of its first use."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Future[Any]] = set()

    def check(self) -> None:
        """RuntimeError on another loop than that of the first use."""
        loop = asyncio.get_running_loop()
        if self.loop is None:
            self.loop = loop
        elif self.loop is not loop:
            raise RuntimeError(
                f"this AsyncClient belongs to {self.loop!r} and was used from {loop!r}: make one per event loop"
            )

    def alive(self) -> bool:
        return self.loop is None or not self.loop.is_closed()

    def call(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` on the loop; called in the background thread."""
        if self.loop is not None:
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(callback)

    def notify(self, callback: Callable[[Any], object], grant: Any) -> None:
        """Call the user's ``callback(grant)`` on the loop, and await it if it is async."""

        def run() -> None:
            result = callback(grant)
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(result)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        self.call(run)


class AsyncCancelScope:
    """The block under a grant, cancelled when the grant is lost. Works like ``asyncio.timeout``: our own cancellation
    becomes the error it stands for, and one from outside stays a cancellation."""

    cancels = True

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before = 0
        self._pending: HoldfastError | None = None
        self._cause: HoldfastError | None = None

    def enter(self) -> None:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if self._task is None:
            raise RuntimeError("on_lost='cancel' needs a task to cancel")
        self._before = self._task.cancelling()
        if self._pending is not None:  # lost before the block began
            self._loop.call_soon(self._cancel, self._pending)

    def cancel(self, error: HoldfastError) -> None:
        """From any thread."""
        self._pending = error
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel, error)

    def _cancel(self, error: HoldfastError) -> None:
        if self._task is not None and self._cause is None:
            self._cause = error
            self._task.cancel(str(error))

    def exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._cause is None or task is None:
            return
        if task.uncancel() <= self._before and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._cause from error


# Work under a lease


class AsyncWorker:
    """Runs ``work(term)`` in a task of its own, which is cancelled when it has to stop."""

    def __init__(self, work: Callable[[Any], Coroutine[Any, Any, Any]], term: Any, on_end: Callable[[], None]) -> None:
        self._work, self._term, self._on_end = work, term, on_end
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        name = f"holdfast-term-{self._term.name}"
        self._task = asyncio.get_running_loop().create_task(self._work(self._term), name=name)
        self._task.add_done_callback(lambda _: self._on_end())

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs."""
        return self._task is None or self._task.done()

    @property
    def error(self) -> BaseException | None:
        if self._task is None:
            return None
        return asyncio.CancelledError() if self._task.cancelled() else self._task.exception()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


# Callbacks that may take long, or never return


class AsyncNotifier:
    """Calls a user's function once per notice, one after the other, in a task of its own."""

    def __init__(self, function: Callable[[Any], object], on_error: Callable[[Exception], None]) -> None:
        self._function, self._on_error = function, on_error
        self._notices = Notices(on_error)
        self._task: asyncio.Task[None] | None = None

    def notify(self, notice: object) -> bool:
        """False when there are so many notices that the oldest was dropped."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="holdfast-notifier")
        return self._notices.add(notice)

    async def finish(self, timeout: float) -> None:
        """Wait for the notices that are left, then drop them."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout)
            self._task.cancel()
            self._notices.clear()

    async def _run(self) -> None:
        while self._notices:
            try:
                await maybe_await(self._function(self._notices.popleft()))
            except Exception as error:
                self._on_error(error)


class AsyncBoundedCalls:
    """Calls functions that may never return, and cancels them after a bounded time. Unlike the blocking one it leaves
    nothing behind, so it needs no pause."""

    async def call(
        self, _stopping: Any, what: str, seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call ``function``, await it if it is async, and return its result. TimeoutError after ``seconds``."""
        try:
            async with asyncio.timeout(seconds) as limit:
                with reject_foreign_cancel():
                    return await maybe_await(function(*arguments))
        except TimeoutError:
            if not limit.expired():
                raise
        raise TimeoutError(f"{what} has not returned within {seconds:g} s, and may still be running")


# Several things at once


class AsyncTaskPool:
    """Runs at most ``size`` coroutines at a time, which must not raise. Leaving the block cancels them: call
    ``finish`` before to wait for them, as threads are."""

    def __init__(self, size: int) -> None:
        self._room = asyncio.Semaphore(size)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Wait for everything that was spawned."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def spawn(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> bool:
        """Start ``function`` as soon as there is room."""
        await self._room.acquire()

        async def run() -> None:
            try:
                await function(*arguments)
            finally:
                self._room.release()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return True

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "in a task pool", "exception": error})


class AsyncCompanion:
    """A coroutine that runs beside a block, and is cancelled at its end."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._function(*self._arguments))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error


@contextmanager
def reject_foreign_cancel() -> Iterator[None]:
    """Raise RuntimeError for a CancelledError that was not requested of this task: the called function was cancelled
    from within, for example when its channel was closed. Let through, it would end our task silently."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the called function was cancelled, and not by holdfast") from error
