"""The heartbeats themselves, and the session that they go through: what each answer means, and who is told."""

from __future__ import annotations

from contextlib import suppress

from holdfast.database.sessions import Session, open_session
from holdfast.database.url import Database
from holdfast.errors import Busy, EngineError, HoldfastError, LeaseLost, OwnershipUnknown, Refused
from holdfast.lease.books import PURGE_EVERY, Books
from holdfast.lease.pulse import Chore, Holding, Pulse
from holdfast.lease.trust import Answer, Step, after, backoff, budget
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.log import logger

log = logger("holdfast.keeper")


class Heart(Books):
    """Only the keeper's thread calls what is here, but for ``_lose``."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._session: Session | None = None

    def _beat_all(self) -> None:
        with self._lock:
            self._expiring = [pulse for pulse in self._expiring if pulse.trust.over > now()]
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
                self._chores.append(
                    Chore("beat_end", {"beat": pulse.beat}, now(), now() + pulse.trust.ttl, until=False)
                )
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
        with self._lock:
            orphans = pulse.orphans()
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

    def _patience(self) -> float:
        """How long one call may take, so that no lease is lost over it."""
        with self._lock:
            return budget(min((pulse.trust.left(now()) for pulse in self._pulses), default=6.0))

    def _connected(self, timeout: float) -> Session:
        if self._session is None:
            self._session = open_session(self.database, timeout)
        else:
            self._session.look()
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
            self._expiring.clear()
            ended = [pulse for pulse in self._pulses if pulse.session_key is not None]
        for pulse in ended:
            self._lose(pulse, OwnershipUnknown(f"the session that held it was lost ({error})"))
