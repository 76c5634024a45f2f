"""One session for locks, as the executors see it: a PostgreSQL connection, or the lock files of an SQLite database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, Unreachable
from holdfast.lock.pool import Entry, Op
from holdfast.lock.terms import Key

Answers = Sequence[bool | int | None]


class LockWire(Protocol):
    """Methods raise Unanswered when the session is gone."""

    @property
    def descriptor(self) -> int | None:
        """Readable when there is an answer. None: ``send`` has the answers at once, and waiting is polling."""

    @property
    def pause(self) -> float:
        """Seconds until it is worth while to poll again, where there is no descriptor."""

    @property
    def is_expecting(self) -> bool:
        """Whether ``receive`` still has to return an answer."""

    def run(self, entry: Entry, unlocks: bool, patience: float | None) -> bool | None:
        """Try or unlock a key and wait for the answer, in a thread that has the session to itself. None when nothing
        arrives within ``patience`` milliseconds. Then, and when it is interrupted, ``drain`` comes next."""

    def start(self, entry: Entry, unlocks: bool) -> None:
        """Try or unlock a key, to be answered by ``receive``."""

    def send(self, ops: Sequence[Op]) -> None:
        """Send ops in one statement, to be answered by ``receive``."""

    def wait(self, key: Key, shared: bool) -> None:
        """Block in the server's queue, to be answered by ``receive``."""

    def receive(self) -> Answers | EngineError | None:
        """The answers, one for each op, or the server's error. None: more is to come."""

    def drain(self) -> bool:
        """After an interrupt or a timeout: whether an answer is still to come, which ``receive`` then discards."""

    def problem(self) -> str | None:
        """Why what is locked here is locked no more, where no descriptor tells."""

    def has_failed_note(self) -> bool:
        """Whether a note that was answered could not be written. Reported once."""

    def hang_up(self) -> None:
        """Break the connection, from any thread: the one that uses it gets an error."""

    def close(self) -> None: ...

    def end(self) -> None:
        """Close it, and wait until the server has closed it, too, but not for long."""


def open_wire(database: Database, timeout: float) -> LockWire:
    if database.dialect == "sqlite":
        from holdfast.lock.file_locks import FileLockWire

        return FileLockWire.open(database, timeout)
    from holdfast.lock.postgres import PostgresLockWire

    return PostgresLockWire.open(database, timeout)


def open_in_thread(
    database: Database, timeout: float, arrive: Callable[[LockWire | None, Exception | None], None]
) -> None:
    """Call ``arrive`` with the session or the error, in a thread: connecting waits for the network and the resolver.
    Files are opened at once. ``arrive`` raises RuntimeError when its event loop is closed."""

    def connect() -> None:
        wire: LockWire | None = None
        problem: Exception | None = None
        try:
            wire = open_wire(database, timeout)
        except Exception as error:
            problem = error
        try:
            arrive(wire, problem)
        except RuntimeError:
            if wire is not None:
                wire.close()

    if database.dialect == "sqlite":
        try:
            arrive(open_wire(database, timeout), None)
        except Refused as error:
            arrive(None, error)
        return
    try:
        threading.Thread(target=connect, name="holdfast-connect", daemon=True).start()
    except RuntimeError as error:  # the system has no more threads
        arrive(None, Unreachable(f"{database}: {error}"))


def close_in_thread(wire: LockWire, closed: Callable[[], object]) -> None:
    """Call ``closed`` when the session has ended, in a thread: the server takes its time. Files are closed at once.
    ``closed`` raises RuntimeError when its event loop is closed."""

    def close() -> None:
        try:
            wire.end()
        finally:
            with suppress(RuntimeError):
                closed()

    if wire.descriptor is None:
        close()
        return
    try:
        threading.Thread(target=close, name="holdfast-close", daemon=True).start()
    except RuntimeError:  # the system has no more threads
        wire.close()
        closed()
