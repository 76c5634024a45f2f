"""What happens, told to whoever listens. Unless somebody does, an event costs one look at a variable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakSet

from holdfast.runtime import forks
from holdfast.runtime.log import logger

log = logger("holdfast.telemetry")

Listener = Callable[[str, dict[str, Any]], None]

listeners: tuple[Listener, ...] = ()
"""Looked at before anything is put together to be told."""
_sources: WeakSet[Any] = WeakSet()
_followers: WeakSet[Any] = WeakSet()
_lock = threading.RLock()
"""Which a signal's handler may take while it is held."""


class Source(Protocol):
    """Something that has gauges: read when somebody asks, never counted along, so that they cannot go wrong."""

    def gauges(self) -> Iterable[tuple[str, float]]: ...


class Follower(Protocol):
    """Something that is fast because it does not look whether anybody listens: it is told."""

    def listened(self, heard: bool) -> None: ...


def listen(listener: Listener) -> Callable[[], None]:
    """``listener(event, fields)`` is called where things happen, in any thread, and is to be quick. Call what comes
    back to end it."""
    global listeners
    if not callable(listener):
        raise TypeError(f"listener must be a function of an event and its fields, not {listener!r:.60}")

    def heard(event: str, fields: dict[str, Any]) -> None:  # one of its own, should it be given twice
        listener(event, fields)

    with _lock:
        listeners = (*listeners, heard)
        _spread()

    def stop() -> None:
        global listeners
        with _lock:
            listeners = tuple(each for each in listeners if each is not heard)
            _spread()

    return stop


def _spread() -> None:
    """Under the lock: who is told last must not be told what was so before."""
    for follower in list(_followers):
        follower.listened(bool(listeners))


def tell(event: str, **fields: Any) -> None:
    """What a listener does wrong is its own trouble, and not that of whoever holds a lease."""
    for listener in listeners:
        try:
            listener(event, fields)
        except Exception:
            log.exception("a listener failed on %s", event, extra={"event": "telemetry.listener_failed", "of": event})


def register(source: Source) -> None:
    with _lock:
        _sources.add(source)


def follow(follower: Follower) -> None:
    """Now, and whenever that changes."""
    with _lock:
        _followers.add(follower)
        follower.listened(bool(listeners))


def readings() -> dict[str, float]:
    """Every gauge of this process, summed over what has it; an age is the greatest."""
    found: dict[str, float] = {}
    with _lock:
        sources = list(_sources)
    for source in sources:
        for name, value in source.gauges():
            known = found.get(name, 0.0)
            found[name] = max(known, value) if name.endswith("_seconds") else known + value
    return found


@forks.in_child
def _forget() -> None:
    """What the parent holds is not held here."""
    global _lock, _sources, _followers
    _lock, _sources, _followers = threading.RLock(), WeakSet(), WeakSet()
