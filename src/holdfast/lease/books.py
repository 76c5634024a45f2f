"""What any thread may ask of the keeper: the books it keeps, under one lock. Nothing here waits for the database."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.database.url import Database
from holdfast.errors import HoldfastError, OwnershipUnknown
from holdfast.lease.pulse import LINGER, Chore, Holding, Owner, Pulse
from holdfast.lease.release_listener import Ears, Wake
from holdfast.lease.trust import Answer, Trust, after, first_beat
from holdfast.runtime.clock import now

PURGE_EVERY = 60.0


class Books(ABC):
    def __init__(self, database: Database) -> None:
        self.database = database
        self.session_key: int | None = None
        """Held in the session as long as that lives: a standby that finds it free knows that we are gone."""
        self.session_problem: HoldfastError | None = None
        self._lock = threading.RLock()
        self._ears = Ears(database, self._lock)
        self._pulses: list[Pulse] = []
        self._founding: list[Pulse] = []
        """Asked for with an acquire that is under way: the first that is granted makes the beat, for all of them."""
        self._expiring: list[Pulse] = []
        """Renewed no more, and not over yet: without the session they live in they would be another's at once."""
        self._chores: list[Chore] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._wanting_session: list[Callable[[], None]] = []
        self._purge_at = 0.0

    def gauges(self) -> Iterator[tuple[str, float]]:
        with self._lock:
            yield "leases_held", float(sum(len(pulse.holdings) for pulse in self._pulses))
            yield "lease_waiters", float(self._ears.waiters())
            if self._pulses:
                yield "heartbeat_age_seconds", max(pulse.trust.age(now()) for pulse in self._pulses)

    def borrow(self, ttl: float, session_key: int | None, *, instead_of: Pulse | None = None) -> Pulse:
        """A pulse for one more lease, kept until it is given back: one that beats, or one to be, for all who ask now.
        ``instead_of`` one that turned out to be lost."""
        with self._lock:
            if instead_of in self._founding:
                self._founding.remove(instead_of)
            for pulse in [*self._pulses, *self._founding]:
                if pulse is not instead_of and pulse.fits(ttl, session_key, now()):
                    break
            else:
                pulse = Pulse.to_be(ttl, session_key)
                self._founding.append(pulse)
            pulse.borrowed += 1
            return pulse

    def give_back(self, pulse: Pulse) -> None:
        with self._lock:
            pulse.borrowed -= 1
            if pulse.founded:
                self._notice_empty(pulse)
            elif not pulse.borrowed:
                self._founding = [each for each in self._founding if each is not pulse]
                if pulse.doubted:
                    self._add_chore("beat_end", {"beat": pulse.beat}, patience=65.0, until=True)

    def keep(
        self,
        beat: str,
        trust: Trust,
        every: float,
        holding: Holding,
        *,
        session_key: int | None = None,
    ) -> Pulse:
        """Renew ``beat`` from now on, for ``holding``; for it alone when it wants to be told of every heartbeat."""
        with self._lock:
            pulse = next((each for each in [*self._pulses, *self._founding] if each.beat == beat), None)
            if pulse is None:
                pulse = Pulse(beat, trust, session_key)
            if not pulse.founded:
                pulse.found(trust, every, now() + first_beat(trust.ttl, every))
                self._founding = [each for each in self._founding if each is not pulse]
                self._pulses.append(pulse)
                self._purge_at = max(self._purge_at, pulse.due)  # with the first heartbeat, not on its own
            pulse.shared = holding.heard is None
            if every < pulse.every:
                pulse.every, pulse.due = every, min(pulse.due, now() + every)
            pulse.add(holding)
            self._wake_by(pulse.due)
        if session_key is not None and session_key != self.session_key:
            self._lose(pulse, OwnershipUnknown("the session that held it was lost"))
        return pulse

    def drop(self, pulse: Pulse, token: str) -> bool:
        """The lease was released, or has passed on; whether it was kept until now."""
        with self._lock:
            there = pulse.remove(token) is not None and pulse in self._pulses
            self._notice_empty(pulse)
            return there

    def let_expire(self, pulse: Pulse) -> None:
        """Renew it no more, and do not end it either: it is over when its time is."""
        with self._lock:
            if pulse in self._pulses:
                self._pulses.remove(pulse)
                if pulse.session_key is not None:
                    self._expiring.append(pulse)
                    self._wake_by(pulse.trust.over)

    def extend(self, pulse: Pulse, asked_at: float) -> None:
        """Somebody renewed the beat by hand."""
        with self._lock:
            pulse.trust = after(Answer.RENEWED, pulse.trust, asked_at, now())[1]

    def retire(self, owner: Owner) -> tuple[list[str], list[Holding]]:
        """A client goes: beats that are its alone, to be ended whole, and its leases on beats shared with others."""
        with self._lock:
            mine = [
                each for each in self._pulses if not each.borrowed and len(each.of_owner(owner)) == len(each.holdings)
            ]
            self._pulses = [each for each in self._pulses if each not in mine]
            shared = [holding for pulse in self._pulses for holding in pulse.of_owner(owner)]
            for pulse in self._pulses:
                for holding in shared:
                    pulse.remove(holding.token)
            return [pulse.beat for pulse in mine], shared

    def release_later(self, name: str, token: str) -> None:
        """It is ours and must go, but the database does not answer: ask until it does."""
        self._add_chore("lease_release", {"name": name, "token": token}, patience=math.inf)

    def abandon(self, name: str, token: str, ttl: float, pulse: Pulse | None, what: str = "lease") -> None:
        """Give back what may have been granted, or may yet be: the acquire may still be on its way to the server.

        With the beat that was made for it alone, if one was: nobody renews that, so after a TTL it has expired in any
        case. On a beat that lives, or may, we ask for longer than the server would let the statement run.
        """
        with self._lock:
            alone = pulse is None or (pulse in self._founding and pulse.borrowed == 1)
            if pulse is not None and alone:
                self._founding.remove(pulse)  # so that nobody else comes to live on it
            elif pulse is not None:
                pulse.doubted = True
        statement, patience = ("abandon", min(65.0, ttl)) if alone else ("release", 65.0)
        self._add_chore(f"{what}_{statement}", {"name": name, "token": token}, patience=patience, until=True)

    def say_later(self, statement: str, parameters: dict[str, Any]) -> None:
        """What a client could not say as it went. If we cannot either: nobody renews its beats, so they expire."""
        self._add_chore(statement, parameters, patience=PURGE_EVERY, until=False)

    def purge_soon(self) -> None:
        self._add_chore("purge", {}, patience=PURGE_EVERY, until=False)

    def purge_after(self, delay: float) -> None:
        """Something ends by itself then, and nobody else may be there to clear it away."""
        with self._lock:
            due = now() + delay + 0.01
            self._chores.append(Chore("purge", {}, due, due + PURGE_EVERY, until=False))
            self._wake_by(due)

    def watch(self, name: str, wake: Wake) -> None:
        """Call ``wake`` when ``name`` may be free, and once when we have begun to listen: no release is missed."""
        self._ears.add(name, wake)
        self._ring()

    def unwatch(self, name: str, wake: Wake) -> None:
        self._ears.remove(name, wake)
        self._ring()

    def waiting(self, name: str) -> int:
        """How many wait for it in this process."""
        return self._ears.count(name)

    def keep_vigil(self, name: str, session_key: int) -> None:
        """Call the waiters of ``name`` when the session that holds ``session_key`` is gone, too."""
        if self._ears.keep_vigil(name, session_key):
            self._ring()

    def wake(self, name: str) -> None:
        """Released in this very process: no need to hear it from the server."""
        self._ears.wake(name)

    def want_session(self, ready: Callable[[], None]) -> None:
        """Open the session and hold a key in it: ``session_key`` or ``session_problem`` is set at ``ready``."""
        with self._lock:
            self._wanting_session.append(ready)
        self._ring()

    def later(self, delay: float, callback: Callable[[], None]) -> None:
        with self._lock:
            self._timers.append((now() + delay, callback))
            self._wake_by(now() + delay)

    def _add_chore(
        self, statement: str, parameters: dict[str, Any], *, patience: float, until: bool | None = None
    ) -> None:
        with self._lock:
            self._chores.append(Chore(statement, parameters, now(), now() + patience, until))
        self._ring()

    def _notice_empty(self, pulse: Pulse) -> None:
        if pulse.holdings or pulse.borrowed:
            return
        known, pulse.empty_since = pulse.empty_since, now()
        self._expiring = [each for each in self._expiring if each is not pulse]
        if pulse in self._pulses:
            self._wake_by(min(pulse.due, pulse.empty_since + LINGER))
        elif known is None and all(each.beat != pulse.beat for each in self._pulses):
            # Lost before, and whoever worked under it has stopped: its row need not wait for its expiry.
            self._add_chore("beat_end", {"beat": pulse.beat}, patience=pulse.trust.ttl, until=False)

    @abstractmethod
    def _wake_by(self, when: float) -> None:
        """The thread must not sleep for longer."""

    @abstractmethod
    def _ring(self) -> None:
        """There is something to do."""

    @abstractmethod
    def _lose(self, pulse: Pulse, error: HoldfastError) -> None:
        """All leases on it are over: renew it no more, and tell their holders why."""
