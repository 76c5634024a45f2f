"""Clocks around one execution, for asyncio: the same names as in ``metering``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from time import thread_time
from typing import Any

from holdfast.operations.energy import Clock, Meter
from holdfast.operations.metering import Metering

__all__ = ["BLOCK", "Metering", "spending"]

BLOCK: Clock = "loop"
"""Nobody tells the steps of a block from what else its loop runs meanwhile."""


async def spending(
    op: Any, meter: Meter, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any
) -> Any:
    """Await it, and note what that costs: in CPU time, what its own steps do."""
    metering = Metering(op, meter, "task")
    with metering:
        return await _Steps(function(*args, **kwargs), metering)


class _Steps:
    """Awaits a coroutine and counts the CPU time of its own steps: what else the loop runs in between is not in it, nor
    what it has others do, in tasks of their own or in threads."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], metering: Metering) -> None:
        self._coroutine, self._metering = coroutine, metering

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, given, spent = self._coroutine.__await__(), None, 0.0
        go: Callable[[Any], Any] = steps.send
        while True:
            began = thread_time()
            try:
                asked = go(given)
            except StopIteration as end:
                return end.value
            finally:
                spent += thread_time() - began
                self._metering.cpu = spent
            try:
                given, go = (yield asked), steps.send
            except BaseException as error:
                given, go = error, steps.throw
