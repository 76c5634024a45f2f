"""A clock that steps and drifts while a server runs, by libfaketime, if that is installed.

    with Clock() as clock, Postgres.create(environment=clock.environment) as postgres:
        clock.step(-300)

Only the time of day changes, and only for processes started with this environment. Timers of the kernel stay right;
what a server measures with the time of day, such as pg_sleep, is as wrong as on a machine with such a clock.
"""

import ctypes
import os
import re
import shutil
import struct
import threading
import time
from pathlib import Path

from holdfast.testing import server_folder
from holdfast.testing.faults.fault import Fault
from holdfast.testing.resource import Resource
from holdfast.testing.server_user import server_user

_FOLDERS = ("lib/*/faketime", "lib/faketime", "lib64/faketime", "local/lib/faketime", "local/lib/*/faketime")
_MEMORY = Path("/dev/shm")
_SHARED_PREFIX = "holdfast-clock-"
_TICK = 0.02
"""Seconds between two corrections of a clock that drifts."""


def faketime() -> Path | None:
    """The library, or None if it is not installed (the package is libfaketime or faketime)."""
    names = ("libfaketimeMT.so.1", "libfaketime.so.1")  # the first supports threads
    paths = (path for name in names for folder in _FOLDERS for path in Path("/usr").glob(f"{folder}/{name}"))
    return next(paths, None)


class Clock(Resource):
    """The time of day of processes that are started with ``environment``. It is right until ``step`` or ``drift``.

    Raises LookupError if libfaketime is not installed (see ``faketime()``).
    """

    def __init__(self) -> None:
        library = faketime()
        if library is None:
            raise LookupError("there is no libfaketime on this machine: install the system's package libfaketime")
        self._folder, self._folder_lock = server_folder.create_temporary()
        self._file = self._folder / "offset"
        self._since, self._offset, self._rate = time.monotonic(), 0.0, 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._drift_thread: threading.Thread | None = None
        self._write()
        self._shared = _create_shared()
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",  # the next reading of the clock sees a step
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",
            "FAKETIME_SHARED": f"/{self._shared} /{self._shared}",  # for versions without FAKETIME_DISABLE_SHM
            "NO_FAKE_STAT": "1",
        }

    @property
    def offset(self) -> float:
        """Seconds by which this clock is ahead."""
        return self._offset + self._rate * (time.monotonic() - self._since)

    def step(self, seconds: float) -> None:
        """Move it by ``seconds``, forward or back."""
        with self._lock:
            self._set(self.offset + seconds, self._rate)

    def drift(self, rate: float) -> None:
        """Let it gain ``rate`` seconds in each second from now on; a negative rate loses them."""
        with self._lock:
            self._set(self.offset, rate)
            if self._drift_thread is None:
                self._drift_thread = threading.Thread(target=self._tick, name="clock-drift", daemon=True)
                self._drift_thread.start()

    def heal(self) -> None:
        """Set it right at once, which is a step back if it was ahead."""
        with self._lock:
            self._set(0.0, 0.0)

    def close(self) -> None:
        """Call it when the processes with this environment have ended."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._drift_thread is not None:
            self._drift_thread.join()
        _remove_shared(self._shared)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._folder_lock)

    def _set(self, offset: float, rate: float) -> None:
        self._since, self._offset, self._rate = time.monotonic(), offset, rate
        self._write()

    def _tick(self) -> None:
        """Write the offset again and again, because the rate of libfaketime counts from the start of each process."""
        while not self._closed.wait(_TICK):
            with self._lock:
                if self._rate:
                    self._write()

    def _write(self) -> None:
        unfinished = self._file.with_suffix(".new")
        unfinished.write_text(f"{self.offset:+.6f}\n")
        server_user().own(unfinished)
        unfinished.replace(self._file)


def _create_shared() -> str:
    """Create the semaphore and the shared memory that libfaketime needs, and return their name.

    Those that libfaketime creates by itself are left behind by a killed process, and then end the next process that
    gets the same pid.
    """
    for stale in _MEMORY.glob(f"{_SHARED_PREFIX}*"):
        owner = re.match(rf"{_SHARED_PREFIX}(\d+)-", stale.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove_shared(stale.name)
    name = f"{_SHARED_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    system = ctypes.CDLL(None, use_errno=True)
    system.sem_open.restype = ctypes.c_void_p
    semaphore = system.sem_open(f"/{name}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
    if not semaphore:
        raise OSError(ctypes.get_errno(), "cannot create a semaphore", name)
    system.sem_close(ctypes.c_void_p(semaphore))
    never = struct.pack("=qq", 0, -1)
    (_MEMORY / name).write_bytes(bytes(16) + never * 8)
    for path in (_MEMORY / name, _MEMORY / f"sem.{name}"):
        path.chmod(0o600)
        server_user().own(path)
    return name


def _remove_shared(name: str) -> None:
    for path in (_MEMORY / name, _MEMORY / f"sem.{name}"):
        path.unlink(missing_ok=True)


def clock_step(clock: Clock, seconds: float) -> Fault:
    """Step the clock; to heal, set it right."""
    return Fault("clock_step", clock, lambda: clock.step(seconds), clock.heal)


def clock_drift(clock: Clock, rate: float) -> Fault:
    """Let the clock run too fast or too slow; to heal, set it right."""
    return Fault("clock_drift", clock, lambda: clock.drift(rate), clock.heal)
