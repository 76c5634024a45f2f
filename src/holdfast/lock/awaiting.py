"""Does one task await another? Then a lock that its block has is never given back to that one.

Be it that a call in the block was merely wrapped: before Python 3.12, ``wait_for`` makes a task of what it is given. A
task that nobody awaits has the context of whoever made it just the same: but that one goes on, and lets it in.
"""

from __future__ import annotations

from asyncio import Future, Task, TaskGroup
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref


def awaits(one: object, other: object) -> bool:
    """Of two owners, see ``locks_async.owner``. Seldom more than a look: whoever holds is mostly about to run, or waits
    for what is no task."""
    waits_on = getattr(one(), "_fut_waiter", None) if isinstance(one, ref) else None
    if waits_on is None or waits_on.done() or not isinstance(other, ref):
        return False
    above: list[Any] = [other()]
    for each in above:
        if each is waits_on:
            return True
        above += [found for found in _awaited_by(each) if found not in above]
    return False


def _awaited_by(future: Any) -> Iterable[Any]:
    """Whoever goes on when that is done, and not without it: through ``await``, ``gather``, ``wait_for`` or a task
    group, be it anyio's. Not through ``shield`` or ``wait``, which may leave it behind."""
    for callback, _ in getattr(future, "_callbacks", None) or ():
        whose = getattr(callback, "__self__", None)
        if isinstance(whose, Task):
            yield whose
        elif isinstance(whose, TaskGroup):
            yield whose._on_completed_fut  # type: ignore[attr-defined]
        elif isinstance(callback, partial) and callback.func.__qualname__ == "_release_waiter":  # of wait_for
            yield from (each for each in callback.args if isinstance(each, Future))
        elif getattr(callback, "__qualname__", "").startswith(("gather.", "TaskGroup._spawn.")):
            for inside in (cell.cell_contents for cell in callback.__closure__):
                found = getattr(inside, "_on_completed_fut", inside)
                if isinstance(found, Future) and found is not future:
                    yield found
