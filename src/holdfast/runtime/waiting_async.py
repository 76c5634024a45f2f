"""How the asyncio flavour waits: the same names as in ``waiting``."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from holdfast.errors import HoldfastError

T = TypeVar("T")

sleep = asyncio.sleep
AsyncMutex = asyncio.Lock
AsyncGate = asyncio.Lock
"""One task at a time: the others wait for what it opens."""
BLOCKS = False
"""Whether whoever waits here may keep its thread."""


def here() -> int:
    """Who is asking: the task. Nobody, where no loop runs: the garbage collector ends a block in whatever thread."""
    return id(asyncio.current_task()) if asyncio._get_running_loop() is not None else 0


async def settled(value: T | Awaitable[T]) -> T:
    """What a function of the user's gave: it may be one that is awaited, or a plain one."""
    if inspect.isawaitable(value):
        return await value
    return value


async def called_aside(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the user's that may take its time: one that is not awaited does so in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    return await settled(await asyncio.to_thread(function, *args))


class AsyncTurn:
    """A session on a loop queues its requests itself, so here they are only counted."""

    def __init__(self) -> None:
        self.lock = self
        self._inside = 0

    def check_free(self) -> None: ...

    async def enter(self, deadline: float) -> None:
        self._inside += 1

    def try_enter(self) -> bool:
        """Only if nobody is in there; to be left again."""
        if self._inside:
            return False
        self._inside += 1
        return True

    def release(self) -> None:
        self._inside -= 1


def check_function(function: Callable[..., Any]) -> None:
    """A decorator can only hold a lease around a function that does its work when it is awaited."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is not a coroutine function: decorate an async def, or use Client")


def check_called(function: Callable[..., Any], what: str) -> None:
    """What is called here may be awaited, or have done its work when it returns."""
    if not callable(function):
        raise TypeError(f"{what} must be a function, not {function!r:.80}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{what} is {function!r:.80}, a generator, which only begins when it is called")


def check_asked(function: Callable[..., Any], what: str) -> None:
    """What asks somebody else and may take its time is awaited."""
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{what} is {function!r:.80}, which cannot be awaited: make it an async def, or use Client")


class AsyncSignal:
    """Set from any thread, awaited by one task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout: float) -> bool:
        """True when it was set; it is cleared again for the next time. Not with ``wait_for``, which in Python 3.11
        forgets that the task was cancelled when it is set in the same moment."""
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class AsyncOwner:
    """Whoever the grants belong to: the event loop of the client that made them."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Future[Any]] = set()

    def check(self) -> None:
        """One client, one loop: the first use decides which."""
        loop = asyncio.get_running_loop()
        if self.loop is None:
            self.loop = loop
        elif self.loop is not loop:
            raise RuntimeError(
                f"this AsyncClient belongs to {self.loop!r} and was used from {loop!r}: make one client a loop"
            )

    def alive(self) -> bool:
        return self.loop is None or not self.loop.is_closed()

    def call(self, callback: Callable[[], object]) -> None:
        """From the keeper's thread: on the loop."""
        if self.loop is not None:
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(callback)

    def tell(self, callback: Callable[[Any], object], grant: Any) -> None:
        """From the keeper's thread: on the loop, and awaited there if there is something to await."""

        def run() -> None:
            outcome = callback(grant)
            if inspect.isawaitable(outcome):
                task = asyncio.ensure_future(outcome)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        self.call(run)


class AsyncScope:
    """The block under a grant, cancelled when the grant is lost. Works like ``asyncio.timeout``: our own cancellation
    becomes the error it stands for, and one that came from outside stays a cancellation."""

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
