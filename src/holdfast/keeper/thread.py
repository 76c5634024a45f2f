"""The keeper itself: its thread, its session, its heartbeats."""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

from holdfast._wire import Session, open_session, telemetry
from holdfast._wire.clock import jitter, now
from holdfast._wire.database import Database
from holdfast._wire.log import logger
from holdfast.core.errors import Busy, EngineError, HoldfastError, LeaseLost, OwnershipUnknown, Refused, SessionUnsafe
from holdfast.core.renewal import Answer, Step, after, backoff, budget
from holdfast.keeper.books import PURGE_EVERY, Books
from holdfast.keeper.pulse import LINGER, Chore, Holding, Pulse

log = logger("holdfast.keeper")

EXIT_BUDGET = 2.0


class Keeper(Books):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._session: Session | None = None
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
        thread = threading.Thread(target=self._run, name="holdfast-keeper", daemon=True)
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
            self._disconnect(None)
            self._ears.close()
            for end in self._bell:
                os.close(end)
            self._thread = None
            return True

    def _end_all(self) -> None:
        deadline = now() + EXIT_BUDGET
        last = [Chore("beat_end", {"beat": pulse.beat}, 0.0, 0.0) for pulse in self._pulses]
        for chore in [*last, *(each for each in self._chores if each.statement != "purge")]:
            left = max(0.05, deadline - now())
            try:
                self._connected(left).call(chore.statement, chore.parameters, left)
            except (Refused, Busy):
                continue  # that one: a transaction that it protects is still open
            except EngineError:
                break
        self._pulses, self._chores, self._timers = [], [], []

    def _sleep(self) -> None:
        with self._lock:
            due = self._next_due()
            self._asleep_until = due if due is not None else now() + 3600.0
            if not self._pulses and not self._ears.needed() and self._asleep_until > now() + LINGER:
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

    def _patience(self) -> float:
        """How long one call may take, so that no lease is lost over it."""
        with self._lock:
            return budget(min((pulse.trust.left(now()) for pulse in self._pulses), default=6.0))

    def _connected(self, timeout: float) -> Session:
        if self._session is None:
            self._session = open_session(self.database, timeout)
        return self._session

    def _doubt(self, error: EngineError) -> None:
        """After an error: is the session still good? An answer shows that it is, and so does having to wait in line."""
        if not isinstance(error, Refused | Busy):
            self._disconnect(error)

    def _disconnect(self, error: Exception | None) -> None:
        """The session is gone, and whatever lived in it."""
        session, self._session, self.session_key = self._session, None, None
        if session is not None:
            with suppress(Exception):
                session.close()
            self._ears.deaf()
        with self._lock:
            ended = [pulse for pulse in self._pulses if pulse.session_key is not None]
        for pulse in ended:
            self._lose(pulse, OwnershipUnknown(f"the session that held it was lost ({error})"))

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
        key = int.from_bytes(os.urandom(8)) >> 2
        if not session.pooled and session.hold(key, self._patience()):
            self.session_key, self.session_problem = key, None
        else:
            self.session_problem = SessionUnsafe(
                f"failover='session' needs a session of our own on {self.database}, and a pooler or the platform "
                "denies it: give a direct URL, or use failover='ttl'"
            )

    def _beat_all(self) -> None:
        with self._lock:
            pulses = sorted(self._pulses, key=lambda pulse: pulse.trust.until)
        for pulse in pulses:
            ends_at = pulse.ends_at()
            if ends_at is not None and ends_at <= now():
                self._end(pulse)
            elif pulse.trust.left(now()) <= 0:  # told before anything else is asked, which may take its time
                self._lose(pulse, OwnershipUnknown("the database did not answer before our trust in it ended"))
            elif pulse.due <= now():
                self._beat(pulse)

    def _end(self, pulse: Pulse) -> None:
        with self._lock:
            if pulse.ends_at() is not None and pulse in self._pulses:
                self._pulses.remove(pulse)
                self._chores.append(Chore("beat_end", {"beat": pulse.beat}, now(), now() + pulse.trust.ttl))
                self._chores.append(Chore("purge", {}, now(), now()))

    def _beat(self, pulse: Pulse) -> None:
        self._drop_orphans(pulse)
        asked_at = now()
        answer, generation = self._ask(pulse)
        if telemetry.listeners:
            telemetry.tell("keeper.beat", outcome=answer.value, seconds=now() - asked_at)
        with self._lock:
            if pulse not in self._pulses:  # lost meanwhile, with its session
                return
            step, pulse.trust = after(answer, pulse.trust, asked_at, now())
        if step is Step.KEEP:
            if pulse.failures:
                log.info(
                    "the heartbeat of %s is back after %d failures",
                    self.database,
                    pulse.failures,
                    extra={
                        "event": "keeper.beat",
                        "database": str(self.database),
                        "outcome": "renewed",
                        "failures": pulse.failures,
                    },
                )
            pulse.due, pulse.failures, pulse.problem = asked_at + pulse.every, 0, None
            if generation == pulse.generation or self._reconcile(pulse, generation):
                self._let_hear(pulse)
        elif step is Step.RETRY:
            pulse.failures += 1
            pulse.due = now() + backoff(pulse.failures, pulse.trust.left(now()))
            self._let_hear(pulse)
        elif step is Step.TELL_LOST:
            self._lose(pulse, LeaseLost("it expired before a heartbeat reached the database"))
        else:
            self._lose(pulse, OwnershipUnknown("the database did not answer before our trust in it ended"))

    def _ask(self, pulse: Pulse) -> tuple[Answer, int]:
        try:
            session = self._connected(self._patience() * 2)
            rows = session.call("beat_renew", {"beat": pulse.beat}, self._patience())
        except EngineError as error:
            left = pulse.trust.left(now())
            log.warning(
                "a heartbeat of %s failed, %.1f s of trust left: %s",
                self.database,
                left,
                error,
                extra={
                    "event": "keeper.beat",
                    "database": str(self.database),
                    "outcome": "unknown",
                    "error": str(error),
                },
            )
            pulse.problem = error
            self._doubt(error)
            return Answer.UNKNOWN, 0
        return (Answer.RENEWED, rows[0]["generation"]) if rows else (Answer.LOST, 0)

    def _drop_orphans(self, pulse: Pulse) -> None:
        """Leases of an event loop that was closed without a word."""
        with self._lock:
            dead = [owner for owner, count in pulse.owners.items() if count and not owner.alive()]
            orphans = [holding for owner in dead for holding in pulse.of_owner(owner)]
        for holding in orphans:
            self.drop(pulse, holding.token)
            self.release_later(holding.name, holding.token)

    def _reconcile(self, pulse: Pulse, generation: int) -> bool:
        """One of ours was taken away while the beat lived: by force, or by a twin of the same holder; or it is asked
        back. Whether we know whose by now: until then this heartbeat is good news to nobody.

        An acquire that is under way may have been granted and taken away already: until it has told us what it got,
        the same generation is looked at again."""
        with self._lock:
            known, under_way = dict(pulse.holdings), pulse.borrowed
        try:
            rows = self._connected(self._patience()).call("beat_leases", {"beat": pulse.beat}, self._patience())
            wanted = self._connected(self._patience()).call("beat_wanted", {"beat": pulse.beat}, self._patience())
        except EngineError as error:
            self._doubt(error)
            pulse.due = now() + backoff(1, pulse.trust.left(now()))  # the generation still differs: it asks again
            return False
        left, asked = {row["token"] for row in rows}, {row["token"] for row in wanted}
        if not under_way:
            pulse.generation = generation
        for token, holding in known.items():
            if token not in left and self.drop(pulse, token):
                self._tell(holding, LeaseLost("it was taken away by force, or by another process of the same holder"))
            elif token in asked and holding.recalled is not None:
                holding.recalled()
        return True

    def _lose(self, pulse: Pulse, error: HoldfastError) -> None:
        with self._lock:
            if pulse not in self._pulses:
                return
            self._pulses.remove(pulse)
            holdings = list(pulse.holdings.values())
            # Not ended by us: the work may not have stopped yet. It expires, or goes with the release of its grant.
            gone = now() + pulse.trust.ttl
            self._chores.append(Chore("purge", {}, gone, gone + PURGE_EVERY, until=False))
        error.__cause__ = pulse.problem
        if holdings:
            log.error(
                "%d lease(s) on %s lost: %s",
                len(holdings),
                self.database,
                error,
                extra={
                    "event": "lease.lost",
                    "database": str(self.database),
                    "count": len(holdings),
                    "reason": type(error).__name__,
                },
            )
        for holding in holdings:
            self._tell(holding, error)

    def _tell(self, holding: Holding, error: HoldfastError) -> None:
        try:
            holding.tell(error)
        except Exception:
            log.exception(
                "on_lost of lease %r failed",
                holding.name,
                extra={"event": "lease.callback_failed", "lease": holding.name},
            )

    def _let_hear(self, pulse: Pulse) -> None:
        if pulse.shared:  # nobody on it wants to be told: ten thousand are not looked at for that
            return
        with self._lock:
            heard = [holding.heard for holding in pulse.holdings.values() if holding.heard is not None]
        for each in heard:
            each(pulse.problem)

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
