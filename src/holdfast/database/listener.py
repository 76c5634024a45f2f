"""Which names this process waits for, and how it learns that one of them is free.

On PostgreSQL a release notifies only while there is a waiter, which shows itself by a shared advisory lock on the name,
taken in the background session, which also listens. For a lease with ``failover="session"`` a second session queues for
the key that the holder's session has locked; the server answers the moment that session is gone. On SQLite, through a
pooler, and where the server refuses LISTEN or session locks, there is nothing to listen to, and the waiters' own
polling has to do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from threading import RLock

from holdfast.database.session_locks import UNSUPPORTED
from holdfast.database.sessions import Session, open_session
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused
from holdfast.runtime.clock import now
from holdfast.runtime.log import logger

log = logger("holdfast.listener")

MAX_NAMES = 300
"""Names locked in the session: each of its transactions costs O(locks held). Waiters for further names poll."""
MAX_WATCHED_SESSIONS = 4
"""Each is a connection. Waiters for further sessions poll."""

OBJECTS = "\x01objects"
"""The name that writers of objects notify. No lease has it: it contains a control character."""

Wake = Callable[[], None]


class Listener:
    def __init__(self, database: Database, lock: RLock) -> None:
        self._database, self._lock = database, lock
        self._waiters: dict[str, list[Wake]] = {}
        self._payloads = {OBJECTS: OBJECTS}
        """The names by what the server notifies: hashes, because every role of the server may listen."""
        self._announced: set[str] = set()
        """Names that the server was told of, or that are beyond MAX_NAMES."""
        self._locked: set[str] = set()
        self._holders: dict[str, int] = {}
        """The session key of the holder of a name, where its session is to be watched."""
        self._watched: dict[int, Session] = {}
        """Sessions that queue for a session key."""
        self._ready_at = 0.0
        self._pause = 0.001
        self._only_polls = False
        """The server refuses what listening needs. Tried again in the next session."""

    def add(self, name: str, wake: Wake) -> None:
        with self._lock:
            self._waiters.setdefault(name, []).append(wake)
            if name != OBJECTS:
                self._payloads[_payload(name)] = name

    def remove(self, name: str, wake: Wake) -> None:
        with self._lock:
            waiters = self._waiters.get(name, [])
            if wake in waiters:
                waiters.remove(wake)
            if waiters:
                waiters[0]()  # the one that leaves may have been woken for the others
            else:
                self._waiters.pop(name, None)
                self._holders.pop(name, None)
                self._payloads.pop(_payload(name), None)

    def lease_waiters(self) -> int:
        return sum(len(waiters) for name, waiters in self._waiters.items() if name != OBJECTS)

    def count(self, name: str) -> int:
        """How many wait for ``name`` in this process."""
        return len(self._waiters.get(name, ()))

    def set_holder(self, name: str, session_key: int) -> bool:
        """Watch the session of the holder of ``name``, too; True if it was not watched before."""
        with self._lock:
            if name not in self._waiters or self._holders.get(name) == session_key:
                return False
            self._holders[name] = session_key
            return True

    def wake(self, name: str) -> None:
        """Wake the first waiter, because the others would be refused. All of them where there is something for all."""
        with self._lock:
            for wake in self._waiters.get(name, [])[: None if name == OBJECTS else 1]:
                wake()

    def notified(self, payload: str) -> None:
        with self._lock:
            if (name := self._payloads.get(payload)) is not None:
                self.wake(name)

    def is_needed(self) -> bool:
        return bool(self._waiters)

    def next_due(self) -> float | None:
        """When the server has to be told something."""
        with self._lock:
            ended, wanted = self._watch_changes()
            changed = self._waiters.keys() != self._announced or ended or wanted
            return self._ready_at if changed else None

    def descriptors(self) -> list[int]:
        return [number for session in self._watched.values() if (number := session.fileno()) is not None]

    def session_lost(self) -> None:
        """Wake everybody: a notification may have been lost with the session."""
        self._announced.clear()
        self._locked.clear()
        self._only_polls = False
        with self._lock:
            for name in list(self._waiters):  # a copy: the garbage collector may end a watch at any moment
                self.wake(name)

    def close(self) -> None:
        """The background thread ends, because there are no waiters: stop watching sessions."""
        self._announced.clear()
        self._locked.clear()
        for key in list(self._watched):
            self._unwatch(key)

    def back_off(self) -> None:
        self._ready_at = now() + 0.25

    def update(self, session: Session, timeout: float) -> None:
        """Tell the server which names to notify us of. Raises EngineError when the session is lost."""
        with self._lock:
            wanted = [name for name in self._waiters if name not in self._announced]
            ended = [name for name in self._announced if name not in self._waiters]
        self._ready_at = 0.0
        if session.pooled or session.fileno() is None or self._only_polls:
            self._leave_to_polling(session)
            return
        self._announced.difference_update(ended)
        if locked := [name for name in ended if name in self._locked]:
            self._locked.difference_update(locked)
            session.call("wait_end", {"names": locked}, timeout)
        if wanted:
            try:
                self._announce(session, wanted, timeout)
            except Refused as error:
                if error.sqlstate not in UNSUPPORTED:
                    raise
                log.debug("waiters on %s poll, because the server does not let them listen: %s", self._database, error)
                self._only_polls = True
                self._leave_to_polling(session)

    def _leave_to_polling(self, session: Session) -> None:
        self._announced = set(self._waiters)
        self._holders.clear()
        session.show_waiting(list(self._announced)[:MAX_NAMES])

    def _announce(self, session: Session, wanted: list[str], timeout: float) -> None:
        room = max(0, MAX_NAMES - len(self._locked))
        self._announced.update(wanted[room:])
        session.call("listen", {}, timeout)
        refused = False
        for row in session.call("wait_begin", {"names": wanted[:room]}, timeout):
            if row["done"]:
                self._announced.add(row["name"])
                self._locked.add(row["name"])
                self.wake(row["name"])  # a release before this moment did not notify
            else:
                refused = True
        # Refused: a release of that name is being committed. Ask again until it is.
        self._pause = min(self._pause * 2, 0.25) if refused else 0.001
        if refused:
            self._ready_at = now() + self._pause

    def watch_sessions(self, timeout: float) -> None:
        """Stop watching sessions without waiters, and watch one more. A failure only makes a takeover slower."""
        with self._lock:
            ended, wanted = self._watch_changes()
        for key in ended:
            self._unwatch(key)
        for key in wanted[:1]:  # one at a time: connecting takes time, and heartbeats come first
            try:
                self._watched[key] = session = open_session(self._database, timeout)
                session.post("vigil", {"session_key": key}, timeout)
            except EngineError as error:
                log.debug("cannot watch session %s on %s: %s", key, self._database, error)
                self._unwatch(key)
                self.back_off()

    def check_watched_sessions(self) -> None:
        """An answer means that the holder's session is gone; an error, that watching has to start again."""
        for key, session in list(self._watched.items()):
            if session.fileno() is None or session.answered():
                self._unwatch(key)
                with self._lock:
                    for name in [name for name, holder in self._holders.items() if holder == key]:
                        del self._holders[name]
                        self.wake(name)

    def _watch_changes(self) -> tuple[list[int], list[int]]:
        """The session keys that need no watching any more, and those to watch, within the limit."""
        keys = list(dict.fromkeys(self._holders.values())) if self._database.dialect == "postgres" else []
        ended = [key for key in self._watched if key not in keys]
        wanted = [key for key in keys if key not in self._watched]
        return ended, wanted[: max(0, MAX_WATCHED_SESSIONS - len(self._watched) + len(ended))]

    def _unwatch(self, key: int) -> None:
        session = self._watched.pop(key, None)
        if session is not None:
            with suppress(Exception):
                session.close()


def _payload(name: str) -> str:
    """What the SQL function wake_payload makes of it."""
    return sha256(name.encode()).hexdigest()[:16]
