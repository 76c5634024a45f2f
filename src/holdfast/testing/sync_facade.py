"""An ``AsyncClient`` with the methods of a ``Client``, so that one test suite covers both.

Each call runs on an event loop in a thread of its own. A ``with`` block is one task from its beginning to its end, as
``async with`` is in the user's code.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from types import TracebackType
from typing import Any


class EventLoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="event-loop", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` on the loop, await its result if it is a coroutine, and wrap the result."""

        async def run() -> Any:
            result = function(*map(_unwrap, args), **{name: _unwrap(value) for name, value in kwargs.items()})
            return await result if inspect.iscoroutine(result) else result

        return self.wrap(asyncio.run_coroutine_threadsafe(run(), self.loop).result())

    def wrap(self, value: Any) -> Any:
        """A facade for an async object of holdfast; any other value as it is."""
        ours = type(value).__module__.startswith("holdfast.") and type(value).__module__.endswith("_async")
        return SyncFacade(self, value) if ours or hasattr(value, "__aenter__") else value

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class SyncFacade:
    """Wraps one async object: its coroutine methods block, and ``async with`` becomes ``with``."""

    def __init__(self, loop_thread: EventLoopThread, inner: Any) -> None:
        self._loop_thread, self._inner = loop_thread, inner
        self._blocks: list[tuple[Future[Any], asyncio.Future[BaseException | None]]] = []
        """Of each ``with`` block that is open: its task, and the future that ends it."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if callable(value):
            return lambda *args, **kwargs: self._loop_thread.call(value, *args, **kwargs)
        return self._loop_thread.wrap(value)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Use the inner object as a decorator."""

        @wraps(function)
        async def as_coroutine(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        decorated = self._inner(as_coroutine)
        return lambda *args, **kwargs: self._loop_thread.call(decorated, *args, **kwargs)

    def __enter__(self) -> Any:
        entered: Future[tuple[Any, asyncio.Future[BaseException | None]]] = Future()

        async def block() -> None:
            leave: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
            try:
                async with self._inner as value:
                    entered.set_result((value, leave))
                    if (error := await leave) is not None:
                        raise error
            except BaseException as error:
                if entered.done():
                    raise
                entered.set_exception(error)

        task = asyncio.run_coroutine_threadsafe(block(), self._loop_thread.loop)
        value, leave = entered.result()
        self._blocks.append((task, leave))
        return self._loop_thread.wrap(value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, leave = self._blocks.pop()
        self._loop_thread.loop.call_soon_threadsafe(_set_result, leave, error)
        try:
            task.result()
        except BaseException as raised:
            if raised is error:
                return False
            raise
        return error is not None


def _unwrap(value: Any) -> Any:
    return value._inner if isinstance(value, SyncFacade) else value


def _set_result(future: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not future.done():
        future.set_result(error)
