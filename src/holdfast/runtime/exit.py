"""Ends the process from any thread by SystemExit in its main thread, so that blocks are left and hooks are called.

SIGTERM carries it there, because a signal interrupts any wait of the main thread. A program with its own handler of
SIGTERM decides itself how to stop; the kill timer decides when it must have stopped.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, ClassVar

from holdfast.runtime.exit_handler import ExitHandler, restore

LOST_STATUS = 70
"""The exit status of a process that loses a lease or a lock with ``on_lost="exit"``."""


class MainThreadExit:
    _code: ClassVar[int | None] = None
    """Shared by all instances: the handler may be that of another one in this process."""

    def __init__(self) -> None:
        self._before: Any = None
        """The handler that ours replaces, while it does."""

    def prepare(self) -> None:
        """Make SIGTERM raise SystemExit, unless the program has a handler of its own. Python allows this only in the
        main thread."""
        handler = signal.getsignal(signal.SIGTERM)
        ends = handler is signal.SIG_DFL or (isinstance(handler, ExitHandler) and handler.dies)
        if threading.current_thread() is threading.main_thread() and ends:
            signal.signal(signal.SIGTERM, self._exit)
            self._before = handler

    def begin(self, code: int) -> None:
        MainThreadExit._code = code
        if (main := threading.main_thread().ident) is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def forget(self) -> None:
        if self._before is not None and threading.current_thread() is threading.main_thread():
            restore(signal.SIGTERM, self._exit, self._before)
            self._before = None

    def _exit(self, number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number if self._code is None else self._code)
