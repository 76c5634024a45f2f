"""A session on an SQLite file: short transactions in BEGIN IMMEDIATE, fair between processes, bounded in time.

Two side files go with it: ``….holdfast-turn``, whose lock is taken before BEGIN IMMEDIATE so that writers of several
processes take turns, and ``….holdfast-live``, in which a living session has one byte locked, and a process one for each
name that it waits for. Neither the session nor
its locks survive a fork: see ``runtime/forks.py``.

SQLite's own busy handler is never used, because Ctrl-C does not interrupt it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from typing import Any, NoReturn, TypeVar

from holdfast.database.call_queue import Again, Answer
from holdfast.database.file_turns import SessionLocks, WriteTurn
from holdfast.database.sessions import Calls, Row, session_class
from holdfast.database.sqlite_calls import Call, find, with_hashes
from holdfast.database.statements import split, statements
from holdfast.database.url import Database
from holdfast.errors import Busy, Refused, Unanswered, Unreachable
from holdfast.runtime import forks
from holdfast.runtime.clock import jitter, now

T = TypeVar("T")

OLDEST = (3, 38, 0)

_NONE: Mapping[str, Any] = {}
_READ_HEADER = "pragma schema_version"
"""Makes SQLite read the header, so that no side file is made for a file that is not a database. We never read it
ourselves: closing a file drops all locks that this process has on it, those of the user's own connections included."""


def boot_id() -> str | None:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return None


def check_header(database: Database) -> None:
    """Unreachable for a file that is not a database. One that is locked is."""
    if database.target in forks.spoilt or not os.path.exists(database.target):
        return
    try:
        with forks.opening, closing(sqlite3.connect(database.target, timeout=0)) as connection:
            connection.execute(_READ_HEADER)
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise _cannot_open(database, error) from error


def _cannot_open(database: Database, error: OSError | sqlite3.Error) -> Unreachable:
    not_a_database = isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error)
    advice = "Name another file." if not_a_database else "Does the folder exist, and may this user write to it?"
    if os.path.isdir(database.target):
        advice = "It is a folder: name a file in it."
    return Unreachable(f"cannot open {database}: {error}. {advice}")


class _RollBack(Exception):
    """Ends a transaction that is not to be committed."""


class SqliteSession:
    pooled, shares = False, True
    identity: Row | None = {}  # noqa: RUF012 - never changed

    def __init__(self, database: Database, timeout: float, *, for_examination: bool = False) -> None:
        """``for_examination``: leave the file in the journal mode that it has."""
        self.database = database
        self.boot = boot_id()
        self._statements = statements("sqlite", database.schema)
        self._texts: dict[str, str] = {}
        """SQL by the name of its statement."""
        self._calls: dict[str, Call] = {}
        self._mutex = threading.RLock()
        """One call at a time."""
        self.inside = threading.RLock()
        """Held by the thread that is inside SQLite, and across a fork."""
        self._closed = False
        self._stat: os.stat_result | None = None
        """Of the file that was opened."""
        self.committed: list[Answer] | None = None
        self._interrupt: BaseException | None = None
        """Raised in a function of ours that SQLite called; it makes an error of its own of that."""
        self._column_names: dict[str, list[str]] = {}
        """By SQL text."""
        self._session_locks: SessionLocks | None = None
        self._side_files: list[WriteTurn | SessionLocks] = []
        deadline = now() + timeout
        with forks.opening:
            self._connect()
            forks.guard(self)
        try:
            self._execute_patiently(_READ_HEADER, deadline)
            self._turn = WriteTurn(f"{database.target}.holdfast-turn")
            self._side_files.append(self._turn)
            if SessionLocks.available:
                self._session_locks = SessionLocks(f"{database.target}.holdfast-live")
                self._side_files.append(self._session_locks)
            if not for_examination:
                self._execute_patiently("pragma journal_mode = wal", deadline)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, database: Database, timeout: float, *, for_examination: bool = False) -> SqliteSession:
        if database.target in forks.spoilt:
            raise Unreachable(
                f"another thread wrote to {database} while this process was forked, and SQLite does not survive that. "
                "Start the process with spawn or exec, or fork while nothing is in progress."
            )
        if sqlite3.sqlite_version_info < OLDEST:
            raise Unreachable(
                f"SQLite {sqlite3.sqlite_version} is too old: holdfast needs {'.'.join(map(str, OLDEST))} or newer"
            )
        try:
            return session_class(cls)(database, timeout, for_examination=for_examination)
        except (OSError, sqlite3.Error) as error:
            raise _cannot_open(database, error) from error

    # Calls

    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
        deadline = now() + timeout
        call = self._calls.get(name) or self._find(name)
        parameters = with_hashes(parameters)
        try:
            self._enter(deadline)
            if call.reads is not None:  # hot: a get in bench objects; the function costs 6 %
                return self._execute(self._texts.get(name) or self._text(name), {**call.reads, **parameters})
            return self._perform(call, parameters, deadline)
        except sqlite3.Error as error:
            self._raise(error)
        finally:
            try:  # noqa: SIM105 - inline: Ctrl-C on the way into a function would leave the mutex taken
                self._mutex.release()
            except RuntimeError:
                pass  # interrupted before it was acquired

    def call_together(self, calls: Calls, timeout: float) -> list[Answer]:
        """Run named statements in one transaction, because it is the commit that takes long. Each has a savepoint, so
        that its refusal is its own."""
        deadline = now() + timeout
        work = [(self._calls.get(name) or self._find(name), with_hashes(parameters)) for name, parameters in calls]
        answers: dict[int, Answer] = {}

        def read() -> None:
            for number, (call, parameters) in enumerate(work):
                if call.reads is not None:
                    answers[number] = call.perform(self._run, parameters)
                elif call.answer is not None and (rows := call.answer(self._run, **parameters)):
                    answers[number] = rows

        def write() -> None:
            for number, (call, parameters) in enumerate(work):
                if number not in answers:
                    answers[number] = self._perform_in_savepoint(call, parameters)
            self.committed = [answers[number] for number in range(len(work))]  # by the statement that follows

        def run() -> None:
            read()
            if len(answers) < len(work):
                volatile = all(call.volatile for number, (call, _) in enumerate(work) if number not in answers)
                self._write(write, deadline, volatile)

        try:
            self._exclusively(run, deadline)
        except Refused:  # the transaction, and not one call: nothing of it has happened
            return [Again.ALONE] * len(work)
        return [answers[number] for number in range(len(work))]

    def _perform_in_savepoint(self, call: Call, parameters: Mapping[str, Any]) -> Answer:
        self._execute("savepoint one_call")
        try:
            rows = call.perform(self._run, parameters)
        except (Refused, sqlite3.Error) as error:
            if self._interrupt is not None or not self._connection.in_transaction:  # SQLite has rolled back all of it
                raise
            self._execute("rollback to one_call")
            self._execute("release one_call")
            if isinstance(error, Refused):
                return error
            refusal = self._as_refusal(error)
            refusal.__cause__ = error
            return refusal
        self._execute("release one_call")
        return rows

    def script(self, text: str, timeout: float) -> None:
        """Several statements in one transaction: a migration. Not durable by itself: one that is lost is repeated."""
        deadline = now() + timeout

        def run() -> None:
            for sql in split(text):
                self._execute(sql)

        self._exclusively(lambda: self._write(run, deadline, volatile=True), deadline)

    def rehearse(self, calls: Iterable[tuple[str, Mapping[str, Any]]], timeout: float) -> list[list[Row] | Refused]:
        """Run named statements in one transaction that is rolled back; the answers up to the first error."""
        deadline = now() + timeout
        answers: list[list[Row] | Refused] = []

        def run() -> NoReturn:
            for name, parameters in calls:
                answers.append(self._find(name).perform(self._run, with_hashes(parameters)))
            raise _RollBack

        try:
            with suppress(_RollBack):
                self._exclusively(lambda: self._write(run, deadline), deadline)
        except Refused as error:
            answers.append(error)
        return answers

    def post(self, name: str, parameters: Mapping[str, Any], timeout: float) -> None:
        raise Refused("SQLite has no statement that waits")

    def answered(self) -> bool:
        return True

    def notifications(self) -> list[str]:
        return []

    def show_waiting(self, names: Iterable[str]) -> None:
        """The names that this process waits for, and no others: ``holdfast_waiting`` counts it."""
        if self._session_locks is not None:
            self._session_locks.show_waiting(map(self._in_schema, names))

    def hold(self, key: int, timeout: float) -> bool:
        return self._session_locks is not None and self._session_locks.hold(key)

    def hold_shared(self, key: int, timeout: float) -> bool:
        if self._session_locks is None:
            return False
        path = f"{self.database.target}.holdfast-live"
        locks = _process_locks.get(path)
        if locks is None or not locks.is_at(path):  # the file was replaced, with that of the database
            if locks is not None:
                locks.close()
            locks = _process_locks[path] = SessionLocks(path)
        return locks.hold(key)

    def fileno(self) -> None:
        return None

    def check_target(self) -> None:
        """A process that opens the path after the file was replaced has another file, where everything is free."""
        try:
            same = self._stat is not None and os.path.samestat(self._stat, os.stat(self.database.target))
        except FileNotFoundError:
            raise Busy(f"{self.database} was removed: no other process sees what is in it") from None
        if not same:
            raise Unreachable(f"{self.database} was replaced by another file: what the old one held is void")

    def close(self) -> None:
        forks.forget(self)
        with self.inside:
            self._closed = True
            self._connection.close()
        self._close_side_files()

    def give_way(self) -> None:
        """In a handler of a signal that ends the process: if it has interrupted a write of this thread, roll that back,
        so that others can write."""
        if self._mutex.acquire(blocking=False):  # else the write is another thread's, which goes on
            try:
                self._end_turn()
            finally:
                self._mutex.release()

    # Forks

    def set_down(self, deadline: float) -> bool:
        """Before a fork: close the file and keep every thread out; False when that is not possible in time."""
        while self.inside.acquire(timeout=max(0.0, deadline - now())):
            if self._closed:  # by another thread, at this moment
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
        """After a fork, in the parent: open the file again. If that fails, the session is closed.

        Waits for a process that checkpoints or recovers the log at this moment: the next reader would get "locked".
        """
        try:
            if not self._closed:
                self._connect()
                with suppress(Busy):
                    self._execute_patiently(_READ_HEADER, now() + forks.PATIENCE)
        except sqlite3.Error:
            self._closed = True
        finally:
            self.inside.release()

    def abandon(self) -> None:
        """After a fork, in the child: never close the connection, and drop the parent's kernel locks, which must not
        outlive it in us. The mutexes may be held by threads that do not run here."""
        self._mutex, self.inside = threading.RLock(), threading.RLock()
        self._close_side_files()

    def _connect(self) -> None:
        with suppress(OSError):  # it exists, or SQLite reports why it cannot be created
            # Not with the permissions that the umask allows: the file contains objects, and results of operations.
            descriptor = os.open(self.database.target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(descriptor, self.database.permissions)
            finally:
                os.close(descriptor)  # a file that was just created has no locks to lose
        self._connection = sqlite3.connect(
            self.database.target, isolation_level=None, check_same_thread=False, timeout=0
        )
        with suppress(FileNotFoundError):  # removed at this moment
            self._stat = os.stat(self.database.target)
        self._connection.create_function("holdfast_gone", 1, self._is_session_gone)
        self._connection.create_function("holdfast_waiting", 1, self._count_waiters)
        self._synchronous = ""

    def _close_side_files(self) -> None:
        for side_file in self._side_files:
            side_file.close()

    def _is_session_gone(self, key: int | None) -> bool | None:
        """SQL function ``holdfast_gone(key)``."""
        try:
            return None if key is None or self._session_locks is None else self._session_locks.is_free(key)
        except BaseException as error:
            self._interrupt = error
            raise

    def _count_waiters(self, name: str) -> int:
        """SQL function ``holdfast_waiting(name)``."""
        try:
            return 0 if self._session_locks is None else self._session_locks.count_waiting(self._in_schema(name))
        except BaseException as error:
            self._interrupt = error
            raise

    def _in_schema(self, name: str) -> str:
        """The side files are shared by all schemas in a file."""
        return f"{self.database.schema}.{name}"

    # Execution

    def _find(self, name: str) -> Call:
        call = self._calls[name] = find(name, self._statements)
        return call

    def _perform(self, call: Call, parameters: Mapping[str, Any], deadline: float) -> list[Row]:
        if call.answer is not None and (rows := call.answer(self._run, **parameters)):
            return rows
        if call.attempt is not None:
            text = self._texts.get(call.attempt) or self._text(call.attempt)
            if rows := self._in_turn(
                lambda: self._execute_patiently(text, deadline, parameters), deadline, call.volatile
            ):
                return rows
        return self._write(lambda: call.perform(self._run, parameters), deadline, call.volatile)

    def _run(self, name: str, /, **parameters: Any) -> list[Row]:
        # hot: 17 times a pair in bench sqlite, so the text is looked up here and not by Statements
        return self._execute(self._texts.get(name) or self._text(name), parameters)

    def _text(self, name: str) -> str:
        text = self._texts[name] = self._statements[name].sql
        return text

    def _write(self, action: Callable[[], T], deadline: float, volatile: bool = False) -> T:
        def run() -> T:
            self._execute_patiently("begin immediate", deadline)
            result = action()
            self._execute_patiently("commit", deadline)
            return result

        return self._in_turn(run, deadline, volatile)

    def _in_turn(self, action: Callable[[], T], deadline: float, volatile: bool) -> T:
        """Run ``action`` while no other process writes. ``volatile``: what it writes may be lost in a system crash."""
        try:
            try:
                self._turn.enter(deadline)
                synchronous = "normal" if volatile and self.boot else "full"
                if self._synchronous != synchronous:
                    self._set_synchronous(synchronous, deadline)
                return action()
            finally:
                self._end_turn()
        except BaseException:
            self._end_turn()  # again: Ctrl-C may have come on the way into the first call
            raise

    def _set_synchronous(self, synchronous: str, deadline: float) -> None:
        """``full``: a commit waits for the disk."""
        self._synchronous = ""  # unknown, in case of an interrupt
        self._execute_patiently(f"pragma synchronous = {synchronous}", deadline)
        self._synchronous = synchronous

    def _end_turn(self) -> None:
        """Roll back what was not committed, and let the next process write."""
        try:
            with self.inside:
                if self._connection.in_transaction:
                    self.committed = None
                    self._execute("rollback")
        finally:
            self._turn.leave()

    def _execute(self, sql: str, parameters: Mapping[str, Any] = _NONE) -> list[Row]:
        with self.inside:
            cursor = self._connection.execute(sql, parameters)
            try:
                rows = cursor.fetchall()
            finally:
                cursor.close()  # one that Ctrl-C left half read would keep the file locked
        if not rows:
            return rows
        if (names := self._column_names.get(sql)) is None:
            names = self._column_names[sql] = [column[0] for column in cursor.description]
        return [dict(zip(names, row)) for row in rows]  # noqa: B905 - hot: strict costs as much as the zip

    def _execute_patiently(self, sql: str, deadline: float, parameters: Mapping[str, Any] = _NONE) -> list[Row]:
        """Retry while another connection writes. Busy after ``deadline``."""
        pause = 0.0005
        while True:
            try:
                return self._execute(sql, parameters)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if now() + pause > deadline:
                    raise Busy(
                        f"{self.database} stayed locked by another connection. Is a transaction open on it, maybe one "
                        "of your own? Commit or roll back first."
                    ) from error
            time.sleep(jitter(0.5 * pause, 1.5 * pause))
            pause = min(pause * 2, 0.01)

    def _enter(self, deadline: float) -> None:
        if not self._mutex.acquire(False) and not self._mutex.acquire(timeout=max(0.0, deadline - now())):
            raise Busy(f"{self.database} is busy in another thread of this process")

    def _exclusively(self, action: Callable[[], None], deadline: float) -> None:
        try:
            self._enter(deadline)
            action()
        except sqlite3.Error as error:
            self._raise(error)
        finally:
            try:  # noqa: SIM105 - inline: Ctrl-C on the way into a function would leave the mutex taken
                self._mutex.release()
            except RuntimeError:
                pass  # interrupted before it was acquired

    def _raise(self, error: sqlite3.Error) -> NoReturn:
        if "user-defined function" in str(error):  # ours, in which only a signal handler raises
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt or KeyboardInterrupt from None
        if self._closed:  # by pick_up: a new session may succeed
            raise Unanswered(f"cannot open {self.database} again after a fork") from error
        raise self._as_refusal(error) from error

    def _as_refusal(self, error: sqlite3.Error) -> Refused:
        text = str(error)
        if "no such table" in text or "no such column" in text:
            return Refused(f"{self.database}: {text}", "42P01")
        if "readonly" in text:
            return Refused(f"{self.database} is read-only: may this user write to the file and its folder?", "25006")
        return Refused(f"{self.database}: {text}")


_process_locks: dict[str, SessionLocks] = {}
"""Of the keys that no session of this process loses, by path."""


@forks.in_child
def _forget() -> None:
    """The parent's locks must not outlive it in us."""
    for locks in _process_locks.values():
        locks.close()
    _process_locks.clear()
