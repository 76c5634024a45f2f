"""After a fork the child owns nothing of its parent's and harms nothing of it.

An inherited connection is never closed in the child: libpq would send a goodbye on the parent's socket, and the server
would end the parent's session. Its descriptor is pointed at /dev/null, so that the garbage collector does no harm.

SQLite has mutexes, some of them for the whole process. A fork while another thread is inside would leave them locked in
the child for ever, so a fork waits until our threads are out. SQLite also remembers which files it has locked: a child
that inherits this believes to have locks that only the parent has. So our SQLite files are closed during a fork; one
that cannot be closed in time must not be opened in the child.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

PATIENCE = 1.0
"""Seconds that a fork waits for threads to leave SQLite: they are inside for one transaction."""

opening = threading.RLock()
"""Held while a SQLite file is opened, and during a fork."""
spoilt: set[str] = set()
"""Files that were in use when this process was forked: they must not be opened in it."""

era = 0
"""Rises in every forked child: an object that remembers another value has been forked. hot: cheaper than getpid()."""

_sessions: WeakSet[Any] = WeakSet()
_forking = threading.local()
_callbacks: list[Callable[[], None]] = []
_graveyard: list[Any] = []


def guard(session: Any) -> None:
    """Register a session. Its ``fileno()`` and ``abandon()`` are called in a forked child before any other code; if it
    has ``set_down(deadline)`` and ``pick_up()``, they are called before a fork, and after it in the parent."""
    _sessions.add(session)


def forget(session: Any) -> None:
    """The session is closed."""
    _sessions.discard(session)


def in_child(callback: Callable[[], None]) -> Callable[[], None]:
    _callbacks.append(callback)
    return callback


def _before() -> None:
    deadline = time.monotonic() + PATIENCE
    _forking.alone = opening.acquire(timeout=PATIENCE)
    _forking.down, _forking.missed = [], []
    for session in _known():
        if hasattr(session, "set_down"):
            (_forking.down if session.set_down(deadline) else _forking.missed).append(session)


def _known() -> list[Any]:
    while True:
        try:
            return list(_sessions)
        except RuntimeError:  # another thread has just opened or closed one
            pass


def _after_in_parent() -> None:
    for session in _forking.down:
        session.pick_up()
    if _forking.alone:
        opening.release()


def _after_in_child() -> None:
    global era, opening
    era += 1
    opening = threading.RLock()
    spoilt.update(session.database.target for session in _forking.missed)
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
