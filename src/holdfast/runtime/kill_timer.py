"""A timer of the kernel's that ends this process unless it is put off: also while it is stopped, and whatever its code
does with signals.

On Linux it is a POSIX timer that sends SIGKILL, which nobody can handle, block or ignore, at an absolute time on the
clock of the lease, which runs on while the machine sleeps. Elsewhere it is setitimer with SIGALRM's default action, the
next best: it needs that signal for itself. A forked child has no timer, and neither has what replaces us with exec.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from holdfast.runtime.clock import now

_ABSOLUTE = 1
_TO_PROCESS, _TO_THREAD = 0, 4
_HEARD = signal.SIGRTMAX - 1 if sys.platform == "linux" else 0
"""By the first process of a container: its handler is the C library's _exit, which makes it the exit code, too."""


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
        self._timers: list[ctypes.c_void_p] = []
        if sys.platform != "linux":  # pragma: no cover - the tests run on Linux
            _need_the_alarm()
            return
        self._library: Any = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._library, "timer_create"):  # pragma: no cover - glibc before 2.34
            self._library = ctypes.CDLL("librt.so.1", use_errno=True)
        if self._pid == 1:
            self._library.signal.restype = ctypes.c_void_p
            self._library.signal(_HEARD, ctypes.cast(self._library._exit, ctypes.c_void_p))
            self._timers = self._of_each_thread()
        else:
            self._timers = [self._timer(signal.SIGKILL)]

    def _timer(self, number: int, thread: int | None = None) -> ctypes.c_void_p:
        """One that sends this signal, to this thread or to the process."""
        to = _TO_PROCESS if thread is None else _TO_THREAD
        timer, event = ctypes.c_void_p(), _Event(None, number, to, thread or 0)
        self._check(self._library.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer)))
        return timer

    def _of_each_thread(self) -> list[ctypes.c_void_p]:
        """The first process of a container hears no SIGKILL from within, but it does hear what it has a handler for.
        Each thread is told by itself, and so executes nothing else when it goes on: of a signal to the process one
        thread would hear, and the others would work until that one had ended them."""
        timers = []
        for thread in _threads():
            try:
                timers.append(self._timer(_HEARD, thread))
            except OSError as error:
                if error.errno != errno.EINVAL:  # it has ended meanwhile
                    raise
        return timers

    def ends_at(self, when: float) -> None:
        """End this process at ``when`` on the clock of the lease, whatever was said before; infinity: never."""
        if os.getpid() != self._pid:
            return
        if not self._timers:  # pragma: no cover - the tests run on Linux
            _alarm(when)
            return
        old: list[ctypes.c_void_p] = []
        if self._pid == 1:  # there may be other threads by now
            old, self._timers = self._timers, self._of_each_thread()
        whole, part = (0, 0.0) if when == math.inf else divmod(max(when, 0.000001), 1.0)
        spec = _Spec((ctypes.c_long * 2)(), int(whole), int(part * 1e9))
        for timer in self._timers:
            self._check(self._library.timer_settime(timer, _ABSOLUTE, ctypes.byref(spec), None))
        self._delete(old)

    def close(self) -> None:
        """Never."""
        self.ends_at(math.inf)
        if os.getpid() == self._pid:
            self._delete(self._timers)

    def _delete(self, timers: list[ctypes.c_void_p]) -> None:
        for timer in timers:
            self._check(self._library.timer_delete(timer))

    @staticmethod
    def _check(answer: int) -> None:
        if answer != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the kernel gives no timer to guard this process with: {os.strerror(number)}")


def _threads() -> Iterator[int]:
    """All of this process, as it numbers them itself: /proc may be that of another namespace."""
    for folder in os.scandir("/proc/self/task"):
        try:
            with open(f"{folder.path}/status") as status:
                told = next(line for line in status if line.startswith("NSpid:"))
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        yield int(told.split()[-1])


def _need_the_alarm() -> None:  # pragma: no cover - the tests run on Linux
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        raise RuntimeError("the guard needs SIGALRM for its timer, and this program handles or ignores it")


def _alarm(when: float) -> None:  # pragma: no cover - the tests run on Linux
    while True:
        asked_at = now()
        signal.setitimer(signal.ITIMER_REAL, 0.0 if when == math.inf else max(when - asked_at, 0.0001))
        if now() - asked_at < 0.01:  # not stopped in between: this timer counts from when it is set
            return
