"""A handler of a signal that ends this process: it releases something first, and then lets the signal do what it would
have done.

Python runs it in the main thread, between two instructions of any code, also of code that holds a lock of ours or of
``logging``. So it logs nothing, takes no lock that is not reentrant, and starts no thread by ``threading``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

Release = Callable[[bool], None]
"""Called with whether the process dies right after it. It returns in bounded time."""


class ExitHandler:
    def __init__(self, before: Any, release: Release) -> None:
        self.before = before
        """The handler that this one replaces, or SIG_DFL."""
        self._release = release
        self._is_releasing = False

    @property
    def dies(self) -> bool:
        """Whether the signal ends the process without a handler of the program."""
        return self.before is signal.SIG_DFL

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """A second signal while the first releases is not kept waiting."""
        try:
            if not self._is_releasing:
                self._is_releasing = True
                try:
                    self._release(self.dies)
                finally:
                    self._is_releasing = False
        except Exception:
            pass
        if not self.dies:
            self.before(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # The first process of a container is not ended by a signal from inside.
        os._exit(128 + number)


def restore(number: int, ours: Any, before: Any) -> None:
    """Put ``before`` back in place of ``ours``, also where an ExitHandler was installed over it; nothing where another
    handler was."""
    handler = signal.getsignal(number)
    if isinstance(handler, ExitHandler) and handler.before == ours:
        handler.before = before
    elif handler == ours:
        signal.signal(number, before)
