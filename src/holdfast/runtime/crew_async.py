"""How the asyncio flavour does many things at once, within bounds: the same names as in ``crew``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Self

from holdfast.runtime.waiting_async import settled


async def pause(flag: asyncio.Event, seconds: float) -> bool:
    """Wait, or until the flag is set: True if it is."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await flag.wait()
    return flag.is_set()


@contextmanager
def theirs() -> Iterator[None]:
    """A cancellation that nobody has asked of this task is a failure of whoever was called: of a call that was
    cancelled from within, say, when its channel was closed. Let through, it would end us without a word."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it was cancelled, and not by us") from error


class AsyncCrew:
    """So many at a time and no more. What it is given raises nothing. Leaving it cancels what is under way, where a
    thread is waited for: whoever wants that here says ``finish`` before."""

    def __init__(self, most: int) -> None:
        self._room = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Wait for all that was begun."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def spawn(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> bool:
        """Begin it as soon as there is room."""
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
            asyncio.get_running_loop().call_exception_handler({"message": "in a crew", "exception": error})


class AsyncAside:
    """Something that runs beside a block, and ends with it."""

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


class AsyncKeyed:
    """One at a time for each key."""

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


class AsyncAsker:
    """Asks what may never answer, and waits for so long and no longer: then it is cancelled."""

    async def ask(
        self, _stopping: Any, what: str, seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        try:
            async with asyncio.timeout(seconds) as limit:
                with theirs():
                    return await settled(function(*arguments))
        except TimeoutError:
            if not limit.expired():
                raise
        raise TimeoutError(f"{what} has not returned within {seconds:g} s")
