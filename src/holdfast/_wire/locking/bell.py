"""What a task waits on for an answer from the wire: a future that can wake its task at once.

A future of asyncio has the loop go round once more before the task runs, with a question to the system on the way. Here
the reader of the socket, which is no task itself, runs the task straight away: a tenth of what a lock costs.

What a task calls to begin to wait is the future's own, where no interrupt comes in between: it would leave the task
neither waiting nor running, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any


class Bell(asyncio.Future[None]):
    """Awaited by one task, rung once."""

    __slots__ = ("_waker",)
    _waker: tuple[Callable[[Any], object], Context]
    """Taken off, to be called by us."""

    def ring(self) -> None:
        if not self.done():
            if (
                hasattr(self, "_waker") and self._callbacks
            ):  # it was not taken off yet: the loop calls it, and nobody else
                del self._waker
            self.set_result(None)

    def ring_at_once(self) -> None:
        """Only where no task is running."""
        if self.done():
            return
        waiting = self._callbacks
        if not waiting:
            self.set_result(None)
            return
        self._waker = callback, context = waiting[0]
        self.remove_done_callback(callback)
        self.set_result(None)
        context.run(callback, self)
        del self._waker

    def wake(self) -> None:
        """Whoever rang it was interrupted: was that before or after the task has run?"""
        taken_off = not self._callbacks and hasattr(self, "_waker")
        self.ring()
        if taken_off and not self.cancelled():
            callback, context = self._waker
            if callback.__self__._fut_waiter is self:  # type: ignore[attr-defined]
                self.get_loop().call_soon(callback, self, context=context)
            del self._waker
