"""Locks of the kernel beside an SQLite file: one byte a key, at the key's offset, in one side file a key space.

They belong to the open file description, so the kernel frees them when the process dies, in whatever way. Locking a
byte twice through one description succeeds: that nobody does is for ``lock.mux`` to see to. There is no timed wait, so
whoever waits asks again, with jitter; and in turn, see ``line``.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from holdfast.database.file_turns import open_side_file
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused
from holdfast.lock.line import Line
from holdfast.lock.tickets import Key, Op, Unheard
from holdfast.runtime import forks
from holdfast.runtime.clock import jitter

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

KINDS = ("locks", "pairs")
"""Of side files: for names, and for numbers in a namespace. A schema has its own."""
_FLOCK = "hhqqi4x"
_NOTE_TIMEOUT = 5.0
_SHORTEST, _LONGEST = 0.002, 0.006
"""Seconds between two questions. Not far apart: whoever has just let go has the better chances in the beginning."""


def offset(key: Key) -> int:
    if len(key) == 1:
        return int(key[0])
    return int(key[0]) << 32 | (int(key[1]) & 0xFFFFFFFF)


class KernelLockWire:
    descriptor = None
    available = hasattr(fcntl, "F_OFD_SETLK")

    def __init__(self, database: Database) -> None:
        self._database = database
        self._paths = tuple(f"{database.target}.{database.schema}-{kind}" for kind in KINDS)
        self._files: list[int | None] = [None, None]
        self._line = Line(f"{database.target}.{database.schema}-line")
        self._answers: list[Any] | EngineError | None = None
        self._waiting: Key | None = None
        self._pause = _SHORTEST
        forks.guard(self)

    @classmethod
    def open(cls, database: Database, timeout: float) -> KernelLockWire:
        if not cls.available:
            raise Refused("locks on SQLite need open-file-description locks, which this platform does not have")
        return cls(database)

    @property
    def later(self) -> float:
        """When to call ``receive`` next, as no descriptor tells."""
        if self._waiting is None:
            return 0.0
        pause, self._pause = self._pause, min(self._pause * 1.5, _LONGEST)
        return jitter(0.5 * pause, 1.5 * pause)

    def run(self, verb: str, key: Key, patience: float | None) -> bool:
        byte = offset(key)
        if verb == "try":
            kind = fcntl.F_WRLCK
            if self._line.passed is not None and self._waiting is None and self._line.lets_in(byte):
                return False
        elif self._files[len(key) - 1] is None:  # it could not be opened: nothing is locked there
            return True
        else:
            kind = fcntl.F_UNLCK
        try:
            request = struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
            fcntl.fcntl(self._file(len(key) - 1), fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise Refused(f"{self._paths[len(key) - 1]}: {error}") from error
        return True

    def send(self, ops: Sequence[Op]) -> None:
        answers: list[Any] = []
        try:
            for op in ops:
                if op.verb == "cancel":
                    answers.append(op.target.wire.stop())  # type: ignore[union-attr]
                elif op.verb == "note":
                    with suppress(RuntimeError):  # no thread to be had: then without the name
                        threading.Thread(target=_remember, args=(self._database, op.text), daemon=True).start()
                    answers.append(None)
                else:
                    answers.append(None if op.claim is None else self.run(op.verb, op.claim.key, 0.0))
            self._answers = answers
        except EngineError as error:
            self._answers = error

    def stand(self, key: Key) -> None:
        self._waiting, self._pause = key, _SHORTEST

    def stop(self) -> bool:
        self._line.leave()
        self._waiting, self._answers = None, Refused("nobody waits any more")
        return True

    def receive(self) -> list[Any] | EngineError | None:
        if self._waiting is not None:
            try:
                if self._line.is_turn(offset(self._waiting)) and self.run("try", self._waiting, 0.0):
                    self._line.leave()
                    self._waiting, self._answers = None, [True]
            except EngineError as error:
                self._line.leave()
                self._waiting, self._answers = None, error
        answers, self._answers = self._answers, None
        return answers

    def answer(self) -> Unheard:
        """Only asked for when ``run`` was interrupted."""
        return Unheard()

    def look(self) -> str | None:
        """Whoever opens a file that was removed has another one, and locks there what is locked here."""
        self._line.look()
        for path, file in zip(self._paths, self._files, strict=True):
            if file is not None and not _is_at(path, file):
                return f"{path} was removed or replaced"
        return None

    @property
    def idle(self) -> bool:
        return self._answers is None and self._waiting is None

    def drain(self) -> bool:
        return False

    def hang_up(self) -> None:
        self.close()

    def fileno(self) -> None:
        return None

    def abandon(self) -> None:
        """In a forked child: the locks are the parent's, and must not live on in us when it dies."""
        self.close()

    def close(self) -> None:
        self._waiting = None
        self._line.close()
        for number, file in enumerate(self._files):
            self._files[number] = None
            if file is not None:
                os.close(file)

    def _file(self, space: int) -> int:
        file = self._files[space]
        if file is None:
            if not os.path.exists(self._paths[space]):
                from holdfast.database.sqlite import check_header

                check_header(self._database)
            try:
                with forks.opening:  # a child that does not know of it would keep what is locked in it
                    self._files[space] = file = open_side_file(self._paths[space])
            except PermissionError as error:  # else taken for what somebody else has locked
                raise Refused(f"{self._paths[space]}: {error.strerror}. May this user write to it?") from error
        return file


def _is_at(path: str, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _remember(database: Database, names: str) -> None:
    """The kernel knows numbers; the names are in a table, which may wait for the disk."""
    from holdfast.database.sqlite import SqliteSession

    with suppress(EngineError):
        session = SqliteSession.open(database, _NOTE_TIMEOUT)
        try:
            session.call("lock_remember", {"names": names}, _NOTE_TIMEOUT)
        finally:
            session.close()
