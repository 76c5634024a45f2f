"""A timer of the kernel's that ends this process unless it is put off: also while it is stopped, and whatever its code
does with signals.

On Linux it is a POSIX timer that sends SIGKILL, which nobody can handle, block or ignore, at an absolute time on the
clock of the lease, which runs on while the machine sleeps. Elsewhere it is setitimer with SIGALRM's default action, the
next best: it needs that signal for itself. A forked child has no timer, and neither has what replaces us with exec.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from typing import Any

from holdfast._wire.clock import now

_ABSOLUTE = 1
_TO_PROCESS, _TO_THREAD = 0, 4


class _Event(ctypes.Structure):
    """struct sigevent."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("_", ctypes.c_byte * 48),
    )


class _Spec(ctypes.Structure):
    """struct itimerspec: no interval, and when."""

    _fields_ = (("_", ctypes.c_long * 2), ("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class DeadMan:
    """Made in the process that it is to end; nothing is armed before ``ends_at`` is called."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._timer: ctypes.c_void_p | None = None
        if sys.platform != "linux":  # pragma: no cover - the tests run on Linux
            _need_the_alarm()
            return
        self._library: Any = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._library, "timer_create"):  # pragma: no cover - glibc before 2.34
            self._library = ctypes.CDLL("librt.so.1", use_errno=True)
        first = self._pid == 1
        number, to = (self._heard(), _TO_THREAD) if first else (signal.SIGKILL, _TO_PROCESS)
        timer, event = ctypes.c_void_p(), _Event(None, number, to, self._pid if first else 0)
        self._check(self._library.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer)))
        self._timer = timer

    def _heard(self) -> int:
        """The first process of a container hears no SIGKILL from within, but it does hear what it has a handler for.
        Its main thread is told: a process that was stopped would leave it to whichever thread comes first, and the
        others would go on meanwhile."""
        number = signal.SIGRTMAX - 1
        self._library.signal.restype = ctypes.c_void_p
        self._library.signal(number, ctypes.cast(self._library._exit, ctypes.c_void_p))
        return number

    def ends_at(self, when: float) -> None:
        """End this process at ``when`` on the clock of the lease, whatever was said before; infinity: never."""
        if os.getpid() != self._pid:
            return
        if self._timer is None:  # pragma: no cover - the tests run on Linux
            _alarm(when)
            return
        whole, part = (0, 0.0) if when == math.inf else divmod(max(when, 0.000001), 1.0)
        spec = _Spec((ctypes.c_long * 2)(), int(whole), int(part * 1e9))
        self._check(self._library.timer_settime(self._timer, _ABSOLUTE, ctypes.byref(spec), None))

    def close(self) -> None:
        """Never."""
        self.ends_at(math.inf)
        if self._timer is not None and os.getpid() == self._pid:
            self._check(self._library.timer_delete(self._timer))

    @staticmethod
    def _check(answer: int) -> None:
        if answer != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the kernel gives no timer to guard this process with: {os.strerror(number)}")


def _need_the_alarm() -> None:  # pragma: no cover - the tests run on Linux
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        raise RuntimeError("the guard needs SIGALRM for its timer, and this program handles or ignores it")


def _alarm(when: float) -> None:  # pragma: no cover - the tests run on Linux
    while True:
        asked_at = now()
        signal.setitimer(signal.ITIMER_REAL, 0.0 if when == math.inf else max(when - asked_at, 0.0001))
        if now() - asked_at < 0.01:  # not stopped in between: this timer counts from when it is set
            return
