"""Locks of the kernel beside an SQLite file: one byte a key, at the key's offset, in one side file a key space.

They belong to the open file description, so the kernel frees them when the process dies. Locking a byte twice through
one description succeeds: the pool sees to it that this does not happen. There is no wait with a timeout, so a waiter
polls, with jitter, and in turn (``file_queue``).
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

from holdfast.database.file_turns import open_side_file
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused
from holdfast.lock.file_queue import FileQueue
from holdfast.lock.pool import Op
from holdfast.lock.terms import Key
from holdfast.lock.wire import Answers
from holdfast.runtime import forks
from holdfast.runtime.clock import jitter

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

KINDS = ("locks", "pairs")
"""The side files: for names, and for numbers in a namespace. Each schema has its own."""
_FLOCK = "hhqqi4x"
_NOTE_TIMEOUT = 5.0
_SHORTEST, _LONGEST = 0.002, 0.006
"""Seconds between two polls. Close together: a process that has just released the lock has the better chances."""


def offset(key: Key) -> int:
    if len(key) == 1:
        return int(key[0])
    return int(key[0]) << 32 | (int(key[1]) & 0xFFFFFFFF)


class FileLockWire:
    descriptor = None
    pid = 0
    available = hasattr(fcntl, "F_OFD_SETLK")

    def __init__(self, database: Database) -> None:
        self._database = database
        self._paths = tuple(f"{database.target}.{database.schema}-{kind}" for kind in KINDS)
        self._files: list[int | None] = [None, None]
        self._queue = FileQueue(f"{database.target}.{database.schema}-line")
        self._answers: Answers | EngineError | None = None
        self._waiting: tuple[Key, bool] | None = None
        self._pause = _SHORTEST
        forks.guard(self)

    @classmethod
    def open(cls, database: Database, timeout: float) -> FileLockWire:
        if not cls.available:
            raise Refused("locks on SQLite need open-file-description locks, which this platform does not have")
        return cls(database)

    @property
    def is_expecting(self) -> bool:
        return self._answers is not None or self._waiting is not None

    @property
    def pause(self) -> float:
        pause, self._pause = self._pause, min(self._pause * 1.5, _LONGEST)
        return jitter(0.5 * pause, 1.5 * pause)

    def run(self, op: Op, patience: float | None) -> bool:
        entry = op.entry
        assert entry is not None
        return self._unlock(entry.key) if op.verb == "unlock" else self._try(entry.key, entry.shared)

    def send(self, ops: Sequence[Op]) -> None:
        answers: Answers = []
        try:
            for op in ops:
                if op.target is not None:
                    op.target.wire.cancel()
                    answers.append(True)
                elif op.verb == "note":
                    with suppress(RuntimeError):  # the system has no more threads: the name is not written
                        threading.Thread(target=_remember, args=(self._database, op.text), daemon=True).start()
                    answers.append(None)
                else:
                    answers.append(None if op.entry is None else self.run(op, None))
            self._answers = answers
        except EngineError as error:
            self._answers = error

    def wait(self, key: Key, shared: bool) -> None:
        self._waiting, self._pause = (key, shared), _SHORTEST

    def cancel(self) -> None:
        self._queue.leave()
        self._waiting, self._answers = None, Refused("no request waits any more")

    def receive(self) -> Answers | EngineError | None:
        if self._waiting is not None:
            key, shared = self._waiting
            try:
                if self._queue.is_own_turn(offset(key)) and self._try(key, shared):
                    self._queue.leave()
                    self._waiting, self._answers = None, [True]
            except EngineError as error:
                self._queue.leave()
                self._waiting, self._answers = None, error
        answers, self._answers = self._answers, None
        return answers

    def drain(self) -> bool:
        self._answers = None
        return False

    def problem(self) -> str | None:
        """A process that opens a side file after it was removed gets a new one, and can lock there what is locked
        here."""
        self._queue.sweep()
        for path, file in zip(self._paths, self._files, strict=True):
            if file is not None and not _is_at(path, file):
                return f"{path} was removed or replaced"
        return None

    def hang_up(self) -> None:
        self.close()

    def fileno(self) -> None:
        return None

    def abandon(self) -> None:
        """In a forked child: the locks are the parent's, and must not live on here when it dies."""
        self.close()

    def __del__(self) -> None:
        """Its client was forgotten, and the event loop of that was closed: a descriptor does not close itself."""
        with suppress(AttributeError, OSError, TypeError):  # interrupted in __init__, or the interpreter is ending
            self.close()

    def close(self) -> None:
        self._waiting = None
        self._queue.close()
        for number, file in enumerate(self._files):
            self._files[number] = None
            if file is not None:
                os.close(file)

    def _try(self, key: Key, shared: bool) -> bool:
        byte = offset(key)
        if self._queue.passed is not None and self._waiting is None and self._queue.is_others_turn(byte, shared):
            return False
        return self._set(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, key, byte)

    def _unlock(self, key: Key) -> bool:
        if self._files[len(key) - 1] is None:  # it could not be opened: nothing is locked there
            return True
        return self._set(fcntl.F_UNLCK, key, offset(key))

    def _set(self, kind: int, key: Key, byte: int) -> bool:
        try:
            request = struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
            fcntl.fcntl(self._file(len(key) - 1), fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise Refused(f"{self._paths[len(key) - 1]}: {error}") from error
        return True

    def _file(self, space: int) -> int:
        file = self._files[space]
        if file is None:
            if not os.path.exists(self._paths[space]):
                from holdfast.database.sqlite import check_header

                check_header(self._database)
            try:
                with forks.opening:  # a child that does not know of it would keep what is locked in it
                    self._files[space] = file = open_side_file(self._paths[space])
            except PermissionError as error:  # not to be mistaken for a lock that another process has
                raise Refused(f"{self._paths[space]}: {error.strerror}. May this user write to it?") from error
        return file


def _is_at(path: str, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _remember(database: Database, names: str) -> None:
    """The kernel knows numbers. The names are in a table, and writing it may wait for the disk."""
    from holdfast.database.sqlite import SqliteSession

    with suppress(EngineError):
        session = SqliteSession.open(database, _NOTE_TIMEOUT)
        try:
            session.call("lock_remember", {"names": names}, _NOTE_TIMEOUT)
        finally:
            session.close()
