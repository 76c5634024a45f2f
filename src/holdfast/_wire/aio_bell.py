"""What a task waits on for an answer from the wire: a future that can wake its task at once.

A future of asyncio has the loop go round once more before the task runs, with a question to the system on the way. Here
the reader of the socket, which is no task itself, runs the task straight away: a tenth of what a lock costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any


class Bell:
    """Awaited by one task, rung once."""

    __slots__ = ("_asyncio_future_blocking", "_callback", "_context", "_loop", "_message", "_state")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._state = 0  # 1: rung, 2: cancelled
        self._callback: Callable[[Bell], object] | None = None

    def ring(self, *, at_once: bool = False) -> None:
        """``at_once``: only where no task is running."""
        if not self._state:
            self._state = 1
            if self._callback is None:
                return
            if at_once:
                self._context.run(self._callback, self)
            else:
                self._loop.call_soon(self._callback, self, context=self._context)

    def wake(self) -> None:
        """Whoever rang it was interrupted: was that before or after the task has run?"""
        if self._state == 2:
            return
        self._state = 1
        if self._callback is not None and self._callback.__self__._fut_waiter is self:  # type: ignore[attr-defined]
            self._loop.call_soon(self._callback, self, context=self._context)

    def done(self) -> bool:
        return self._state > 0

    def result(self) -> None:
        if self._state == 2:
            raise asyncio.CancelledError(*() if self._message is None else (self._message,))

    def cancel(self, msg: Any = None) -> bool:
        """By the task that waits, when it is cancelled."""
        if self._state:
            return False
        self._state, self._message = 2, msg
        if self._callback is not None:
            self._loop.call_soon(self._callback, self, context=self._context)
        return True

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, callback: Callable[[Bell], object], *, context: Context) -> None:
        self._callback, self._context = callback, context

    def __await__(self) -> Generator[Any, None, None]:
        if not self._state:
            self._asyncio_future_blocking = True
            yield self
        self.result()
