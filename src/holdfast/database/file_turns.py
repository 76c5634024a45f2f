"""Locks the kernel keeps: fair turns between processes on one file, and proof that a process still lives.

``Turnstile`` is an flock taken before BEGIN IMMEDIATE: SQLite's own busy handler can starve a process to one operation
a second. ``Marks`` are open-file-description locks on single bytes, which the kernel drops when the process dies.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from contextlib import suppress

from holdfast.errors import Busy
from holdfast.runtime import forks
from holdfast.runtime.clock import now

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: no fair turns, SQLite's own lock still excludes
    fcntl = None  # type: ignore[assignment]

_FLOCK = "hhqqi4x"


def open_beside(path: str) -> int:
    """A side file of the one whose name it begins with. Whoever may write to that may write to this, too, as
    SQLite has it with its own: else the first user's umask, or root who only looks, would keep all others out."""
    flags = os.O_RDWR  # inherited by no program: Python sees to that
    with suppress(FileNotFoundError):
        return os.open(path, flags)
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # somebody was quicker
        return os.open(path, flags)
    with suppress(OSError, AttributeError):  # no database yet; AttributeError: Windows
        about = os.stat(path.rpartition(".")[0])
        with suppress(PermissionError):
            os.fchown(descriptor, about.st_uid, about.st_gid)
        os.fchmod(descriptor, about.st_mode & 0o666 | 0o600)
    return descriptor


class Turnstile:
    def __init__(self, path: str) -> None:
        self._path = path
        self.descriptor = open_beside(path)

    def enter(self, deadline: float) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._queue_up(max(0.0, deadline - now()))

    def leave(self) -> None:
        if fcntl is not None:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _queue_up(self, timeout: float) -> None:
        about, turn, queued = os.fstat(self.descriptor), threading.Event(), False
        place, queue = (self, turn), _queues.setdefault((about.st_dev, about.st_ino), _Queue())
        try:
            queue.places.append(place)
            queued = True
            if not queue.stands:
                queue.begin(open_beside(self._path))
            turn.wait(timeout)
        finally:
            try:
                queue.places.remove(place)
                given_up = True
            except ValueError:
                # For an instant: it is ours, and whoever was interrupted leaves it like everybody; if it was queued.
                given_up = not turn.wait(None if queued else 0.1)
        if given_up:
            raise Busy(
                f"{self._path} stayed locked by another process for {timeout:.1f} s: "
                "is one stopped in the middle of a write, or a transaction of your own open?"
            )


class _Queue:
    """Who waits for one file in this process. The kernel's queue is fair but knows no timeout: a thread stands in it
    for all of them, on a descriptor of its own, and swaps that with whoever is first when it is their turn. There,
    because no signal comes in between. Whoever gives up leaves it standing, so that a file that stays locked costs one
    thread and one descriptor, however often it is tried."""

    def __init__(self) -> None:
        self.places: deque[tuple[Turnstile, threading.Event]] = deque()
        self.stands = False
        self.descriptor = -1

    def begin(self, descriptor: int) -> None:
        thread = threading.Thread(target=self._stand, args=(descriptor,), name="holdfast-turn", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if thread.ident is None:  # no thread is to be had: nobody else closes it
                os.close(descriptor)
            raise

    def _stand(self, descriptor: int) -> None:
        """Two may be begun at once, and both will do: the second finds nobody, or serves whoever comes next."""
        while True:
            self.stands, self.descriptor = True, descriptor
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                turnstile, turn = self.places.popleft()
            except IndexError:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # nobody waits any more
            else:
                turnstile.descriptor, self.descriptor = descriptor, turnstile.descriptor
                descriptor = self.descriptor
                turn.set()
            if not self.places:
                self.stands = False
                if not self.places:  # looked at once more: whoever came before that counts on us
                    break
        self.descriptor = -1
        os.close(descriptor)


_queues: dict[tuple[int, int], _Queue] = {}


@forks.in_child
def _forget() -> None:
    """The threads are not here, and a turn that is the parent's must not live on in us when it dies."""
    for queue in _queues.values():
        if queue.descriptor >= 0:
            os.close(queue.descriptor)
    _queues.clear()


class Marks:
    """One byte a living session, at the offset of its key."""

    available = hasattr(fcntl, "F_OFD_SETLK")

    def __init__(self, path: str) -> None:
        self._descriptor = open_beside(path)

    def hold(self, key: int) -> bool:
        try:
            self._set(fcntl.F_WRLCK, key)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def drop(self, key: int) -> None:
        self._set(fcntl.F_UNLCK, key)

    def is_free(self, key: int, length: int = 1) -> bool:
        """Nobody else has it, or any of so many; 0: of all from there on."""
        asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, key, length, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, asked))[0]
        return kind == fcntl.F_UNLCK

    def _set(self, kind: int, key: int) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, key, 1, 0))

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
