"""Events for metrics and traces. Without a listener an event costs the look at one variable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from holdfast.runtime import forks
from holdfast.runtime.log import ERROR, logger
from holdfast.runtime.metrics import GAUGES

log = logger("holdfast.telemetry")

T = TypeVar("T")
Listener = Callable[[str, dict[str, Any]], None]

listeners: tuple[Listener, ...] = ()
"""Checked before the fields of an event are computed."""
_sources: WeakSet[Any] = WeakSet()
_followers: WeakSet[Any] = WeakSet()
_lock = threading.RLock()
"""Reentrant: a signal handler may need it while it is held."""


Reading = tuple[str, float] | tuple[str, float, str]
"""The name of a gauge, its value, and the value of its label if it has one."""


class Source(Protocol):
    """Something with gauges. They are computed when they are read, so they cannot drift."""

    def _gauges(self) -> Iterable[Reading]: ...


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
    """Every gauge of this process, summed over its sources and labels; of ages the maximum."""
    totals = {gauge.name: 0.0 for gauge in GAUGES if gauge.labels}
    for (name, *_), value in labelled_readings().items():
        _add(totals, name, name, value)
    return totals


def labelled_readings() -> dict[tuple[str, ...], float]:
    """The same by name and label, such as ``("slots_in_use", "tuner")``."""
    totals: dict[tuple[str, ...], float] = {}
    with _lock:
        sources = list(_sources)
    for source in sources:
        for name, value, *labels in source._gauges():
            _add(totals, (name, *labels), name, value)
    return totals


def _add(totals: dict[T, float], key: T, name: str, value: float) -> None:
    total = totals.get(key, 0.0)
    totals[key] = max(total, value) if name.endswith("_seconds") else total + value


@forks.in_child
def _forget() -> None:
    """A forked child holds nothing of its parent's."""
    global _lock, _sources, _followers
    _lock, _sources, _followers = threading.RLock(), WeakSet(), WeakSet()
