"""The keeper itself: a thread that sleeps until a heartbeat is due, hears of releases, and does what was left over."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

from holdfast.database.sessions import Session
from holdfast.database.url import Database
from holdfast.errors import Busy, EngineError, Refused, SessionUnsafe
from holdfast.lease.books import PURGE_EVERY
from holdfast.lease.heart import Heart
from holdfast.lease.pulse import LINGER, Chore, Pulse
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.log import logger

log = logger("holdfast.keeper")

EXIT_BUDGET = 2.0
THREAD = "holdfast-keeper"
SESSION = 7845
"""What the key of every session that is held begins with, so that `lock_label` knows one that has no lease."""


class Keeper(Heart):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._thread: threading.Thread | None = None
        self._bell = (-1, -1)
        self._asleep_until = 0.0
        self._closing = False

    def close(self, timeout: float) -> None:
        """End everything that is kept; the thread does it."""
        with self._lock:
            thread, self._closing = self._thread, True
            if thread is not None:
                self._ring_bell()
        if thread is not None:
            thread.join(timeout)

    def _wake_by(self, when: float) -> None:
        if self._thread is None or when < self._asleep_until:
            self._ring()

    def _ring(self) -> None:
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                self._ring_bell()
            elif not self._closing:
                self._start()

    def _start(self) -> None:
        bell = os.pipe()
        for end in bell:
            os.set_blocking(end, False)
        thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._bell, self._thread = bell, thread
        try:
            thread.start()
        except RuntimeError:  # no room for another thread: whoever asked is told, and the next one tries again
            self._thread = None
            for end in bell:
                os.close(end)
            raise

    def _ring_bell(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._bell[1], b".")

    def _run(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():  # a signal came in between, and another was started
                return
        while True:
            try:
                if self._finished():
                    return
                self._sleep()
                self._beat_all()
                self._listen()
                self._beat_all()
                self._do_chores()
                self._run_timers()
            except Exception as error:  # never die: every lease of this process hangs on this thread
                log.exception(
                    "the keeper of %s stumbled and goes on",
                    self.database,
                    extra={"event": "keeper.stumbled", "database": str(self.database)},
                )
                self._disconnect(error)
                time.sleep(0.05)

    def _finished(self) -> bool:
        with self._lock:
            if self._closing:
                self._end_all()
            elif self._next_due() is not None or self._ears.needed():
                return False
            if not self._expiring:  # else it ends with the process
                self._disconnect(None)
            self._ears.close()
            for end in self._bell:
                os.close(end)
            self._thread = None
            return True

    def _end_all(self) -> None:
        deadline = now() + EXIT_BUDGET
        last = [each for each in self._chores if each.statement != "purge"]
        last += [Chore("beat_end", {"beat": pulse.beat}, 0.0, 0.0) for pulse in self._pulses]
        while last:
            chore, left = last[-1], max(0.05, deadline - now())
            try:
                rows = self._connected(left).call(chore.statement, chore.parameters, left)
                if rows and rows[0].get("ended") and now() < deadline:
                    continue  # there may be more of them
            except (Refused, Busy):
                pass  # that one: a transaction that it protects is still open
            except EngineError:
                break
            last.pop()
        self._pulses, self._chores, self._timers = [], [], []

    def _sleep(self) -> None:
        with self._lock:
            due = self._next_due()
            self._asleep_until = due if due is not None else now() + 3600.0
            idle = not self._pulses and not self._expiring and not self._ears.needed()
            if idle and self._asleep_until > now() + LINGER:
                self._disconnect(None)  # a chore for later is no reason to stay connected
            descriptors = [self._bell[0], *self._ears.descriptors()]
            if self._session is not None and (own := self._session.fileno()) is not None:
                descriptors.append(own)
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, self._asleep_until - now()) * 1000 + 0.5)
        self._asleep_until = 0.0
        with suppress(BlockingIOError):
            os.read(self._bell[0], 4096)

    def _next_due(self) -> float | None:
        dues = [when for pulse in self._pulses for when in (self._beat_due(pulse), pulse.ends_at()) if when is not None]
        dues += [pulse.trust.over for pulse in self._expiring]
        dues += [chore.due for chore in self._chores]
        dues += [when for when, _ in self._timers]
        if self._pulses:
            dues.append(self._purge_at)
        if (arrange := self._ears.due()) is not None:
            dues.append(arrange)
        if self._wanting_session:
            dues.append(0.0)
        return min(dues, default=None)

    @staticmethod
    def _beat_due(pulse: Pulse) -> float:
        return min(pulse.due, pulse.trust.until)

    def _listen(self) -> None:
        self._ears.hear_vigils()
        try:
            if self._session is not None:
                for name in self._session.notifications():
                    self._ears.wake(name)
            due = self._ears.due()
            if self._wanting_session or (due is not None and due <= now()):
                self._arrange()
        except EngineError as error:
            log.debug("the keeper's session on %s: %s", self.database, error)
            self._ears.back_off()
            self._doubt(error)

    def _arrange(self) -> None:
        with self._lock:
            wanting, self._wanting_session = self._wanting_session, []
        try:
            session = self._connected(self._patience())
            if wanting and self.session_key is None:
                self._hold_session(session)
            self._ears.arrange(session, self._patience())
            if not session.pooled:
                self._ears.stand_vigil(self._patience())
        except EngineError as error:
            self.session_problem = error
            raise
        finally:
            if wanting:
                self.later(LINGER, lambda: None)  # the session stays until the acquire that wants it has come back
            for ready in wanting:
                ready()

    def _hold_session(self, session: Session) -> None:
        key = SESSION << 48 | int.from_bytes(os.urandom(6))
        if not session.pooled and session.hold(key, self._patience()):
            self.session_key, self.session_problem = key, None
        else:
            self.session_problem = SessionUnsafe(
                f"failover='session' needs a session of our own on {self.database}, and a pooler or the platform "
                "denies it: give a direct URL, or use failover='ttl'"
            )

    def _do_chores(self) -> None:
        with self._lock:
            if self._pulses and self._purge_at <= now():
                self._purge_at = now() + jitter(0.5 * PURGE_EVERY, PURGE_EVERY)
                self._chores.append(Chore("purge", {}, now(), now() + PURGE_EVERY, until=False))
            due = [chore for chore in self._chores if chore.due <= now()]
        for chore in due:
            with self._lock:
                if any(self._beat_due(pulse) <= now() for pulse in self._pulses):
                    return  # heartbeats first; the rest is still due
            answer = self._say(chore)
            with self._lock:
                if chore.settled(answer, now()):
                    self._chores.remove(chore)
                else:
                    chore.put_off(answer, now())

    def _say(self, chore: Chore) -> bool | None:
        """Its first value as a truth, or None when there was no answer."""
        timeout = self._patience()
        try:
            rows = self._connected(timeout).call(chore.statement, chore.parameters, timeout)
        except EngineError as error:
            log.debug("%s on %s: %s", chore.statement, self.database, error)
            self._doubt(error)
            return None
        return bool(rows and next(iter(rows[0].values())))

    def _run_timers(self) -> None:
        with self._lock:
            due = [timer for timer in self._timers if timer[0] <= now()]
            self._timers = [timer for timer in self._timers if timer not in due]
        for _, callback in due:
            callback()
