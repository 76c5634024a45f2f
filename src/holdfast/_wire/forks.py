"""After a fork the child owns nothing and harms nothing.

An inherited connection is never closed in the child: closing says goodbye on the parent's socket, and the server would
end the parent's session. Its descriptor is pointed at /dev/null, so that even the garbage collector does no harm.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

_sockets: WeakSet[Any] = WeakSet()
_callbacks: list[Callable[[], None]] = []
_graveyard: list[Any] = []


def guard(session: Any) -> None:
    """``session`` has ``fileno()`` and ``abandon()``; both are called in a forked child, before anything else is."""
    _sockets.add(session)


def in_child(callback: Callable[[], None]) -> Callable[[], None]:
    _callbacks.append(callback)
    return callback


def _after_in_child() -> None:
    sessions = list(_sockets)
    _graveyard.extend(sessions)
    _sockets.clear()
    for callback in _callbacks:
        callback()
    null = os.open(os.devnull, os.O_RDWR)
    for session in sessions:
        descriptor = session.fileno()
        if descriptor is not None:
            os.dup2(null, descriptor)
        session.abandon()
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_in_child)
