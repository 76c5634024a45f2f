"""Who is asking on an event loop: the task itself, or one that another task awaits.

A task that asks for what the task that awaits it has would wait for ever, be it that the call was merely wrapped:
before Python 3.12, ``wait_for`` makes a task of what it is given. A task that nobody awaits is somebody else, although
it has the context of whoever made it: that one goes on, and lets it in.
"""

from __future__ import annotations

from asyncio import Future, Task, TaskGroup
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref


def is_one(holder: object, asker: object) -> bool:
    """Of two owners, see ``aio_locks.owner``. Seldom more than a look: whoever holds is mostly about to run, or waits
    for what is no task."""
    if holder == asker:
        return True
    if not isinstance(holder, ref) or not isinstance(asker, ref):
        return False
    waits_on = getattr(holder(), "_fut_waiter", None)
    if waits_on is None or waits_on.done():
        return False
    above: list[Any] = [asker()]
    for each in above:
        if each is waits_on:
            return True
        above += [found for found in _awaited_by(each) if found not in above]
    return False


def _awaited_by(future: Any) -> Iterable[Any]:
    """What is done when that is done, and cancelled before it is: through ``await``, ``gather``, ``wait_for`` or a task
    group. Not through ``shield`` or ``wait``, which may go on without it."""
    for callback, _ in getattr(future, "_callbacks", None) or ():
        whose = getattr(callback, "__self__", None)
        if isinstance(whose, Task):
            yield whose
        elif isinstance(whose, TaskGroup):
            yield whose._on_completed_fut  # type: ignore[attr-defined]
        elif isinstance(callback, partial):  # of wait_for
            yield from (each for each in callback.args if isinstance(each, Future))
        elif getattr(callback, "__qualname__", "").startswith("gather."):
            yield from (cell.cell_contents for cell in callback.__closure__ if isinstance(cell.cell_contents, Future))
