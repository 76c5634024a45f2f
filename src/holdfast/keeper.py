"""The heartbeat: one daemon thread a database a process, on a session of its own, for both flavours.

It renews one row for all leases of a TTL, hears of releases that somebody here waits for, and does what could not be
done in time elsewhere (give back what a cancelled acquire may have been granted). It knows beats and tokens; what a lost
lease means is for the grant to decide. A blocked event loop or an exhausted pool cannot hold it up, and neither can
another database: that one has a thread of its own.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import select
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast._wire import Session, forks, open_session
from holdfast._wire.clock import now
from holdfast._wire.database import Database
from holdfast.core.errors import EngineError, HoldfastError, LeaseLost, OwnershipUnknown, Refused, SessionUnsafe
from holdfast.core.renewal import Answer, Step, Trust, after, backoff, budget

log = logging.getLogger("holdfast.keeper")

LINGER = 1.0
"""How long a beat without leases stays, for the next acquire to use."""
PURGE_EVERY = 60.0
MOST_WATCHED = 300
"""Names watched for release a session; each transaction costs O(locks held), so beyond this waiters only poll."""


class Owner(Protocol):
    def alive(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Holding:
    """One lease on a pulse. ``tell`` is called once, in the keeper's thread, when it is lost."""

    name: str
    token: str
    owner: Owner
    tell: Callable[[HoldfastError], None]


@dataclass(slots=True, eq=False)
class Pulse:
    """One beat row, and all leases of this process that hang on it."""

    beat: str
    trust: Trust
    every: float
    due: float
    session_key: int | None
    generation: int = 0
    failures: int = 0
    borrowed: int = 0
    holdings: dict[str, Holding] = field(default_factory=dict)
    owners: Counter[Owner] = field(default_factory=Counter)
    empty_since: float | None = None

    def ends_at(self) -> float | None:
        """When it may go, with nothing left on it."""
        if self.borrowed or self.empty_since is None:
            return None
        return min(self.due, self.empty_since + LINGER)


@dataclass(slots=True)
class Chore:
    """Something to do until it is answered. ``until_true`` ones repeat: what they undo may not have happened yet."""

    statement: str
    parameters: dict[str, Any]
    due: float
    give_up: float
    until_true: bool = False
    tries: int = 0


class Keeper:
    def __init__(self, database: Database) -> None:
        self.database = database
        self._lock = threading.RLock()
        self._pulses: list[Pulse] = []
        self._chores: list[Chore] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._watches: dict[str, list[Callable[[], None]]] = {}
        self._watched: set[str] = set()
        self._session: Session | None = None
        self.session_key: int | None = None
        """Held in the session as long as that lives; a standby that finds it free knows that we are gone."""
        self.session_problem: HoldfastError | None = None
        self._wanting_session: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._bell: tuple[int, int] | None = None
        self._asleep_until = 0.0
        self._closing = False
        self._retry_session_at = 0.0

    # -- for the engines: from any thread -------------------------------------------------------------------------

    def borrow(self, ttl: float, *, session: bool = False) -> Pulse | None:
        """A live pulse for one more lease, kept alive until ``keep`` or ``give_back``."""
        with self._lock:
            for pulse in self._pulses:
                if (
                    pulse.trust.ttl == ttl
                    and (pulse.session_key is not None) == session
                    and pulse.trust.left(now()) > 0
                ):
                    pulse.borrowed += 1
                    return pulse
        return None

    def give_back(self, pulse: Pulse) -> None:
        with self._lock:
            pulse.borrowed -= 1
            self._maybe_empty(pulse)

    def keep(self, beat: str, trust: Trust, every: float, holding: Holding, *, session_key: int | None = None) -> Pulse:
        """Renew ``beat`` from now on, for ``holding``."""
        with self._lock:
            pulse = next((each for each in self._pulses if each.beat == beat), None)
            if pulse is None:
                pulse = Pulse(beat, trust, every, now() + every, session_key)
                self._pulses.append(pulse)
                self._chore("purge", {}, due=pulse.due, give_up=pulse.due + PURGE_EVERY)
            if every < pulse.every:
                pulse.every, pulse.due = every, min(pulse.due, now() + every)
            pulse.holdings[holding.token] = holding
            pulse.owners[holding.owner] += 1
            pulse.empty_since = None
            self._wake_by(pulse.due)
        if session_key != self.session_key and session_key is not None:
            self._tell(pulse, OwnershipUnknown("the session that held it was lost"))
        return pulse

    def drop(self, pulse: Pulse, token: str) -> None:
        """The lease was released, or passed on."""
        with self._lock:
            holding = pulse.holdings.pop(token, None)
            if holding is not None:
                pulse.owners[holding.owner] -= 1
                self._maybe_empty(pulse)

    def extend(self, pulse: Pulse, asked_at: float) -> None:
        """Somebody renewed the beat by hand."""
        with self._lock:
            pulse.trust = after(Answer.RENEWED, pulse.trust, asked_at, now())[1]

    def release_later(self, name: str, token: str) -> None:
        """It is ours and must go, but the database does not answer: ask until it does."""
        self._add_chore("lease_release", {"name": name, "token": token}, patience=math.inf)

    def abandon(self, name: str, token: str) -> None:
        """Give back what may have been granted, or may yet be: an acquire nobody heard the end of may still be under way."""
        self._add_chore("lease_release", {"name": name, "token": token}, patience=65.0, until_true=True)

    def purge_soon(self) -> None:
        self._add_chore("purge", {}, patience=PURGE_EVERY)

    def retire(self, owner: Owner) -> tuple[list[str], list[Holding]]:
        """A client goes: beats that were its alone, to be ended whole, and its leases on beats shared with others."""
        with self._lock:
            mine = [
                pulse
                for pulse in self._pulses
                if not pulse.borrowed and all(each is owner or not count for each, count in pulse.owners.items())
            ]
            self._pulses = [pulse for pulse in self._pulses if pulse not in mine]
            shared = [
                holding for pulse in self._pulses for holding in pulse.holdings.values() if holding.owner is owner
            ]
            for pulse in self._pulses:
                for holding in shared:
                    self.drop(pulse, holding.token)
            return [pulse.beat for pulse in mine], shared

    def end_later(self, beat: str) -> None:
        """``retire`` could not end it: nobody renews it any more, so it expires if we cannot either."""
        self._add_chore("beat_end", {"beat": beat}, patience=5.0)

    def watch(self, name: str, wake: Callable[[], None]) -> None:
        """Call ``wake`` when ``name`` may be free; and once when we have begun to listen, so that no release is missed."""
        with self._lock:
            self._watches.setdefault(name, []).append(wake)
            self._ring()

    def unwatch(self, name: str, wake: Callable[[], None]) -> None:
        with self._lock:
            waiting = self._watches.get(name, [])
            if wake in waiting:
                waiting.remove(wake)
            if waiting:
                waiting[0]()  # it may have taken a wake-up with it
            else:
                self._watches.pop(name, None)
                if name in self._watched:
                    self._ring()

    def wake(self, name: str) -> None:
        """A lease was released in this very process: no need to hear it from the server."""
        with self._lock:
            for wake in self._watches.get(name, [])[:1]:
                wake()

    def want_session(self, ready: Callable[[], None]) -> None:
        """Open the session and hold a key in it: ``session_key`` or ``session_problem`` is set when ``ready`` is called."""
        with self._lock:
            self._wanting_session.append(ready)
            self._ring()

    def later(self, delay: float, callback: Callable[[], None]) -> None:
        with self._lock:
            self._timers.append((now() + delay, callback))
            self._wake_by(now() + delay)

    def close(self, timeout: float) -> None:
        """End everything, bounded: what cannot be said in time is left to expire."""
        with self._lock:
            thread, self._closing = self._thread, True
            self._ring()
        if thread is not None:
            thread.join(timeout)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _add_chore(
        self, statement: str, parameters: dict[str, Any], *, patience: float, until_true: bool = False
    ) -> None:
        with self._lock:
            self._chore(statement, parameters, due=now(), give_up=now() + patience, until_true=until_true)
            self._ring()

    def _chore(
        self, statement: str, parameters: dict[str, Any], *, due: float, give_up: float, until_true: bool = False
    ) -> None:
        self._chores.append(Chore(statement, parameters, due, give_up, until_true))

    def _maybe_empty(self, pulse: Pulse) -> None:
        if not pulse.holdings and not pulse.borrowed:
            pulse.empty_since = now()
            self._wake_by(min(pulse.due, pulse.empty_since + LINGER))

    def _wake_by(self, when: float) -> None:
        if self._thread is None or when < self._asleep_until:
            self._ring()

    def _ring(self) -> None:
        if self._closing:
            return
        if self._thread is None:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            os.set_blocking(writer, False)
            self._bell = (reader, writer)
            self._thread = threading.Thread(target=self._run, name=f"holdfast-keeper {self.database}", daemon=True)
            self._thread.start()
        elif self._bell is not None:
            with suppress(BlockingIOError):
                os.write(self._bell[1], b".")

    def _run(self) -> None:
        while True:
            try:
                if self._sleep():
                    return
                self._listen()
                self._beat_all()
                self._do_chores()
                self._run_timers()
            except Exception:  # never die: every lease of this process hangs on this thread
                log.exception("keeper of %s stumbled; it goes on", self.database)
                self._disconnect()

    def _sleep(self) -> bool:
        """Wait for the next thing to do. True when there is none, ever: the thread ends and its session with it."""
        with self._lock:
            if self._closing:
                self._end_all()
                return True
            due = self._next_due()
            if due is None and not self._watches and not self._wanting_session:
                self._stop()
                return True
            self._asleep_until = due if due is not None else now() + 3600
            if self._wanting_session or self._watches.keys() - self._watched:
                self._asleep_until = min(self._asleep_until, self._retry_session_at)
            bell, session = self._bell, self._session
        assert bell is not None
        poll = select.poll()
        poll.register(bell[0], select.POLLIN)
        descriptor = session.fileno() if session is not None else None
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
        for ready, _ in poll.poll(max(0.0, self._asleep_until - now()) * 1000 + 0.5):
            if ready == bell[0]:
                with suppress(BlockingIOError):
                    os.read(bell[0], 4096)
        self._asleep_until = 0.0
        return False

    def _next_due(self) -> float | None:
        dues = [when for pulse in self._pulses for when in (pulse.due, pulse.ends_at()) if when is not None]
        dues += [chore.due for chore in self._chores]
        dues += [when for when, _ in self._timers]
        return min(dues, default=None)

    def _stop(self) -> None:
        self._disconnect()
        if self._bell is not None:
            os.close(self._bell[0])
            os.close(self._bell[1])
        self._bell = self._thread = None

    def _end_all(self) -> None:
        deadline = now() + 2.0
        with suppress(EngineError):
            for pulse in self._pulses:
                self._connected(deadline - now()).call("beat_end", {"beat": pulse.beat}, max(0.01, deadline - now()))
            for chore in self._chores:
                if chore.statement != "purge" or self._session is not None:
                    self._connected(deadline - now()).call(
                        chore.statement, chore.parameters, max(0.01, deadline - now())
                    )
        self._pulses, self._chores = [], []
        self._stop()

    # -- the session ----------------------------------------------------------------------------------------------

    def _connected(self, timeout: float) -> Session:
        if self._session is None:
            self._session = open_session(self.database, max(0.05, timeout))
        return self._session

    def _disconnect(self, error: HoldfastError | None = None) -> None:
        """The session is gone: whatever lived in it is, too."""
        session, self._session, self.session_key = self._session, None, None
        self._watched.clear()
        if session is not None:
            with suppress(Exception):
                session.close()
        with self._lock:
            ended = [pulse for pulse in self._pulses if pulse.session_key is not None]
        for pulse in ended:
            self._tell(pulse, OwnershipUnknown(f"the session that held it was lost: {error or 'closed'}"))

    def _listen(self) -> None:
        if self._session is not None:
            try:
                heard = self._session.notifications()
            except EngineError as error:
                self._disconnect(error)
                with self._lock:  # a release may have been missed
                    heard = list(self._watches)
            for name in heard:
                self.wake(name)
        with self._lock:
            wanting, self._wanting_session = self._wanting_session, []
            wanted = [name for name in self._watches if name not in self._watched]
            over = [name for name in self._watched if name not in self._watches]
        if (wanting or wanted) and now() >= self._retry_session_at:
            self._serve(wanting, wanted)
        else:
            with self._lock:
                self._wanting_session += wanting
        for name in over:
            self._watched.discard(name)
            if self._session is not None and self._session.fileno() is not None and not self._session.pooled:
                self._try("wait_end", {"name": name})

    def _serve(self, wanting: list[Callable[[], None]], wanted: list[str]) -> None:
        self._retry_session_at = now() + 0.25
        try:
            session = self._connected(5.0)
            if wanting and self.session_key is None:
                self._hold_session(session)
            self._watch_more(session, wanted)
        except EngineError as error:
            self.session_problem = error
            log.debug("no session on %s: %s", self.database, error)
            self._disconnect(error)
        for ready in wanting:
            ready()

    def _hold_session(self, session: Session) -> None:
        key = random.SystemRandom().getrandbits(62)
        if not session.pooled and session.hold(key, 5.0):
            self.session_key = key
        else:
            self.session_problem = SessionUnsafe(
                f"failover='session' needs a session of our own on {self.database}, and a pooler or the platform "
                "denies it: give a direct URL, or use failover='ttl'"
            )

    def _watch_more(self, session: Session, wanted: list[str]) -> None:
        if session.pooled or session.fileno() is None:
            self._watched.update(wanted)  # nothing to hear here: the waiters poll
            return
        if wanted and not self._watched:
            session.call("listen", {}, 5.0)
        for name in wanted:
            # A refusal means that somebody is releasing it this very moment: ask again at once, until it is committed.
            if len(self._watched) >= MOST_WATCHED or session.call("wait_begin", {"name": name}, 5.0)[0]["done"]:
                self._watched.add(name)
            else:
                self._retry_session_at = now() + 0.002
            self.wake(name)

    # -- heartbeats -----------------------------------------------------------------------------------------------

    def _beat_all(self) -> None:
        with self._lock:
            pulses = sorted(self._pulses, key=lambda pulse: pulse.trust.until)
        for pulse in pulses:
            end = pulse.ends_at()
            if end is not None and end <= now():
                self._end(pulse)
            elif pulse.due <= now():
                self._beat(pulse)

    def _end(self, pulse: Pulse) -> None:
        with self._lock:
            if pulse.ends_at() is None or pulse not in self._pulses:
                return
            self._pulses.remove(pulse)
            self._chore("beat_end", {"beat": pulse.beat}, due=now(), give_up=now() + pulse.trust.ttl)
            self._chore("purge", {}, due=now(), give_up=now())

    def _beat(self, pulse: Pulse) -> None:
        self._drop_orphans(pulse)
        asked_at = now()
        with self._lock:
            left = min((each.trust.left(asked_at) for each in self._pulses), default=0.0)
        answer, generation = self._ask(pulse, budget(left))
        if pulse not in self._pulses:  # told meanwhile, with its session
            return
        with self._lock:
            step, pulse.trust = after(answer, pulse.trust, asked_at, now())
        if step is Step.KEEP:
            if pulse.failures:
                log.info("heartbeat of %s is back after %d failures", self.database, pulse.failures)
            pulse.due, pulse.failures = asked_at + pulse.every, 0
            if generation != pulse.generation:
                self._reconcile(pulse, generation)
        elif step is Step.RETRY:
            pulse.failures += 1
            pulse.due = now() + backoff(pulse.failures, pulse.trust.left(now()))
        elif step is Step.TELL_LOST:
            self._tell(pulse, LeaseLost("its heartbeat came too late, and the database has declared it dead"))
        else:
            self._tell(pulse, OwnershipUnknown("the database did not answer before our trust in it ended"))

    def _ask(self, pulse: Pulse, timeout: float) -> tuple[Answer, int]:
        try:
            rows = self._connected(timeout).call("beat_renew", {"beat": pulse.beat}, timeout)
        except EngineError as error:
            log.warning(
                "heartbeat of %s failed, %.1f s of trust left: %s", self.database, pulse.trust.left(now()), error
            )
            if not isinstance(error, Refused):
                self._disconnect(error)
            return Answer.UNKNOWN, 0
        return (Answer.RENEWED, rows[0]["generation"]) if rows else (Answer.LOST, 0)

    def _drop_orphans(self, pulse: Pulse) -> None:
        """Grants of an event loop that was closed without a word."""
        with self._lock:
            dead = {owner for owner, count in pulse.owners.items() if count and not owner.alive()}
            orphans = [holding for holding in pulse.holdings.values() if holding.owner in dead]
        for holding in orphans:
            self.drop(pulse, holding.token)
            self._add_chore("lease_release", {"name": holding.name, "token": holding.token}, patience=pulse.trust.ttl)

    def _reconcile(self, pulse: Pulse, generation: int) -> None:
        """One of ours was taken away while the beat lived: by force, or by a twin of the same holder."""
        with self._lock:
            known = dict(pulse.holdings)
        try:
            left = {row["token"] for row in self._connected(5.0).call("beat_leases", {"beat": pulse.beat}, 5.0)}
        except EngineError as error:
            self._disconnect(error)
            pulse.due = now()  # the generation still differs: the next beat asks again
            return
        pulse.generation = generation
        for token, holding in known.items():
            if token not in left:
                self.drop(pulse, token)
                holding.tell(LeaseLost("it was released by force, or taken by another process of the same holder"))

    def _tell(self, pulse: Pulse, error: HoldfastError) -> None:
        with self._lock:
            if pulse not in self._pulses:
                return
            self._pulses.remove(pulse)
            holdings = list(pulse.holdings.values())
            self._chore("beat_end", {"beat": pulse.beat}, due=now(), give_up=now() + pulse.trust.ttl)
        log.error("%d lease(s) on %s: %s", len(holdings), self.database, error)
        for holding in holdings:
            try:
                holding.tell(error)
            except Exception:
                log.exception("on_lost of lease %r failed", holding.name)

    # -- chores and timers ----------------------------------------------------------------------------------------

    def _do_chores(self) -> None:
        with self._lock:
            due = [chore for chore in self._chores if chore.due <= now()]
        for chore in due:
            done = self._try(chore.statement, chore.parameters)
            chore.tries += 1
            with self._lock:
                if (done if chore.until_true else done is not None) or now() >= chore.give_up:
                    self._chores.remove(chore)
                else:
                    chore.due = now() + min(0.05 * 4**chore.tries, 30.0)
        with self._lock:
            if self._pulses and not any(chore.statement == "purge" for chore in self._chores):
                when = now() + PURGE_EVERY * random.uniform(0.75, 1.25)
                self._chore("purge", {}, due=when, give_up=when)

    def _try(self, statement: str, parameters: dict[str, Any]) -> bool | None:
        """Its first value as a truth, or None when there was no answer."""
        try:
            rows = self._connected(2.0).call(statement, parameters, 2.0)
        except EngineError as error:
            log.debug("%s on %s: %s", statement, self.database, error)
            if not isinstance(error, Refused):
                self._disconnect(error)
            return None
        return bool(rows and next(iter(rows[0].values())))

    def _run_timers(self) -> None:
        with self._lock:
            due = [timer for timer in self._timers if timer[0] <= now()]
            self._timers = [timer for timer in self._timers if timer not in due]
        for _, callback in due:
            callback()


_keepers: dict[Database, Keeper] = {}
_registry = threading.Lock()


def keeper_of(database: Database) -> Keeper:
    """The one keeper of this database in this process."""
    with _registry:
        return _keepers.setdefault(database, Keeper(database))


def _forget() -> None:
    global _registry
    _registry = threading.Lock()
    _keepers.clear()


@atexit.register
def _close_all() -> None:
    for keeper in list(_keepers.values()):
        keeper.close(timeout=2.5)


forks.in_child(_forget)
