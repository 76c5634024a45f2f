"""How the blocking flavour waits. ``waiting_async`` has the same names for asyncio; nothing else differs in the two."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import CoroutineType, TracebackType
from typing import Any, TypeVar

from holdfast.errors import HoldfastError, Unreachable
from holdfast.runtime.clock import now
from holdfast.runtime.log import logger

T = TypeVar("T")

log = logger("holdfast.lease")

_GENERATOR, _COROUTINE, _ASYNC_GENERATOR = 0x20, 0x80, 0x200  # as in inspect, which is slow to import
sleep = time.sleep
Mutex = threading.Lock
BLOCKS = True
"""Whether whoever waits here may keep its thread."""
here = threading.get_ident
"""Who is asking: the thread."""
TELLERS = 64
"""Threads that call ``on_lost`` of a client's grants: ten thousand may be lost at once."""
_UNDER_WAY = "another call of this client is under way, and this one cannot wait for it any longer"


def settled(value: T) -> T:
    """What a function of the user's gave. What would have to be awaited has not been done, and nobody would do it."""
    if hasattr(type(value), "__await__"):
        if isinstance(value, CoroutineType):
            value.close()  # which is told here, and not by a warning besides
        raise TypeError(f"{value!r:.80} was returned, and nobody awaits it here: use AsyncClient")
    return value


def called_aside(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the user's that may take its time: here, the thread is its own."""
    return settled(function(*args))


class Turn:
    """One thread at a time on a session, and none for longer than it has. Whoever enters releases ``lock``, in a
    ``finally`` that begins before: where Ctrl-C may come at any moment, nothing else is sure to be left again."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # it knows whose it is

    def check_free(self) -> None:
        """Unreachable when we are in there already: a signal handler that interrupted a call would wait for itself."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise Unreachable(_UNDER_WAY)

    def enter(self, deadline: float) -> None:
        """Unreachable when it is not our turn in time."""
        if not self.lock.acquire(False) and not self.lock.acquire(timeout=max(0.0, deadline - now())):
            raise Unreachable(_UNDER_WAY)

    def try_enter(self) -> bool:
        """Only if nobody is in there, ourselves included."""
        return not self.lock._is_owned() and self.lock.acquire(blocking=False)  # type: ignore[attr-defined]


class Gate:
    """Nothing to do: whoever has the turn is alone."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def check_function(function: Callable[..., Any]) -> None:
    """A decorator can only hold a lease around a function that does its work when it is called."""
    if _only_begins(function):
        raise TypeError(f"{function!r} only begins when it is called: decorate a plain function, or use AsyncClient")


def check_called(function: Callable[..., Any], what: str) -> None:
    """What is called here must have done its work when it returns."""
    if not callable(function):
        raise TypeError(f"{what} must be a function, not {function!r:.80}")
    if _only_begins(function):
        raise TypeError(
            f"{what} is {function!r:.80}, which only begins when it is called: give a plain one, or use AsyncClient"
        )


check_asked = check_called


def _only_begins(function: Callable[..., Any]) -> bool:
    flags: int = getattr(getattr(function, "__code__", None), "co_flags", 0)
    return bool(flags & (_GENERATOR | _COROUTINE | _ASYNC_GENERATOR))


class Signal:
    """Set from any thread, awaited by one."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self, timeout: float) -> bool:
        """True when it was set; it is cleared again for the next time."""
        heard = self._event.wait(min(timeout, threading.TIMEOUT_MAX))
        self._event.clear()
        return heard


class Owner:
    """Whoever the grants belong to: here the process, which lives as long as its keeper does."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._untold: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._tellers: set[threading.Thread] = set()

    def check(self) -> None:
        """May the caller use this client here and now?"""

    def alive(self) -> bool:
        return True

    def call(self, callback: Callable[[], object]) -> None:
        """In the keeper's thread, where it must not wait."""
        callback()

    def tell(self, callback: Callable[[Any], object], grant: Any) -> None:
        """In a thread of its own, as far as there are not too many: the user's code may take its time, and heartbeats
        go on."""
        with self._mutex:
            self._untold.append((callback, grant))
            if len(self._tellers) >= TELLERS:
                self._tellers = {each for each in self._tellers if each.is_alive()}  # in a fork none is
            if len(self._tellers) < TELLERS:
                thread = threading.Thread(target=self._tell, name="holdfast-on-lost", daemon=True)
                thread.start()
                self._tellers.add(thread)

    def _tell(self) -> None:
        while True:
            with self._mutex:
                if not self._untold:
                    self._tellers.discard(threading.current_thread())
                    return
                callback, grant = self._untold.popleft()
            try:
                callback(grant)
            except Exception:
                log.exception(
                    "on_lost of %r failed", grant.name, extra={"event": "lease.callback_failed", "lease": grant.name}
                )


class Scope:
    """The block under a grant. Threads are never killed, so there is nothing to cancel here."""

    cancels = False

    def enter(self) -> None: ...

    def cancel(self, error: HoldfastError) -> None: ...

    def exit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
