"""The background thread of a database: its session, its timers, the names it listens for, and statements to retry.

A process has one for each database, shared by all clients of both flavours, so a blocked event loop, an exhausted pool
or another database that does not answer cannot delay it. There is a second thread
(``brittle``) for leases that one missed heartbeat ends: the timeout of a thread's calls follows from its lease with the
least time left, so in one thread a short ordinary lease would shorten the calls that renew brittle ones.

It knows no leases. ``lease/keeper.py`` registers its heartbeat here, and heartbeats go before everything else. The
thread starts with the first thing to do, ends with the last, and survives every error: all leases depend on it.
"""

from __future__ import annotations

import atexit
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from holdfast.database.listener import Listener, Wake
from holdfast.database.session_locks import require_session_locks
from holdfast.database.sessions import Session, open_session
from holdfast.database.url import Database
from holdfast.errors import Busy, EngineError, HoldfastError, Refused, SessionUnsafe
from holdfast.runtime import forks
from holdfast.runtime.clock import now
from holdfast.runtime.log import ERROR, logger

log = logger("holdfast.background")

EXIT_BUDGET = 2.0
"""Seconds that the end of the process waits for the last statements."""
LINGER = 1.0
"""Seconds that the session stays open for whatever comes next."""
CALL_TIMEOUT = 2.0
"""How long one call may take while there is no heartbeat."""
THREAD = "holdfast-background"
SESSION_KEYS = 7845
"""The first 16 bits of every session key: ``lock_label`` recognises a key that belongs to no lease by them."""
OWNER_KEYS = 7846
"""The first 16 bits of every owner key, which ``beat_look`` treats otherwise: see ``Background.owner_key``."""
OWNER_KEY_RETRY = 60.0
"""Seconds until an owner key is asked for again, where sessions cannot be used."""
OWNER_KEY_TRIES = 3
"""Failed attempts to lock the key after which a claim goes on without it."""


class Heartbeat(Protocol):
    """What has to be renewed in time. Called in the background thread, except ``last_statements``."""

    def next_due(self) -> float | None: ...
    def beat(self) -> None:
        """Do everything that is due."""

    def call_timeout(self) -> float:
        """How long one call may take so that nothing is lost by it."""

    def needs_session(self) -> bool: ...
    def needs_owner_key(self) -> bool: ...
    def show_owner(self) -> None:
        """The owner key was free, or still is: send a heartbeat, which shows that this process lives."""

    def session_lost(self, error: Exception | None) -> None: ...
    def last_statements(self) -> list[tuple[str, dict[str, Any]]]:
        """The process ends: what gives back everything that is held. Nothing is renewed after this."""


class PendingStatement:
    """A statement to retry until it is answered or ``give_up`` has passed.

    ``until=True``: retry until it returns true. It releases a lease whose acquire was not answered and may reach the
    database later. ``until=False``: retry until it returns false, because each call does one batch of a larger job.
    None: any answer will do.
    """

    def __init__(
        self, statement: str, parameters: dict[str, Any], due: float, give_up: float, until: bool | None
    ) -> None:
        self.statement, self.parameters = statement, parameters
        self.due, self.give_up, self.until = due, give_up, until
        self.failures = 0

    def is_done(self, answer: bool | None, now: float) -> bool:
        return (answer is not None and self.until in (None, answer)) or now >= self.give_up

    def postpone(self, answer: bool | None, now: float) -> None:
        """Back off after a failure. A job with more batches goes on at once."""
        self.failures = self.failures + 1 if answer is None or self.until else 0
        self.due = now + min(0.05 * 4.0 ** min(self.failures, 5), 30.0)


class Background:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.lock = threading.RLock()
        """Guards this object, its listener and its heartbeat."""
        self.heartbeat: Heartbeat | None = None
        self.listener = Listener(database, self.lock)
        self.session_key: int | None = None
        """Locked in the session while that lives: a standby that finds it free knows that this process is gone."""
        self.session_error: HoldfastError | None = None
        """Why there is no session key."""
        self.owner_key = OWNER_KEYS << 48 | int.from_bytes(os.urandom(6))
        """Locked while this process lives, and taken again in each new session, so that it is free for moments only. A
        successor that finds it free twice knows that this process is gone, or cut off."""
        self.has_owner_key = False
        self.lacks_owner_key_until = 0.0
        """Sessions cannot be used here, as found at the last request."""
        self._owner_key_requests: list[Callable[[], None]] = []
        self._owner_key_due = 0.0
        self._owner_key_failures = 0
        self._session: Session | None = None
        self._pending: list[PendingStatement] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._key_requests: list[Callable[[], None]] = []
        self._session_users: set[str] = set()
        """Tokens of acquires in flight that refer to the session key."""
        self._thread: threading.Thread | None = None
        self._wakeup = (-1, -1)
        """A pipe that ends the thread's sleep."""
        self._asleep_until = 0.0
        """0 while it is awake."""
        self._overslept = 0.0
        self._closing = False

    # What any thread may call. Nothing here waits for the database.

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` in the background thread after ``delay`` seconds."""
        with self.lock:
            self._timers.append((now() + delay, callback))
            self.wake_by(now() + delay)

    def retry(
        self,
        statement: str,
        parameters: dict[str, Any],
        *,
        patience: float,
        until: bool | None = None,
        delay: float = 0.0,
    ) -> None:
        """Send ``statement`` after ``delay`` seconds, and again until it is answered as ``until`` demands. Give up
        after ``patience`` seconds. See PendingStatement."""
        with self.lock:
            due = now() + delay
            self._pending.append(PendingStatement(statement, parameters, due, due + patience, until))
            self.wake_by(due)

    def subscribe(self, name: str, wake: Wake) -> None:
        """Call ``wake`` when ``name`` may be free, and once when listening has begun: no release is missed."""
        self.listener.add(name, wake)
        self.wake()

    def unsubscribe(self, name: str, wake: Wake) -> None:
        self.listener.remove(name, wake)
        self.wake()

    def watch_session(self, name: str, session_key: int) -> None:
        """Wake the subscribers of ``name``, too, when the session that has locked ``session_key`` is gone."""
        if self.listener.set_holder(name, session_key):
            self.wake()

    def request_session_key(self, user: str, ready: Callable[[], None]) -> None:
        """Open the session and lock a key in it, then call ``ready``: ``session_key`` or ``session_error`` is set. The
        session stays open until ``leave_session(user)``."""
        with self.lock:
            self._session_users.add(user)
            self._key_requests.append(ready)
        self.wake()

    def leave_session(self, user: str) -> None:
        with self.lock:
            if user in self._session_users:
                self._session_users.remove(user)
                self.call_later(LINGER, lambda: None)  # a refused acquire may be repeated soon

    def request_owner_key(self, ready: Callable[[], None]) -> None:
        """Lock the owner key, then call ``ready``: ``has_owner_key`` is set, unless sessions cannot be used, or several
        attempts have failed."""
        with self.lock:
            self._owner_key_requests.append(ready)
            self._owner_key_due = 0.0
        self.wake()

    def wake_by(self, when: float) -> None:
        """The thread must not sleep beyond ``when``."""
        if self._thread is None or not self._thread.is_alive() or when < self._asleep_until:
            self.wake()

    def wake(self) -> None:
        """There is something to do: end the thread's sleep, or start it."""
        with self.lock:
            if self._thread is not None and self._thread.is_alive():
                self._interrupt_sleep()
            elif not self._closing:
                self._start()

    def late(self) -> float:
        """Seconds by which the thread has overslept: until now, or when it last woke up. The process was paused, or the
        machine was."""
        until = self._asleep_until
        return max(0.0, now() - until) if until else self._overslept

    def close(self, timeout: float) -> None:
        """Give back what is held and end the thread; waits for it for ``timeout`` seconds."""
        with self.lock:
            thread, self._closing = self._thread, True
            if thread is not None:
                self._interrupt_sleep()
        if thread is not None:
            thread.join(timeout)

    # What only the background thread calls.

    def session(self, timeout: float) -> Session:
        """The open session, or a new one. EngineError when the file it was opened on has been replaced."""
        if self._session is None:
            self._session = open_session(self.database, timeout)
        else:
            self._session.check_target()
        return self._session

    def drop_session(self, error: Exception | None) -> None:
        """Close the session: its session key is gone, and notifications may be lost. ``error``: why; None when it is no
        longer needed."""
        session, self._session, self.session_key, self.has_owner_key = self._session, None, None, False
        if session is not None:
            with suppress(Exception):
                session.close()
            self.listener.session_lost()
        if self.heartbeat is not None:
            self.heartbeat.session_lost(error)

    def doubt_session(self, error: EngineError) -> None:
        """Drop the session after ``error``, unless that error was an answer, or a wait for another writer."""
        if not isinstance(error, Refused | Busy):
            self.drop_session(error)

    def call_timeout(self) -> float:
        return CALL_TIMEOUT if self.heartbeat is None else self.heartbeat.call_timeout()

    def _start(self) -> None:
        pipe = os.pipe()
        for end in pipe:
            os.set_blocking(end, False)
        thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._wakeup, self._thread = pipe, thread
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads: the caller is told, and the next call tries again
            self._thread = None
            for end in pipe:
                os.close(end)
            raise

    def _interrupt_sleep(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wakeup[1], b".")

    def _run(self) -> None:
        with self.lock:
            if self._thread is not threading.current_thread():  # a signal handler started another one in between
                return
        while True:
            try:
                if self._finish():
                    return
                self._sleep()
                self._take_owner_key()
                self._beat()
                self._listen()
                self._beat()
                self._send_pending()
                self._run_timers()
            except Exception as error:
                log.event(
                    "background.failed", ERROR,
                    "the background thread for %(database)s had an unexpected error, and continues",
                    exc_info=True, database=str(self.database),
                )  # fmt: skip
                self.drop_session(error)
                time.sleep(0.05)

    def _finish(self) -> bool:
        """End the thread if there is nothing left to do, or the process ends. True when it ended."""
        with self.lock:
            if self._closing:
                self._send_last()
            elif self._next_due() is not None or self.listener.is_needed():
                return False
            if not self._needs_session():  # else the session ends with the process
                self.drop_session(None)
            self.listener.close()
            for end in self._wakeup:
                os.close(end)
            self._thread = None
            return True

    def _send_last(self) -> None:
        deadline = now() + EXIT_BUDGET
        last = [(each.statement, each.parameters) for each in self._pending if each.statement != "purge"]
        if self.heartbeat is not None:
            last += self.heartbeat.last_statements()
        self._pending, self._timers = [], []
        while last:
            left = max(0.05, deadline - now())
            try:
                rows = self.session(left).call(*last[-1], left)
                if rows and rows[0].get("ended") and now() < deadline:
                    continue  # there may be another batch
            except (Refused, Busy):
                pass  # this one alone: a transaction that it protects is still open
            except EngineError:
                break
            last.pop()

    def _sleep(self) -> None:
        with self.lock:
            due = self._next_due()
            self._asleep_until = due if due is not None else now() + 3600.0
            if not self._needs_session() and not self.listener.is_needed() and self._asleep_until > now() + LINGER:
                self.drop_session(None)
            descriptors = [self._wakeup[0], *self.listener.descriptors()]
            if self._session is not None and (own := self._session.fileno()) is not None:
                descriptors.append(own)
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, self._asleep_until - now()) * 1000 + 0.5)
        self._overslept = max(0.0, now() - self._asleep_until)
        self._asleep_until = 0.0
        with suppress(BlockingIOError):
            os.read(self._wakeup[0], 4096)

    def _needs_session(self) -> bool:
        return bool(self._session_users) or (self.heartbeat is not None and self.heartbeat.needs_session())

    def _heartbeat_due(self) -> float | None:
        return None if self.heartbeat is None else self.heartbeat.next_due()

    def _next_due(self) -> float | None:
        dues = [pending.due for pending in self._pending]
        dues += [when for when, _ in self._timers]
        dues += [when for when in (self._heartbeat_due(), self.listener.next_due()) if when is not None]
        if self._key_requests:
            dues.append(0.0)
        if self._wants_owner_key():
            dues.append(self._owner_key_due)
        return min(dues, default=None)

    def _wants_owner_key(self) -> bool:
        is_needed = self.heartbeat is not None and self.heartbeat.needs_owner_key()
        return bool(self._owner_key_requests) or (is_needed and not self.has_owner_key)

    def _take_owner_key(self) -> None:
        """Lock the owner key again in a new session. A process that finds it free twice without a heartbeat in between
        takes this one for dead, so a heartbeat follows each attempt, also where the server refuses the lock."""
        with self.lock:
            if not self._wants_owner_key() or self._owner_key_due > now():
                return
            requests, self._owner_key_requests = self._owner_key_requests, []
            if requests:
                self.call_later(LINGER, lambda: None)  # the session stays open for the acquire that follows
        try:
            if not self.has_owner_key:
                self._lock_owner_key(self.session(self.call_timeout()))
        except SessionUnsafe:
            self.lacks_owner_key_until = now() + OWNER_KEY_RETRY
        except EngineError as error:
            log.debug("the owner key on %s: %s", self.database, error)
            self.doubt_session(error)
        finally:
            if not self.has_owner_key:
                self._owner_key_failures += 1
                self._owner_key_due = now() + min(0.01 * 2 ** min(self._owner_key_failures, 6), 0.2)
            if self._session is not None and self.heartbeat is not None:
                self.heartbeat.show_owner()
            is_decided = self.has_owner_key or now() < self.lacks_owner_key_until
            if is_decided or self._owner_key_failures >= OWNER_KEY_TRIES:
                for ready in requests:
                    ready()
            else:
                with self.lock:
                    self._owner_key_requests += requests

    def _lock_owner_key(self, session: Session) -> None:
        """Not locked when it is being looked at this moment: then it is retried soon."""
        if session.pooled:
            raise SessionUnsafe(f"a pooler is between us and {self.database}")
        if self.database.dialect == "postgres":
            require_session_locks(self.database, session, self.call_timeout())
        self.has_owner_key = session.hold_shared(self.owner_key, self.call_timeout())
        if self.has_owner_key:
            self._owner_key_failures = 0
        elif self.database.dialect == "sqlite":
            raise SessionUnsafe("the platform has no file locks")

    def _beat(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat()

    def _listen(self) -> None:
        self.listener.check_watched_sessions()
        try:
            if self._session is not None:
                for payload in self._session.notifications():
                    self.listener.notified(payload)
            due = self.listener.next_due()
            if self._key_requests or (due is not None and due <= now()):
                self._update_session()
        except EngineError as error:
            log.debug("the background session on %s: %s", self.database, error)
            self.listener.back_off()
            self.doubt_session(error)

    def _update_session(self) -> None:
        """Lock the session key if it was requested, and tell the server which names to listen for."""
        with self.lock:
            requests, self._key_requests = self._key_requests, []
        try:
            session = self.session(self.call_timeout())
            if requests and self.session_key is None:
                self._lock_session_key(session)
            self.listener.update(session, self.call_timeout())
            if not session.pooled:
                self.listener.watch_sessions(self.call_timeout())
        except EngineError as error:
            self.session_error = error
            raise
        finally:
            for ready in requests:
                ready()

    def _lock_session_key(self, session: Session) -> None:
        key = SESSION_KEYS << 48 | int.from_bytes(os.urandom(6))
        try:
            if not session.pooled and self.database.dialect == "postgres":
                require_session_locks(self.database, session, self.call_timeout())
        except SessionUnsafe as error:
            self.session_error = error
            return
        if not session.pooled and session.hold(key, self.call_timeout()):
            self.session_key, self.session_error = key, None
        else:
            self.session_error = SessionUnsafe(
                f"failover='session' needs a direct session on {self.database}, and there is a pooler in between, or "
                "the platform has no file locks: give a direct URL, or use failover='ttl'"
            )

    def _send_pending(self) -> None:
        with self.lock:
            due = [pending for pending in self._pending if pending.due <= now()]
        for pending in due:
            if (beat := self._heartbeat_due()) is not None and beat <= now():
                return  # heartbeats first: the rest stays due
            answer = self._send(pending)
            with self.lock:
                if pending.is_done(answer, now()):
                    self._pending.remove(pending)
                else:
                    pending.postpone(answer, now())

    def _send(self, pending: PendingStatement) -> bool | None:
        """The first value of the answer as a bool, or None when there was no answer."""
        timeout = self.call_timeout()
        try:
            rows = self.session(timeout).call(pending.statement, pending.parameters, timeout)
        except EngineError as error:
            log.debug("%s on %s: %s", pending.statement, self.database, error)
            self.doubt_session(error)
            return None
        return bool(rows and next(iter(rows[0].values())))

    def _run_timers(self) -> None:
        with self.lock:
            due = [timer for timer in self._timers if timer[0] <= now()]
            self._timers = [timer for timer in self._timers if timer not in due]
        for _, callback in due:
            callback()


_backgrounds: dict[tuple[Database, bool], Background] = {}


def background_of(database: Database, *, brittle: bool = False) -> Background:
    """The background thread of ``database`` in this process; ``brittle``: the one for leases that a single missed
    heartbeat may end."""
    return _backgrounds.get((database, brittle)) or _create(database, brittle)


def backgrounds_of(database: Database) -> list[Background]:
    """Those that exist."""
    return [_backgrounds[database, brittle] for brittle in (False, True) if (database, brittle) in _backgrounds]


def _create(database: Database, brittle: bool) -> Background:
    """In one step and without a lock, because a signal handler may want it at the same moment."""
    if "multiprocessing.process" in sys.modules:
        _close_with_multiprocessing()
    return _backgrounds.setdefault((database, brittle), Background(database))


@forks.in_child
def _forget() -> None:
    """The parent's threads do not run in a forked child."""
    _backgrounds.clear()


@atexit.register
def _close_all() -> None:
    """Give back what is still held, bounded: what the database does not take in time expires."""
    backgrounds, until = list(_backgrounds.values()), now() + EXIT_BUDGET + 0.5
    for background in backgrounds:
        background.close(timeout=0.0)  # all at once
    for background in backgrounds:
        background.close(timeout=max(0.0, until - now()))


def _close_with_multiprocessing() -> None:
    """A child that multiprocessing forked ends without the exit functions that its parent has registered: up to Python
    3.12 without any, and later without those from before the fork."""
    from multiprocessing import parent_process
    from multiprocessing.util import Finalize

    if parent_process() is not None:
        Finalize(None, _close_alone, exitpriority=-10)  # after its own children, and the threads of its queues


def _close_alone() -> None:
    """Close unless other threads are left. One of them may still work under a lease, which must not be released before
    it ends; it expires instead."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if all(thread.name == THREAD for thread in others):
        _close_all()
