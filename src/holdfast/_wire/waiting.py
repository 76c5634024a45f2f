"""How the blocking flavour waits. ``aio_waiting`` has the same names for asyncio; nothing else differs in the two."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from holdfast.core.errors import HoldfastError

log = logging.getLogger("holdfast.lease")

sleep = time.sleep
here = threading.get_ident
"""Who is asking: the thread."""


class Turn:
    """One thread at a time on a session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def try_enter(self) -> bool:
        """Only if nobody is in there; to be left again."""
        return self._lock.acquire(blocking=False)

    def leave(self) -> None:
        self._lock.release()


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

    def check(self) -> None:
        """May the caller use this client here and now?"""

    def alive(self) -> bool:
        return True

    def call(self, callback: Callable[[], object]) -> None:
        """In the keeper's thread, where it must not wait."""
        callback()

    def tell(self, callback: Callable[[Any], object], grant: Any) -> None:
        """In a thread of its own: the user's code may take its time, and heartbeats go on."""

        def run() -> None:
            try:
                callback(grant)
            except Exception:
                log.exception("on_lost of lease %r failed", grant.name)

        threading.Thread(target=run, name="holdfast-on-lost", daemon=True).start()


class Scope:
    """The block under a grant. Threads are never killed, so there is nothing to cancel here."""

    cancels = False

    def enter(self) -> None: ...

    def cancel(self, error: HoldfastError) -> None: ...

    def exit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
