"""Who waits for which lease in this process, and how the keeper hears that it is free.

On PostgreSQL a release notifies only when somebody waits, and a waiter shows itself by a shared lock on the name in the
session that listens. For a lease with ``failover="session"`` a second session keeps vigil: it queues for the key that
the holder's session holds, and the server answers the moment that session is gone. On SQLite, or through a pooler,
there is nothing to hear, and the waiters' own polling does it all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import RLock

from holdfast.database.sessions import Session, open_session
from holdfast.database.url import Database
from holdfast.errors import EngineError
from holdfast.runtime.clock import now
from holdfast.runtime.log import logger

log = logger("holdfast.keeper")

MOST_WATCHED = 300
"""Names a session: each of its transactions costs O(locks held), so beyond this waiters only poll."""
MOST_VIGILS = 4
"""Each is a connection; beyond this waiters poll."""

OBJECTS = "\x01objects"
"""What writers of objects call, and no lease is: it has a control character."""

Wake = Callable[[], None]


class Ears:
    def __init__(self, database: Database, lock: RLock) -> None:
        self._database, self._lock = database, lock
        self._waiting: dict[str, list[Wake]] = {}
        self._watched: set[str] = set()
        self._locked: set[str] = set()
        self._keys: dict[str, int] = {}
        self._vigils: dict[int, Session] = {}
        self._ready_at = 0.0
        self._pause = 0.001

    def add(self, name: str, wake: Wake) -> None:
        with self._lock:
            self._waiting.setdefault(name, []).append(wake)

    def remove(self, name: str, wake: Wake) -> None:
        with self._lock:
            waiting = self._waiting.get(name, [])
            if wake in waiting:
                waiting.remove(wake)
            if waiting:
                waiting[0]()  # whoever goes may have taken a wake-up with it
            else:
                self._waiting.pop(name, None)
                self._keys.pop(name, None)

    def waiters(self) -> int:
        return sum(len(each) for name, each in self._waiting.items() if name != OBJECTS)

    def count(self, name: str) -> int:
        return len(self._waiting.get(name, ()))

    def keep_vigil(self, name: str, session_key: int) -> bool:
        """Watch the holder's session as well; True when that is news."""
        with self._lock:
            if name not in self._waiting or self._keys.get(name) == session_key:
                return False
            self._keys[name] = session_key
            return True

    def wake(self, name: str) -> None:
        """The first in the queue: the others would only be refused. All, where there is something to read for all."""
        with self._lock:
            for wake in self._waiting.get(name, [])[: None if name == OBJECTS else 1]:
                wake()

    def wake_all(self) -> None:
        with self._lock:
            for name in list(self._waiting):  # a watch that the garbage collector takes goes at any instant
                self.wake(name)

    def needed(self) -> bool:
        return bool(self._waiting)

    def due(self) -> float | None:
        """When there is something to arrange with the server."""
        with self._lock:
            over, wanted = self._vigil_changes()
            news = self._waiting.keys() != self._watched or over or wanted
            return self._ready_at if news else None

    def descriptors(self) -> list[int]:
        return [found for session in self._vigils.values() if (found := session.fileno()) is not None]

    def deaf(self) -> None:
        """The session is gone, and a notification may have gone with it."""
        self._watched.clear()
        self._locked.clear()
        self.wake_all()

    def close(self) -> None:
        self._watched.clear()
        self._locked.clear()
        for key in list(self._vigils):
            self._end_vigil(key)

    def back_off(self) -> None:
        self._ready_at = now() + 0.25

    def arrange(self, session: Session, timeout: float) -> None:
        """Tell the server what we want to hear, all names at once. Raises EngineError when the session has gone."""
        with self._lock:
            wanted = [name for name in self._waiting if name not in self._watched]
            over = [name for name in self._watched if name not in self._waiting]
        self._ready_at = 0.0
        if session.pooled or session.fileno() is None:
            self._watched = set(self._waiting)
            self._keys.clear()
            return
        self._watched.difference_update(over)
        if locked := [name for name in over if name in self._locked]:
            self._locked.difference_update(locked)
            session.call("wait_end", {"names": locked}, timeout)
        if wanted:
            self._begin(session, wanted, timeout)

    def _begin(self, session: Session, wanted: list[str], timeout: float) -> None:
        room = max(0, MOST_WATCHED - len(self._locked))
        self._watched.update(wanted[room:])
        session.call("listen", {}, timeout)
        refused = False
        for row in session.call("wait_begin", {"names": wanted[:room]}, timeout):
            if row["done"]:
                self._watched.add(row["name"])
                self._locked.add(row["name"])
                self.wake(row["name"])
            else:
                refused = True
        # Refused means that somebody releases it this very moment: ask again until that is committed.
        self._pause = min(self._pause * 2, 0.25) if refused else 0.001
        if refused:
            self._ready_at = now() + self._pause

    def stand_vigil(self, timeout: float) -> None:
        """Close the second sessions that are over, and open one. A failure costs only the speed of a takeover."""
        with self._lock:
            over, wanted = self._vigil_changes()
        for key in over:
            self._end_vigil(key)
        for key in wanted[:1]:  # connecting takes its time, and heartbeats come first
            try:
                self._vigils[key] = session = open_session(self._database, timeout)
                session.post("vigil", {"session_key": key}, timeout)
            except EngineError as error:
                log.debug("no vigil for session %s on %s: %s", key, self._database, error)
                self._end_vigil(key)
                self.back_off()

    def hear_vigils(self) -> None:
        """An answer means that the holder's session is gone; an error, that we must begin anew."""
        for key, session in list(self._vigils.items()):
            if session.fileno() is None or session.answered():
                self._end_vigil(key)
                with self._lock:
                    for name in [name for name, watched in self._keys.items() if watched == key]:
                        del self._keys[name]
                        self.wake(name)

    def _vigil_changes(self) -> tuple[list[int], list[int]]:
        """The holders' sessions that nobody asks after any more, and those not yet watched, as many as may be."""
        keys = list(dict.fromkeys(self._keys.values())) if self._database.dialect == "postgres" else []
        over = [key for key in self._vigils if key not in keys]
        wanted = [key for key in keys if key not in self._vigils]
        return over, wanted[: max(0, MOST_VIGILS - len(self._vigils) + len(over))]

    def _end_vigil(self, key: int) -> None:
        session = self._vigils.pop(key, None)
        if session is not None:
            with suppress(Exception):
                session.close()
