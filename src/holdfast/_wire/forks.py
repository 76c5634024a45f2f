"""After a fork the child owns nothing and harms nothing.

An inherited connection is never closed in the child: closing says goodbye on the parent's socket, and the server would
end the parent's session. Its descriptor is pointed at /dev/null, so that even the garbage collector does no harm.

SQLite has mutexes of its own, some of them for the whole process. A fork while another thread is inside would leave
them locked in the child for ever, so a fork waits until our threads are out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

PATIENCE = 1.0
"""Seconds that a fork waits for threads to come out of SQLite: it is inside for a commit's time."""

era = 0
"""Rises in every child: whoever remembers another one has been forked. A question to the system would cost more."""

_sessions: WeakSet[Any] = WeakSet()
_forking = threading.local()
_callbacks: list[Callable[[], None]] = []
_graveyard: list[Any] = []


def guard(session: Any) -> None:
    """``session`` has ``fileno()`` and ``abandon()``, both called in a forked child before anything else is, and it may
    have ``inside``, a lock that is held across the fork."""
    _sessions.add(session)


def in_child(callback: Callable[[], None]) -> Callable[[], None]:
    _callbacks.append(callback)
    return callback


def _before() -> None:
    locks = [session.inside for session in list(_sessions) if hasattr(session, "inside")]
    _forking.held = [lock for lock in locks if lock.acquire(timeout=PATIENCE)]


def _after_in_parent() -> None:
    for lock in _forking.held:
        lock.release()


def _after_in_child() -> None:
    global era
    era += 1
    sessions = list(_sessions)
    _graveyard.extend(sessions)
    _sessions.clear()
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
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
