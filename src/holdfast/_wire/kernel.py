"""Locks the kernel keeps: fair turns between processes on one file, and proof that a process still lives.

``Turnstile`` is an flock taken before BEGIN IMMEDIATE: SQLite's own busy handler can starve a process to one operation
a second. ``Marks`` are open-file-description locks on single bytes, which the kernel drops when the process dies.
"""

from __future__ import annotations

import os
import struct
import threading
from contextlib import suppress

from holdfast._wire.clock import now
from holdfast.core.errors import Busy

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: no fair turns, SQLite's own lock still excludes
    fcntl = None  # type: ignore[assignment]

_FLOCK = "hhqqi4x"


def open_beside(path: str, main: str) -> int:
    """A file of ours, made with the rights of the one that it is beside, as SQLite makes its own: whoever may write to
    that one may lock here, also when another user, or root, came first."""
    flags = os.O_RDWR | os.O_CLOEXEC
    with suppress(FileNotFoundError):
        return os.open(path, flags)
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # by now
        return os.open(path, flags)
    with suppress(OSError, AttributeError):  # there is none yet; or Windows
        like = os.stat(main)
        with suppress(PermissionError):
            os.fchown(descriptor, like.st_uid, like.st_gid)
        os.fchmod(descriptor, like.st_mode & 0o666 | 0o600)
    return descriptor


class Turnstile:
    def __init__(self, path: str, main: str) -> None:
        self._path, self._main = path, main
        self._descriptor = self._open()

    def _open(self) -> int:
        return open_beside(self._path, self._main)

    def enter(self, deadline: float) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._queue_up(max(0.0, deadline - now()))

    def leave(self) -> None:
        if fcntl is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _queue_up(self, timeout: float) -> None:
        """The kernel's queue is fair but knows no timeout: another thread stands in it, on a descriptor of its own, and
        makes that ours when it is our turn. There, because no signal comes in between."""
        descriptor, turn, chance = self._open(), threading.Event(), [True]

        def stand() -> None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _taken(chance):
                os.close(descriptor)  # nobody waits any more
                return
            old, self._descriptor = self._descriptor, descriptor
            os.close(old)
            turn.set()

        thread = threading.Thread(target=stand, name="holdfast-turn", daemon=True)
        try:
            thread.start()
            turn.wait(timeout)
        except RuntimeError:
            if thread.ident is None:  # no thread is to be had: nobody else closes it
                os.close(descriptor)
            raise
        finally:
            given_up = not turn.is_set() and _taken(chance)
            if not given_up:
                turn.wait()  # for an instant: it is ours, and whoever was interrupted leaves it like everybody
        if given_up:
            raise Busy(
                f"{self._path} stayed locked by another process for {timeout:.1f} s: "
                "is one stopped in the middle of a write, or a transaction of your own open?"
            )


def _taken(chance: list[bool]) -> bool:
    """Of two threads that ask, one is told True."""
    try:
        return chance.pop()
    except IndexError:
        return False


class Marks:
    """One byte a living session, at the offset of its key."""

    available = hasattr(fcntl, "F_OFD_SETLK")

    def __init__(self, path: str, main: str) -> None:
        self._descriptor = open_beside(path, main)

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
