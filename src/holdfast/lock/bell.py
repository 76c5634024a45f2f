"""What a task waits on for an answer from the wire: a future, and a way to wake its task at once.

A future of asyncio has the loop go round once more before the task runs, with a question to the system on the way. Here
the reader of the socket, which is no task itself, runs the task straight away: a tenth of what a lock costs.

It is a plain future, not a kind of its own: what a task calls to begin to wait is then the interpreter's own, which is
quicker, and where no interrupt comes in between: it would leave the task neither waiting nor running, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

Bell = asyncio.Future[None]
"""Awaited by one task, rung once."""

_wakers: dict[Bell, tuple[Callable[[Any], object], Context]] = {}
"""Taken off a bell, to be called by us."""


def ring(bell: Bell) -> None:
    if not bell.done():
        if bell in _wakers and bell._callbacks:  # it was not taken off yet: the loop calls it, and nobody else
            del _wakers[bell]
        bell.set_result(None)


def ring_at_once(bell: Bell) -> None:
    """Only where no task is running."""
    waiting = bell._callbacks
    if not waiting:
        ring(bell)
        return
    _wakers[bell] = callback, context = waiting[0]
    bell.remove_done_callback(callback)
    bell.set_result(None)
    context.run(callback, bell)
    _wakers.pop(bell, None)


def wake(bell: Bell) -> None:
    """Whoever rang it was interrupted: was that before or after the task has run?"""
    taken_off = not bell._callbacks and bell in _wakers
    ring(bell)
    if taken_off:
        callback, context = _wakers.pop(bell)
        if not bell.cancelled() and callback.__self__._fut_waiter is bell:  # type: ignore[attr-defined]
            bell.get_loop().call_soon(callback, bell, context=context)
