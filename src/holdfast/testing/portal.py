"""One suite for both flavours: an ``AsyncClient`` that looks like a ``Client``.

Each call runs on an event loop in another thread; a ``with`` block is one task from beginning to end, as it would be in
the user's own code.
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


class Portal:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="portal", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it on the loop, wait for what it promises, and make that look blocking, too."""

        async def run() -> Any:
            result = function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
            return await result if inspect.iscoroutine(result) else result

        return self.wrap(asyncio.run_coroutine_threadsafe(run(), self.loop).result())

    def wrap(self, value: Any) -> Any:
        ours = type(value).__module__.startswith("holdfast.") and type(value).__module__.endswith("_async")
        return Blocking(self, value) if ours or hasattr(value, "__aenter__") else value

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Blocking:
    """Stands for an object of the async flavour."""

    def __init__(self, portal: Portal, inner: Any) -> None:
        self._portal, self._inner = portal, inner
        self._blocks: list[tuple[Future[Any], asyncio.Future[BaseException | None]]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if callable(value):
            return lambda *args, **kwargs: self._portal.call(value, *args, **kwargs)
        return self._portal.wrap(value)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        async def as_coroutine(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        decorated = self._inner(as_coroutine)
        return lambda *args, **kwargs: self._portal.call(decorated, *args, **kwargs)

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

        task = asyncio.run_coroutine_threadsafe(block(), self._portal.loop)
        value, leave = entered.result()
        self._blocks.append((task, leave))
        return self._portal.wrap(value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, leave = self._blocks.pop()
        self._portal.loop.call_soon_threadsafe(_settle, leave, error)
        try:
            task.result()
        except BaseException as raised:
            if raised is error:
                return False
            raise
        return error is not None


def _plain(value: Any) -> Any:
    """What an object stands for: on the loop it is used as it is."""
    return value._inner if isinstance(value, Blocking) else value


def _settle(leave: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not leave.done():
        leave.set_result(error)
