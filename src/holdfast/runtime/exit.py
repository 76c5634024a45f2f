"""Ending a process in order: SystemExit in its main thread, from whichever thread it is asked for.

SIGTERM is the messenger, because it interrupts whatever the main thread waits for. Where the program handles that
signal itself, its own handler is called and decides how to stop; the kernel's timer decides when.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import ClassVar


class Ending:
    _code: ClassVar[int | None] = None
    """Of whoever began it: the handler may be that of another one in this process."""

    def __init__(self) -> None:
        self._ours = False

    def prepare(self) -> None:
        """From here on SIGTERM is SystemExit, so that blocks are left and hooks are called. Not where the program has a
        handler of its own, and not outside the main thread, which alone may say so."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._exit)
            self._ours = True

    def begin(self, code: int) -> None:
        Ending._code = code
        if (main := threading.main_thread().ident) is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def forget(self) -> None:
        if self._ours and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._exit:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._ours = False

    def _exit(self, number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number if self._code is None else self._code)
