"""A kernel timer that ends this process unless it is postponed: also while it is stopped, whatever it does with
signals.

On Linux it is a POSIX timer that sends SIGKILL, which cannot be handled, blocked or ignored, at an absolute time on the
clock of the lease, which goes on while the machine sleeps. Elsewhere it is setitimer with the default action of
SIGALRM, which the program must not use. Neither a forked child nor a program started with exec has the timer.
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
_FATAL = signal.SIGRTMAX - 1 if sys.platform == "linux" else 0
"""For the first process of a container: its handler is the C library's _exit, so it becomes the exit code."""


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
    """struct itimerspec, without an interval."""

    _fields_ = (("_", ctypes.c_long * 2), ("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class KillTimer:
    """Ends the process that it was made in. Not armed before ``ends_at`` is called."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._timers: list[ctypes.c_void_p] = []
        if sys.platform != "linux":  # pragma: no cover - the tests run on Linux
            _check_alarm()
            return
        self._library: Any = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._library, "timer_create"):  # pragma: no cover - glibc before 2.34
            self._library = ctypes.CDLL("librt.so.1", use_errno=True)
        if self._pid == 1:
            self._library.signal.restype = ctypes.c_void_p
            self._library.signal(_FATAL, ctypes.cast(self._library._exit, ctypes.c_void_p))
            self._timers = self._of_each_thread()
        else:
            self._timers = [self._timer(signal.SIGKILL)]

    def _timer(self, number: int, thread: int | None = None) -> ctypes.c_void_p:
        """A timer that sends signal ``number`` to the thread, or to the process."""
        to = _TO_PROCESS if thread is None else _TO_THREAD
        timer, event = ctypes.c_void_p(), _Event(None, number, to, thread or 0)
        self._check(self._library.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(timer)))
        return timer

    def _of_each_thread(self) -> list[ctypes.c_void_p]:
        """The first process of a container gets no SIGKILL from inside, only signals that it handles.

        Each thread has a timer of its own, so that none executes anything else when it continues: of a signal to the
        process one thread is notified, and the others would work until that one has ended them."""
        timers = []
        for thread in _threads():
            try:
                timers.append(self._timer(_FATAL, thread))
            except OSError as error:
                if error.errno != errno.EINVAL:  # it has ended meanwhile
                    raise
        return timers

    def ends_at(self, when: float) -> None:
        """End this process at ``when`` on the clock of the lease; infinity: never. Replaces an earlier time."""
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
        """Disarm it."""
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
            raise OSError(number, f"the kernel refuses the timer that guards this process: {os.strerror(number)}")


def _threads() -> Iterator[int]:
    """The threads of this process, as numbered in its own namespace: /proc may be that of another one."""
    for folder in os.scandir("/proc/self/task"):
        try:
            with open(f"{folder.path}/status") as status:
                numbers = next(line for line in status if line.startswith("NSpid:"))
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        yield int(numbers.split()[-1])


def _check_alarm() -> None:  # pragma: no cover - the tests run on Linux
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        raise RuntimeError("the guard needs SIGALRM for its timer, and this program handles or ignores it")


def _alarm(when: float) -> None:  # pragma: no cover - the tests run on Linux
    while True:
        asked_at = now()
        signal.setitimer(signal.ITIMER_REAL, 0.0 if when == math.inf else max(when - asked_at, 0.0001))
        if now() - asked_at < 0.01:  # not stopped in between: this timer counts from when it is set
            return
