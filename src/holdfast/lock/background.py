"""An event loop in a daemon thread, one a process, for what the blocking flavour cannot do in its callers' threads."""

from __future__ import annotations

import asyncio
import atexit
import threading

from holdfast.runtime import forks

_registry = threading.RLock()
"""A signal's handler may come in between, in the same thread."""
patience: float | None = None
"""Milliseconds that a thread may wait for an answer: for as long as it takes, as long as there is a loop that looks."""
_running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
_abandoned: list[object] = []


def loop() -> asyncio.AbstractEventLoop:
    """It runs, or will in a moment: nothing is ever awaited in it that waits for a caller."""
    global _running
    with _registry:
        if _running is None or not _running[1].is_alive():
            made = asyncio.SelectorEventLoop()  # not the application's kind, see ``database.socket_ready``
            thread = threading.Thread(target=made.run_forever, name="holdfast-locks", daemon=True)
            thread.start()
            _running = made, thread
        return _running[0]


@forks.in_child
def _forget() -> None:
    """The thread is not here, and the loop's selector is shared with the parent: never close it."""
    global _registry, _running
    _abandoned.append(_running)
    _registry, _running = threading.RLock(), None


@atexit.register
def _stop() -> None:
    global _running, patience
    running, _running, patience = _running, None, 10_000.0
    if running is not None:
        made, thread = running
        made.call_soon_threadsafe(made.stop)
        thread.join(1.0)
        if not thread.is_alive():
            made.close()
