# Generated from calling_async.py by scripts/unasync.py. Do not edit.
"""The user's functions: each is given ``op`` if it takes a parameter of that name, wherever that stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.operations.running import Running
from holdfast.operations.terms import Function
from holdfast.runtime.concurrency import maybe_await

if TYPE_CHECKING:
    from holdfast.operations.energy import Meter


def call(function: Function, op: Running, *args: Any, **kwargs: Any) -> Any:
    """With ``op`` if it takes one."""
    place = place_of(function)
    if place is None:
        return maybe_await(function(*args, **kwargs))
    if 0 <= place <= len(args):
        return maybe_await(function(*args[:place], op, *args[place:], **kwargs))
    return maybe_await(function(*args, op=op, **kwargs))


def costing(meter: Meter, function: Function, op: Running, *args: Any, **kwargs: Any) -> Any:
    """Call it, and note what that costs."""
    from holdfast.operations.metering import spending

    return spending(op, meter, call, function, op, *args, **kwargs)


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
