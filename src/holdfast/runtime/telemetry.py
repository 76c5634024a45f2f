"""Events for metrics and traces. Without a listener an event costs the look at one variable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakSet

from holdfast.runtime import forks
from holdfast.runtime.log import ERROR, logger

log = logger("holdfast.telemetry")

Listener = Callable[[str, dict[str, Any]], None]

listeners: tuple[Listener, ...] = ()
"""Checked before the fields of an event are computed."""
_sources: WeakSet[Any] = WeakSet()
_followers: WeakSet[Any] = WeakSet()
_lock = threading.RLock()
"""Reentrant: a signal handler may need it while it is held."""


class Source(Protocol):
    """Something with gauges. They are computed when they are read, so they cannot drift."""

    def _gauges(self) -> Iterable[tuple[str, float]]: ...


class Follower(Protocol):
    """Something that is told when listeners come and go, because checking for them is too slow for it."""

    def listened(self, heard: bool) -> None: ...


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener(event, fields)`` for each event, in the thread where it happens; it must be fast. Returns a
    function that ends it."""
    global listeners
    if not callable(listener):
        raise TypeError(f"listener must be a function that is called as listener(event, fields), not {listener!r:.60}")

    def entry(event: str, fields: dict[str, Any]) -> None:  # distinct, if the same listener is given twice
        listener(event, fields)

    with _lock:
        listeners = (*listeners, entry)
        _spread()

    def stop() -> None:
        global listeners
        with _lock:
            listeners = tuple(each for each in listeners if each is not entry)
            _spread()

    return stop


def _spread() -> None:
    """Under the lock, so that a follower never gets an outdated value last."""
    for follower in list(_followers):
        follower.listened(bool(listeners))


def emit(event: str, **fields: Any) -> None:
    """Report an event to all listeners. An error in a listener is logged and goes no further."""
    for listener in listeners:
        try:
            listener(event, fields)
        except Exception:
            log.event("telemetry.listener_failed", ERROR, "a listener failed on %(of)s", exc_info=True, of=event)


def register(source: Source) -> None:
    with _lock:
        _sources.add(source)


def follow(follower: Follower) -> None:
    """Call ``follower.listened`` now, and whenever it changes."""
    with _lock:
        _followers.add(follower)
        follower.listened(bool(listeners))


def readings() -> dict[str, float]:
    """Every gauge of this process, summed over its sources; of ages the maximum."""
    totals: dict[str, float] = {}
    with _lock:
        sources = list(_sources)
    for source in sources:
        for name, value in source._gauges():
            total = totals.get(name, 0.0)
            totals[name] = max(total, value) if name.endswith("_seconds") else total + value
    return totals


@forks.in_child
def _forget() -> None:
    """A forked child holds nothing of its parent's."""
    global _lock, _sources, _followers
    _lock, _sources, _followers = threading.RLock(), WeakSet(), WeakSet()
