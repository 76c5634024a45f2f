"""An event loop in a daemon thread, one a process, for what the blocking flavour cannot do in its callers' threads."""

from __future__ import annotations

import asyncio
import atexit
import threading

from holdfast.runtime import forks

THREAD = "holdfast-locks"
_registry = threading.RLock()  # a signal handler may need it in the thread that has it
patience: float | None = None
"""Milliseconds that a thread waits for an answer. None: for ever, because the loop ends sessions that do not answer."""
_running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
_abandoned: list[object] = []


def loop() -> asyncio.AbstractEventLoop:
    """Starts it at first use. Its callbacks wait for callers only while those change a pool."""
    global _running
    with _registry:
        if _running is None or not _running[1].is_alive():
            loop = asyncio.SelectorEventLoop()  # not the application's kind, see ``database.socket_ready``
            thread = threading.Thread(target=loop.run_forever, name=THREAD, daemon=True)
            thread.start()
            _running = loop, thread
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
        loop, thread = running
        loop.call_soon_threadsafe(loop.stop)
        thread.join(1.0)
        if not thread.is_alive():
            loop.close()
