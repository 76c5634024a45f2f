"""Opens a session for locks, of whichever kind the database has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from holdfast.database.url import Database
from holdfast.errors import Refused, Unreachable
from holdfast.lock.tickets import Key, Op


class LockWire(Protocol):
    """One session, as the pumps see it."""

    @property
    def descriptor(self) -> int | None:
        """Readable when there is an answer. None: ask ``later``."""

    @property
    def later(self) -> Any:
        """Seconds until it is worth while to ask again."""

    def look(self) -> str | None:
        """Now and then: why what is locked in it is locked no more, where no descriptor tells."""

    @property
    def idle(self) -> bool:
        """Nothing is asked that was not answered, and no answer is left to be taken."""

    def run(self, verb: str, key: Key, patience: float | None) -> bool | None:
        """One thing, now, for a thread that has the session to itself and waits so many milliseconds at most."""

    def answer(self) -> Any:
        """To one thing that was begun; what has a descriptor has ``begin`` for that."""

    def send(self, ops: Sequence[Op]) -> None:
        """Many things in one, for ``receive`` to tell."""

    def stand(self, key: Key) -> None:
        """In line, for ``receive`` to tell when it is over."""

    def receive(self) -> Any: ...

    def drain(self) -> bool:
        """After an interruption: is there an answer still to come?"""

    def hang_up(self) -> None:
        """From any thread."""

    def close(self) -> None: ...


def _open_wire(database: Database, timeout: float) -> LockWire:
    if database.dialect == "sqlite":
        from holdfast.lock.file_locks import KernelLockWire

        return KernelLockWire.open(database, timeout)
    from holdfast.lock.postgres import PostgresLockWire

    return PostgresLockWire.open(database, timeout)


def in_a_thread(database: Database, timeout: float, bring: Callable[[LockWire | None, Exception | None], None]) -> None:
    """Connecting waits for the network and the resolver; opening a file does not. ``bring`` is called in the thread,
    and raises RuntimeError when nobody is there any more."""

    def connect() -> None:
        wire: LockWire | None = None
        failed: Exception | None = None
        try:
            wire = _open_wire(database, timeout)
        except Exception as error:
            failed = error
        try:
            bring(wire, failed)
        except RuntimeError:
            if wire is not None:
                wire.close()

    if database.dialect == "sqlite":
        try:
            bring(_open_wire(database, timeout), None)
        except Refused as error:
            bring(None, error)
        return
    try:
        threading.Thread(target=connect, name="holdfast-connect", daemon=True).start()
    except RuntimeError as error:  # no thread to be had now
        bring(None, Unreachable(f"{database}: {error}"))
