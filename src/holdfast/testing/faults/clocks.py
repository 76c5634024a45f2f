"""A server whose clock steps and drifts while it runs, by libfaketime where that is installed.

    with Clock() as clock, Postgres.create(environment=clock.environment) as postgres:
        clock.step(-300)

Only the time of day is changed, and only for processes started in this environment. Timers are the kernel's and stay
right; what a server measures by the time of day, as pg_sleep does, is as wrong as it would be on such a machine.
"""

import ctypes
import os
import re
import shutil
import struct
import threading
import time
from pathlib import Path

from holdfast.testing import folders
from holdfast.testing.account import account
from holdfast.testing.closing import Closing
from holdfast.testing.faults.fault import Fault

_PLACES = ("lib/*/faketime", "lib/faketime", "lib64/faketime", "local/lib/faketime", "local/lib/*/faketime")
_MEMORY = Path("/dev/shm")
_SHARED = "holdfast-clock-"
_TICK = 0.02
"""Seconds between two corrections of a clock that drifts."""


def faketime() -> Path | None:
    """The library, or None where it is not installed (the package is libfaketime or faketime)."""
    wanted = ("libfaketimeMT.so.1", "libfaketime.so.1")  # the first is for processes with threads, too
    found = (library for name in wanted for place in _PLACES for library in Path("/usr").glob(f"{place}/{name}"))
    return next(found, None)


class Clock(Closing):
    """The time of day for whoever is started in ``environment``: right, until it is told otherwise.

    LookupError where libfaketime is not installed; see ``faketime()``.
    """

    def __init__(self) -> None:
        library = faketime()
        if library is None:
            raise LookupError("there is no libfaketime on this machine: install the system's package libfaketime")
        self._folder, self._claim = folders.temporary()
        self._file = self._folder / "offset"
        self._since, self._offset, self._rate = time.monotonic(), 0.0, 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ticking: threading.Thread | None = None
        self._write()
        self._shared = _share()
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",  # a step is seen by the next look at the clock
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",
            "FAKETIME_SHARED": f"/{self._shared} /{self._shared}",  # versions that do not know the line before
            "NO_FAKE_STAT": "1",
        }

    @property
    def offset(self) -> float:
        """How many seconds this clock is ahead of the true time."""
        return self._offset + self._rate * (time.monotonic() - self._since)

    def step(self, seconds: float) -> None:
        """It jumps by so much, forward or back."""
        with self._lock:
            self._set(self.offset + seconds, self._rate)

    def drift(self, rate: float) -> None:
        """It gains ``rate`` seconds in each second from now on, or loses them."""
        with self._lock:
            self._set(self.offset, rate)
            if self._ticking is None:
                self._ticking = threading.Thread(target=self._tick, name="clock-drift", daemon=True)
                self._ticking.start()

    def heal(self) -> None:
        """It is right again, at once: a step back, if it was ahead."""
        with self._lock:
            self._set(0.0, 0.0)

    def close(self) -> None:
        """Whoever was started in this environment should have ended."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._ticking is not None:
            self._ticking.join()
        _unshare(self._shared)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._claim)

    def _set(self, offset: float, rate: float) -> None:
        self._since, self._offset, self._rate = time.monotonic(), offset, rate
        self._write()

    def _tick(self) -> None:
        """By hand, because the library's own rate counts from the start of each process."""
        while not self._closed.wait(_TICK):
            with self._lock:
                if self._rate:
                    self._write()

    def _write(self) -> None:
        unfinished = self._file.with_suffix(".new")
        unfinished.write_text(f"{self.offset:+.6f}\n")
        account().own(unfinished)
        unfinished.replace(self._file)


def _share() -> str:
    """The name of a semaphore and a piece of memory, as libfaketime makes them for processes that were not given any.

    It leaves its own behind in a process that is killed, and then ends the next one that gets the same pid.
    """
    for stale in _MEMORY.glob(f"{_SHARED}*"):
        owner = re.match(rf"{_SHARED}(\d+)-", stale.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _unshare(stale.name)
    name = f"{_SHARED}{os.getpid()}-{os.urandom(4).hex()}"
    system = ctypes.CDLL(None, use_errno=True)
    system.sem_open.restype = ctypes.c_void_p
    semaphore = system.sem_open(f"/{name}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
    if not semaphore:
        raise OSError(ctypes.get_errno(), "cannot make a semaphore", name)
    system.sem_close(ctypes.c_void_p(semaphore))
    never = struct.pack("=qq", 0, -1)
    (_MEMORY / name).write_bytes(bytes(16) + never * 8)
    for path in (_MEMORY / name, _MEMORY / f"sem.{name}"):
        path.chmod(0o600)
        account().own(path)
    return name


def _unshare(name: str) -> None:
    for path in (_MEMORY / name, _MEMORY / f"sem.{name}"):
        path.unlink(missing_ok=True)


def clock_step(clock: Clock, seconds: float) -> Fault:
    """The clock jumps; healed, it jumps back."""
    return Fault("clock_step", clock, lambda: clock.step(seconds), clock.heal)


def clock_drift(clock: Clock, rate: float) -> Fault:
    """The clock runs too fast or too slow; healed, it is set right."""
    return Fault("clock_drift", clock, lambda: clock.drift(rate), clock.heal)
