"""Kernel locks in side files of an SQLite database.

``WriteTurn`` is an flock taken before BEGIN IMMEDIATE, so that processes take turns: SQLite's own busy handler can
starve one of them to one operation a second. ``SessionLocks`` are open-file-description locks on single bytes, which
the kernel drops when the process dies: the proof that a session still lives, or that a process waits for a name.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from zlib import crc32

from holdfast.errors import Busy
from holdfast.runtime import forks
from holdfast.runtime.clock import now

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: no turns, but SQLite's own lock still excludes
    fcntl = None  # type: ignore[assignment]

_FLOCK = "hhqqi4x"
_WAITERS = 7846 << 48
"""The first offset that belongs to a name; SESSION_KEYS of the background thread are below it."""
_PLACES = 1 << 16
"""Offsets of a name. A waiter takes one by chance, and another one if that is taken."""
_STAMPS = 4096
"""Places for stamps in the file itself."""


def _first_place(name: str) -> int:
    return _WAITERS + crc32(name.encode()) * _PLACES


def open_side_file(path: str) -> int:
    """Open the side file ``<database>.<suffix>``, with the owner of the database, whichever user is the first.

    Those who may write to the database may read and write the side file. Others may not even read it: a reader could
    take its locks, and hold up all writers.
    """
    flags = os.O_RDWR  # Python makes it non-inheritable
    with suppress(FileNotFoundError):
        return os.open(path, flags)
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # another process was faster
        return os.open(path, flags)
    with suppress(OSError, AttributeError):  # there is no database yet; AttributeError: Windows
        database = os.stat(path.rpartition(".")[0])
        with suppress(PermissionError):
            os.fchown(descriptor, database.st_uid, database.st_gid)
        writers = database.st_mode & 0o222
        os.fchmod(descriptor, writers | writers << 1 | 0o600)
    return descriptor


class WriteTurn:
    def __init__(self, path: str) -> None:
        self._path = path
        self.descriptor = open_side_file(path)

    def enter(self, deadline: float) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait(max(0.0, deadline - now()))

    def leave(self) -> None:
        if fcntl is not None:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _wait(self, timeout: float) -> None:
        stat, granted, queued = os.fstat(self.descriptor), threading.Event(), False
        waiter, queue = (self, granted), _queues.setdefault((stat.st_dev, stat.st_ino), _TurnQueue())
        try:
            queue.waiters.append(waiter)
            queued = True
            if not queue.is_running:
                queue.start(open_side_file(self._path))
            granted.wait(timeout)
        finally:
            try:
                queue.waiters.remove(waiter)
                timed_out = True
            except ValueError:
                # The queue is just granting it (unless an interrupt came before it was queued): wait for that moment.
                timed_out = not granted.wait(None if queued else 0.1)
        if timed_out:
            raise Busy(
                f"{self._path} stayed locked by another process for {timeout:.1f} s: "
                "is one stopped in the middle of a write, or a transaction of your own open?"
            )


class _TurnQueue:
    """The threads of this process that wait for one file.

    The kernel's own queue is fair but has no timeout. So one thread waits in it for all of them, on a descriptor of its
    own, and swaps descriptors with the first waiter when the lock is granted: in that thread, because no signal handler
    runs there. A waiter that times out leaves the thread waiting, so a file that stays locked costs one thread and one
    descriptor, however often it is tried.
    """

    def __init__(self) -> None:
        self.waiters: deque[tuple[WriteTurn, threading.Event]] = deque()
        self.is_running = False
        self.descriptor = -1

    def start(self, descriptor: int) -> None:
        thread = threading.Thread(target=self._run, args=(descriptor,), name="holdfast-turn", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if thread.ident is None:  # the system has no more threads
                os.close(descriptor)
            raise

    def _run(self, descriptor: int) -> None:
        """Two may run at once: the second one finds no waiter, or serves the next one."""
        while True:
            self.is_running, self.descriptor = True, descriptor
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                turn, granted = self.waiters.popleft()
            except IndexError:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # all of them timed out
            else:
                turn.descriptor, self.descriptor = descriptor, turn.descriptor
                descriptor = self.descriptor
                granted.set()
            if not self.waiters:
                self.is_running = False
                if not self.waiters:  # again: a waiter that came before that relies on this thread
                    break
        self.descriptor = -1
        os.close(descriptor)


_queues: dict[tuple[int, int], _TurnQueue] = {}
"""By device and inode."""


@forks.in_child
def _forget() -> None:
    """The threads do not run in a forked child, and the parent's lock must not outlive it there."""
    for queue in _queues.values():
        if queue.descriptor >= 0:
            os.close(queue.descriptor)
    _queues.clear()


class SessionLocks:
    """One locked byte for each living session, at the offset of its key. And one for each name that a process waits
    for, at any of ``_PLACES`` offsets that belong to the name, so that those of several processes can be counted."""

    available = hasattr(fcntl, "F_OFD_SETLK")

    def __init__(self, path: str) -> None:
        self._descriptor = open_side_file(path)
        self._waiting: dict[str, int] = {}
        """The key that is locked for a name."""

    def is_at(self, path: str) -> bool:
        """Whether the file that is open here is the one at ``path``."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def hold(self, key: int) -> bool:
        try:
            self._set(fcntl.F_WRLCK, key)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def drop(self, key: int) -> None:
        self._set(fcntl.F_UNLCK, key)

    def stamp(self, key: int) -> None:
        """Show the others that the session that has locked ``key`` is running. Some keys share a stamp."""
        os.pwrite(self._descriptor, struct.pack("d", now()), key % _STAMPS * 8)

    def stamp_age(self, key: int) -> float:
        """Seconds since ``key`` was stamped."""
        stamp = os.pread(self._descriptor, 8, key % _STAMPS * 8)
        return now() - struct.unpack("d", stamp)[0] if len(stamp) == 8 else math.inf

    def is_free(self, key: int, length: int = 1) -> bool:
        """Whether no other process has locked any of ``length`` bytes from ``key`` on (0: all of them)."""
        return self._first_locked(key, length) is None

    def show_waiting(self, names: Iterable[str]) -> None:
        """Lock a byte for each of ``names``, and unlock those of other names."""
        names = set(names)
        with suppress(OSError):  # the kernel has no more locks: only listings need these
            for name in self._waiting.keys() - names:
                self.drop(self._waiting.pop(name))
            for name in names - self._waiting.keys():
                places = (_first_place(name) + int.from_bytes(os.urandom(2)) for _ in range(9))
                if (key := next(filter(self.hold, places), None)) is not None:
                    self._waiting[name] = key

    def count_waiting(self, name: str) -> int:
        """How many other sessions have locked a byte for ``name``."""
        count, ranges = 0, [(_first_place(name), _PLACES)]
        while ranges:
            start, length = ranges.pop()
            locked = self._first_locked(start, length) if length else None
            if locked is not None:
                count += 1
                ranges += [(start, locked - start), (locked + 1, start + length - locked - 1)]
        return count

    def _first_locked(self, key: int, length: int) -> int | None:
        """A byte of ``length`` bytes from ``key`` on (0: all of them) that another session has locked."""
        query = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, key, length, 0)
        kind, _, start, *_ = struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, query))
        return None if kind == fcntl.F_UNLCK else max(start, key)

    def _set(self, kind: int, key: int) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, key, 1, 0))

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
