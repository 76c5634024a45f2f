"""The user's functions: each is given ``op`` if it takes a parameter of that name, wherever that stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.operations.running_async import AsyncRunning
from holdfast.operations.terms import Function
from holdfast.runtime.concurrency_async import maybe_await

if TYPE_CHECKING:
    from holdfast.operations.energy import Meter


async def call(function: Function, op: AsyncRunning, *args: Any, **kwargs: Any) -> Any:
    """With ``op`` if it takes one."""
    place = place_of(function)
    if place is None:
        return await maybe_await(function(*args, **kwargs))
    if 0 <= place <= len(args):
        return await maybe_await(function(*args[:place], op, *args[place:], **kwargs))
    return await maybe_await(function(*args, op=op, **kwargs))


async def costing(meter: Meter, function: Function, op: AsyncRunning, *args: Any, **kwargs: Any) -> Any:
    """Call it, and note what that costs."""
    from holdfast.operations.metering_async import spending

    return await spending(op, meter, call, function, op, *args, **kwargs)


def place_of(function: Function) -> int | None:
    """Where among its arguments it takes ``op``; -1: by its name alone; None: it does not."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return _signed(function)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if "op" not in names:
        return None
    place: int = names.index("op")
    return -1 if place >= code.co_argcount else place - hasattr(function, "__self__")  # self is not given here


def _signed(function: Function) -> int | None:
    import inspect

    try:
        taken = inspect.signature(function).parameters
    except ValueError:  # one that is not written in Python
        return None
    if "op" not in taken:
        return None
    return -1 if taken["op"].kind is inspect.Parameter.KEYWORD_ONLY else list(taken).index("op")
