"""Locks of the kernel beside an SQLite file: one byte a key, at the key's offset, in one side file a key space.

They belong to the open file description, so the kernel frees them when the process dies. Locking a byte twice through
one description succeeds: the pool sees to it that this does not happen. There is no wait with a timeout, so a waiter
polls, with jitter, and in turn (``FileQueue``).
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from holdfast.database.file_turns import SessionLocks, open_side_file
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused
from holdfast.lock.pool import Answers, Entry, Note, Op
from holdfast.lock.terms import Key, number
from holdfast.runtime import forks
from holdfast.runtime.clock import jitter
from holdfast.runtime.identity import application_name, new_token

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

KINDS = ("locks", "pairs")
"""The side files: for names, and for numbers in a namespace. Each schema has its own."""
_FLOCK = "hhqqi4x"
_NOTE_TIMEOUT = 60.0
_SHORTEST, _LONGEST = 0.002, 0.006
"""Seconds between two polls. A process that has released a lock can take it again before a poll sees it free."""
PAUSED = 0.15
"""Seconds without a stamp after which the first in the queue counts as paused. It polls every few milliseconds."""


class FileLockWire:
    descriptor = None
    available = hasattr(fcntl, "F_OFD_SETLK")

    def __init__(self, database: Database) -> None:
        self._database = database
        self._paths = tuple(f"{database.target}.{database.schema}-{kind}" for kind in KINDS)
        self._files: list[int | None] = [None, None]
        self._queue = FileQueue(f"{database.target}.{database.schema}-line")
        self._answers: Answers | EngineError | None = None
        self._waiting: tuple[Key, bool] | None = None
        self._pause = _SHORTEST
        self._id = new_token()
        self._writer: threading.Thread | None = None
        self._has_failed = False
        self._has_rows = False
        _live.add(self._id)
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

    def run(self, entry: Entry, unlocks: bool, patience: float | None) -> bool:
        return self._unlock(entry.key) if unlocks else self._try(entry.key, entry.shared)

    def start(self, entry: Entry, unlocks: bool) -> None:
        try:
            self._answers = [self.run(entry, unlocks, None)]
        except EngineError as error:
            self._answers = error

    def send(self, ops: Sequence[Op]) -> None:
        answers: list[bool | int | None] = []
        try:
            for op in ops:
                if op.target is not None:
                    op.target.wire.cancel()
                    answers.append(True)
                elif op.note is not None:
                    self._write(op.note)
                    answers.append(None)
                elif op.verb == "rivals" and op.entry is not None:
                    answers.append(self._queue.has_waiters(number(op.entry.key)))
                else:
                    answers.append(None if op.entry is None else self.run(op.entry, op.verb == "unlock", None))
            self._answers = answers
        except EngineError as error:
            self._answers = error

    def wait(self, key: Key, shared: bool) -> None:
        self._waiting, self._pause = (key, shared), _SHORTEST

    def cancel(self) -> None:
        self._queue.leave()
        self._waiting, self._answers = None, Refused("no request waits any more")

    def has_failed_note(self) -> bool:
        has_failed, self._has_failed = self._has_failed, False
        return has_failed

    def receive(self) -> Answers | EngineError | None:
        if self._waiting is not None:
            key, shared = self._waiting
            try:
                if self._queue.is_own_turn(number(key)) and self._try(key, shared):
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
        self._has_rows = False
        self.close()

    def __del__(self) -> None:
        """Its client was forgotten, and the event loop of that was closed: a descriptor does not close itself."""
        with suppress(AttributeError, OSError, TypeError):  # interrupted in __init__, or the interpreter is ending
            self.close()

    def end(self) -> None:
        self.close()

    def close(self) -> None:
        self._waiting = None
        if self._has_rows:
            self._has_rows = False
            with suppress(Refused, RuntimeError):  # else the next session of this process deletes them
                self._write(Note(True, [], [], []), after=self._writer)
        _live.discard(self._id)
        self._queue.close()
        for space, file in enumerate(self._files):
            self._files[space] = None
            if file is not None:
                os.close(file)

    def _write(self, note: Note, after: threading.Thread | None = None) -> None:
        """The kernel knows numbers alone. Names and ages are in tables, and writing them may wait for the disk. Refused
        while the last note is being written, unless it is written ``after`` that."""
        if after is None and self._writer is not None and self._writer.is_alive():
            raise Refused("the last note of this session is still being written")
        now = time.time()  # it may be written much later
        held = [
            [len(key) - 1, number(key), None if age is None else now - age, waiting] for key, age, waiting in note.held
        ]
        parameters = {
            "session": self._id,
            "pid": os.getpid(),
            "application": application_name(),
            "is_first": note.is_first,
            "names": json.dumps([[number(key), name] for key, name in note.names]),
            "held": json.dumps(held),
            "gone": json.dumps([[len(key) - 1, number(key)] for key in note.gone]),
        }

        def write() -> None:
            from holdfast.database.sqlite import SqliteSession

            if after is not None:
                after.join()
            live = json.dumps(list(_live - {self._id}))
            try:
                session = SqliteSession.open(self._database, _NOTE_TIMEOUT)
                try:
                    session.call("lock_note", {**parameters, "live": live}, _NOTE_TIMEOUT)
                finally:
                    session.close()
            except EngineError:
                self._has_failed = True

        self._has_rows = bool(self._has_rows or held)
        self._writer = threading.Thread(target=write, daemon=True)
        try:
            self._writer.start()
        except RuntimeError as error:  # the system has no more threads
            self._writer = None
            raise Refused(f"{self._database}: {error}") from error

    def _try(self, key: Key, shared: bool) -> bool:
        byte = number(key)
        if self._waiting is None and self._queue.is_others_turn(byte, shared):
            return False
        return self._set(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, key, byte)

    def _unlock(self, key: Key) -> bool:
        if self._files[len(key) - 1] is None:  # it could not be opened: nothing is locked there
            return True
        return self._set(fcntl.F_UNLCK, key, number(key))

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


_live: set[str] = set()
"""The ids of the open sessions of this process: rows of its other sessions are stale."""


def _is_at(path: str, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


class FileQueue:
    """The queue between processes, as one session sees it. Where its file cannot be written, there is no queue.

    The kernel frees a lock without giving it to a waiter: a process that releases a lock and asks again at once always
    wins over one that polls. So a waiter marks the lock's byte in a file beside the lock files. The process that holds
    the mark is the first in the queue, and the others wait for the mark. A process that asks for a marked lock lets the
    first one go ahead, once a sweep for each lock: a pause at every turn would cost too much. The first one stamps the
    mark at every poll; if it is paused, and does not, the others go ahead.
    """

    passed: set[int] | None = None
    """Bytes that were asked for since the last sweep. None: no process waits for any."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._marks: SessionLocks | None = None
        self._ours: int | None = None

    def sweep(self) -> None:
        """Look whether any process waits for any lock."""
        self.passed = None
        if self._marks is not None or os.path.exists(self._path):
            marks = self._open()
            if marks is not None and not marks.is_free(0, 0):
                self.passed = set()

    def is_others_turn(self, byte: int, shared: bool) -> bool:
        """Whether to let a waiter go ahead. Readers always do: readers that overlap would never let a writer in."""
        if shared:
            return self.has_waiters(byte)
        if self.passed is None or self._marks is None or byte in self.passed:
            return False
        self.passed.add(byte)
        return not self._marks.is_free(byte)

    def has_waiters(self, byte: int) -> bool:
        """Of other sessions."""
        marks = self._open() if os.path.exists(self._path) else None
        return marks is not None and not marks.is_free(byte)

    def is_own_turn(self, byte: int) -> bool:
        """Of a session that waits: whether to try now."""
        marks = self._open()
        with suppress(OSError):
            if marks is not None and self._ours is None and not marks.hold(byte):
                return marks.stamp_age(byte) > PAUSED
            self._ours = byte
            if marks is not None:
                marks.stamp(byte)
        return True

    def leave(self) -> None:
        if self._ours is not None and self._marks is not None:
            self._marks.drop(self._ours)
        self._ours = None

    def close(self) -> None:
        marks, self._marks, self._ours, self.passed = self._marks, None, None, None
        if marks is not None:
            marks.close()

    def _open(self) -> SessionLocks | None:
        if self._marks is None:
            with suppress(OSError):
                self._marks = SessionLocks(self._path)
        return self._marks
