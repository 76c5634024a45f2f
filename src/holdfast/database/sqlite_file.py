"""One open SQLite file: the connection, the kernel's locks beside it, and what becomes of both across a fork.

Nothing here knows a statement of ours, nor whose turn it is to write: see ``sqlite``.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

from holdfast.database.file_turns import Marks, Turnstile
from holdfast.database.sessions import Row
from holdfast.database.url import Database
from holdfast.errors import Busy, Unreachable
from holdfast.runtime import forks
from holdfast.runtime.clock import jitter, now

_NONE: Mapping[str, Any] = {}
_HEADER = "pragma schema_version"
"""Has SQLite read its header, so that nothing is made beside a file that is none of its own. Never we: to close a file
gives up all locks that this process has on it, those of the user's own connections among them."""


def boot_id() -> str | None:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return None


def check_header(database: Database) -> None:
    """Unreachable for a file that is something else. One that is locked is a database."""
    if database.target in forks.spoilt or not os.path.exists(database.target):
        return
    try:
        with forks.opening, closing(sqlite3.connect(database.target, timeout=0)) as connection:
            connection.execute(_HEADER)
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise cannot_open(database, error) from error


def cannot_open(database: Database, error: OSError | sqlite3.Error) -> Unreachable:
    known = isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error)
    advice = "Name another file." if known else "Does the folder exist, and may this user write to it?"
    if os.path.isdir(database.target):
        advice = "It is a folder: name a file in it."
    return Unreachable(f"cannot open {database}: {error}. {advice}")


class SqliteFile:
    def __init__(self, database: Database, timeout: float, *, to_look: bool = False) -> None:
        """``to_look``: it stays in the mode that it is in, which may be somebody else's choice."""
        self.database = database
        self.inside = threading.RLock()
        """Held by whoever is inside SQLite, and across a fork, see ``forks``."""
        self._closed = False
        self._about: os.stat_result | None = None
        self._raised: BaseException | None = None
        self._names: dict[str, list[str]] = {}
        """Of the columns of what was executed."""
        self._marks: Marks | None = None
        self._beside: list[Turnstile | Marks] = []
        deadline = now() + timeout
        with forks.opening:
            self._open()
            forks.guard(self)
        try:
            self._patiently(_HEADER, deadline)
            self._turnstile = Turnstile(f"{database.target}.holdfast-turn")
            self._beside.append(self._turnstile)
            if Marks.available:
                self._marks = Marks(f"{database.target}.holdfast-live")
                self._beside.append(self._marks)
            if not to_look:
                self._patiently("pragma journal_mode = wal", deadline)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._connection = sqlite3.connect(
            self.database.target, isolation_level=None, check_same_thread=False, timeout=0
        )
        with suppress(FileNotFoundError):  # removed this very moment
            self._about = os.stat(self.database.target)
        self._connection.create_function("holdfast_gone", 1, self._gone)
        self._synchronous = ""

    def look(self) -> None:
        """Whoever opens a file that was replaced has another one, and finds free there what is held in ours."""
        try:
            same = self._about is not None and os.path.samestat(self._about, os.stat(self.database.target))
        except FileNotFoundError:
            raise Busy(f"{self.database} is not there any more: nobody else sees what is in it") from None
        if not same:
            raise Unreachable(f"{self.database} was replaced by another file: what was in it counts no more")

    def hold(self, key: int, timeout: float) -> bool:
        return self._marks is not None and self._marks.hold(key)

    def fileno(self) -> None:
        return None

    def abandon(self) -> None:
        """In a forked child: the connection is never closed here, see ``forks``, and the mutex may be held by a thread
        that is not there. The kernel's locks are the parent's, and must not live on in us when it dies."""
        self.inside = threading.RLock()
        self._close_locks()

    def set_down(self, deadline: float) -> bool:
        """Before a fork: nothing of the file is open any more, and nobody comes in; False when that cannot be."""
        while self.inside.acquire(timeout=max(0.0, deadline - now())):
            if self._closed:  # this very moment, by another thread
                return True
            if not self._connection.in_transaction:
                self._connection.close()
                return True
            self.inside.release()
            if now() > deadline:
                break
            time.sleep(0.001)
        return False

    def pick_up(self) -> None:
        """After it. One that cannot be opened again stays closed, and holds nobody up. Where another process puts the
        log away at this moment, or looks through it, it is waited for: whoever reads next would be told of a lock."""
        try:
            if not self._closed:
                self._open()
                with suppress(Busy):
                    self._patiently(_HEADER, now() + forks.PATIENCE)
        except sqlite3.Error:
            self._closed = True
        finally:
            self.inside.release()

    def close(self) -> None:
        forks.forget(self)
        with self.inside:
            self._closed = True
            self._connection.close()
        self._close_locks()

    def _close_locks(self) -> None:
        for each in self._beside:
            each.close()

    def _gone(self, key: int | None) -> bool | None:
        """Called by SQLite, which makes an error of its own of whatever is raised here: Ctrl-C is kept for later."""
        try:
            return None if key is None or self._marks is None else self._marks.is_free(key)
        except BaseException as error:
            self._raised = error
            raise

    def _execute(self, sql: str, parameters: Mapping[str, Any] = _NONE) -> list[Row]:
        with self.inside:
            cursor = self._connection.execute(sql, parameters)
            try:
                rows = cursor.fetchall()
            finally:
                cursor.close()  # or one that Ctrl-C left half read would keep the file locked
        if not rows:
            return rows
        if (names := self._names.get(sql)) is None:
            names = self._names[sql] = [column[0] for column in cursor.description]
        return [dict(zip(names, row)) for row in rows]  # noqa: B905 - there are as many, and to look again takes as long

    def _patiently(self, sql: str, deadline: float, parameters: Mapping[str, Any] = _NONE) -> list[Row]:
        """Try again while another connection writes. Not SQLite's busy handler: it would not hear Ctrl-C."""
        pause = 0.0005
        while True:
            try:
                return self._execute(sql, parameters)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if now() + pause > deadline:
                    raise Busy(
                        f"{self.database} stayed locked by another connection: is a transaction open on it, be it one "
                        "of your own? Commit or roll back first."
                    ) from error
            time.sleep(jitter(0.5 * pause, 1.5 * pause))
            pause = min(pause * 2, 0.01)
