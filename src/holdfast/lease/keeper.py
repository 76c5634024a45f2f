"""The keeper: renews the leases of this process, one row for all leases of a TTL.

It works in the background thread of its database, and reports each loss to the grant, which decides what a loss means.
Any thread may add and remove leases; none of that waits for the database.

A beat is *requested* while the acquire that creates its row is in flight, so that acquires at the same moment share
one; then it is *renewed*; and it is *expiring* when its leases must neither be renewed nor released, because the work
under them cannot be stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, Self

from holdfast.database.background import OWNER_KEYS, Background, background_of
from holdfast.database.url import Database
from holdfast.errors import EngineError, HoldfastError, OwnershipUnknown
from holdfast.lease.loss import HISTORY_LIMIT, loss_by_expiry, loss_by_others, loss_by_silence
from holdfast.lease.terms import MayRenew
from holdfast.lease.trust import BeatAnswer, BeatStep, Trust, after, backoff, budget, first_beat
from holdfast.runtime import forks, telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.identity import new_token
from holdfast.runtime.log import ERROR, INFO, WARNING, logger

log = logger("holdfast.keeper")

PURGE_EVERY = 60.0
UNDO_PATIENCE = 65.0
"""Seconds to retry the undoing of an acquire: longer than the server lets a statement run."""
IDLE = 6.0
"""The trust that calls are bounded by while no lease is held."""
_CALLS = 3
"""A heartbeat takes at most so many times the timeout of a call: two of them to open a session."""
_UNRECORDED = (
    "it was taken away by force, or by another process of the same holder, or the database was set back to a state "
    "without it"
)
WITHHELD = 1.0
"""Seconds after which a heartbeat that a lease does not let us send is asked for again, and reported."""
LINGER = 1.0
"""Seconds that a beat without leases is kept for the next acquire."""


class LeaseOwner(Protocol):
    """The process, or the event loop, that a client belongs to."""

    def alive(self) -> bool:
        """False for an event loop that was closed."""


class KeptLease(NamedTuple):
    """A lease that a beat renews. Its callbacks are called in the background thread."""

    name: str
    token: str
    fence: int
    owner: LeaseOwner
    on_lost: Callable[[HoldfastError], None]
    """Called once, when it is lost."""
    on_beat: Callable[[HoldfastError | None], None] | None = None
    """Called after each heartbeat that leaves it ours, with the error of that heartbeat."""
    on_recall: Callable[[], object] | None = None
    """Called when an operator asks for it back."""
    ends_with_block: bool = False
    """A guard's: only the end of its block releases it, and no signal."""
    may_renew: MayRenew | None = None
    """Asked before each heartbeat. False: not now, but when it calls its argument, in any thread."""


class Beat:
    """One beat row, and the leases of this process that it renews."""

    def __init__(self, id: str, trust: Trust, session_key: int | None) -> None:
        self.id, self.trust, self.session_key = id, trust, session_key
        self.every = self.due = math.inf
        self.exists = False
        """Whether its row is known to exist."""
        self.is_doubtful = False
        """Whether an acquire that would have created the row was never answered."""
        self.generation: int | None = None
        """The one for which the database was asked which leases it has. None before the first heartbeat."""
        self.failures = 0
        self.error: HoldfastError | None = None
        """Of the last heartbeat."""
        self.acquires = 0
        """Acquires in flight that will add a lease to it."""
        self.leases: dict[str, KeptLease] = {}
        """By token."""
        self._by_owner: dict[LeaseOwner, dict[str, KeptLease]] = {}
        self.empty_since: float | None = None
        self.withheld_since: float | None = None
        """Since when a lease has not let it be renewed."""
        self.is_shared = True
        """False for the beat of a single lease that is told of every heartbeat."""

    @property
    def lives_with_session(self) -> bool:
        """Whether it ends with the session. Not with an owner key, which is taken again."""
        return self.session_key is not None and self.session_key >> 48 != OWNER_KEYS

    @classmethod
    def requested(cls, ttl: float, session_key: int | None) -> Self:
        """A beat whose row the next acquire creates. Until then it has no trust."""
        return cls(new_token(), Trust(ttl, -math.inf), session_key)

    def created(self, trust: Trust, every: float, due: float) -> None:
        self.trust, self.every, self.due, self.exists = trust, every, due, True

    def fits(self, ttl: float, session_key: int | None, now: float) -> bool:
        """Whether it can renew one more lease of this kind."""
        good = not self.exists or self.trust.left(now) > 0
        return self.is_shared and good and self.trust.ttl == ttl and self.session_key == session_key

    def add(self, lease: KeptLease) -> None:
        self.leases[lease.token] = self._by_owner.setdefault(lease.owner, {})[lease.token] = lease
        self.empty_since = None

    def remove(self, token: str) -> KeptLease | None:
        """Safe against a signal handler that removes another lease in between."""
        lease = self.leases.pop(token, None)
        if lease is not None:
            self._by_owner[lease.owner].pop(token, None)
        return lease

    def leases_of(self, owner: LeaseOwner) -> list[KeptLease]:
        return list(self._by_owner.get(owner, {}).values())

    def orphans(self) -> list[KeptLease]:
        """Leases of event loops that were closed. Forgets owners without leases."""
        self._by_owner = {owner: leases for owner, leases in self._by_owner.items() if leases}
        return [lease for owner, leases in self._by_owner.items() if not owner.alive() for lease in leases.values()]

    def next_beat(self) -> float:
        """When to renew it, or to report that trust in it has ended."""
        return min(self.due, self.trust.until)

    def ends_at(self) -> float | None:
        """When to end it, if it stays without leases."""
        if self.leases or self.acquires or self.empty_since is None:
            return None
        return min(self.due, self.empty_since + LINGER)


class Keeper:
    def __init__(self, background: Background) -> None:
        self.background, self.database = background, background.database
        self._lock = background.lock
        self._beats: list[Beat] = []
        self._requested: list[Beat] = []
        self._expiring: list[Beat] = []
        """Only those with a key: the session that holds it has to stay open for them."""
        self._purge_at = 0.0
        self._answered_by = math.inf
        """When the heartbeat that is under way has failed at the latest."""

    def _gauges(self) -> Iterator[tuple[str, float]]:
        with self._lock:
            yield "leases_held", float(sum(len(beat.leases) for beat in self._beats))
            yield "lease_waiters", float(self.background.listener.lease_waiters())
            if self._beats:
                yield "heartbeat_age_seconds", max(beat.trust.age(now()) for beat in self._beats)

    # What any thread may call.

    def reserve(self, ttl: float, session_key: int | None, *, instead_of: Beat | None = None) -> Beat:
        """The beat for an acquire in flight, which is kept until ``unreserve``. ``instead_of``: one that is lost."""
        with self._lock:
            if instead_of in self._requested:
                self._requested.remove(instead_of)
            for beat in [*self._beats, *self._requested]:
                if beat is not instead_of and beat.fits(ttl, session_key, now()):
                    break
            else:
                beat = Beat.requested(ttl, session_key)
                self._requested.append(beat)
                if self._lives_with_owner(beat) and not self.background.has_owner_key:
                    self.background.wake()  # the session was closed as idle at this moment
            beat.acquires += 1
            return beat

    def unreserve(self, beat: Beat) -> None:
        """The acquire has been answered, or given up."""
        with self._lock:
            beat.acquires -= 1
            if beat.exists:
                self._end_if_empty(beat)
            elif not beat.acquires:
                self._requested = [other for other in self._requested if other is not beat]
                if beat.is_doubtful:
                    self.background.retry("beat_end", {"beat": beat.id}, patience=UNDO_PATIENCE, until=True)

    def keep(self, id: str, trust: Trust, every: float, lease: KeptLease, *, session_key: int | None = None) -> Beat:
        """Renew the beat ``id`` from now on, for ``lease``; for it alone if it is told of every heartbeat."""
        with self._lock:
            beat = next((beat for beat in [*self._beats, *self._requested] if beat.id == id), None)
            if beat is None:
                beat = Beat(id, trust, session_key)
            if not beat.exists:
                beat.created(trust, every, now() + first_beat(trust.ttl, every))
                self._beats.append(beat)  # first: give_up may be called by a signal handler in between
                self._requested = [other for other in self._requested if other is not beat]
                self._purge_at = max(self._purge_at, beat.due)  # together with the first heartbeat
            beat.is_shared = lease.on_beat is None
            if every < beat.every:
                beat.every, beat.due = every, min(beat.due, now() + every)
            beat.add(lease)
            self.background.wake_by(beat.due)
        if beat.lives_with_session and session_key != self.background.session_key:
            self._lose(beat, OwnershipUnknown("the session that held it was lost"))
        return beat

    def remove(self, beat: Beat, token: str) -> bool:
        """Stop renewing a lease that was released or has passed on; whether it was renewed until now."""
        with self._lock:
            was_kept = beat.remove(token) is not None and beat in self._beats
            self._end_if_empty(beat)
            return was_kept

    def let_expire(self, beat: Beat) -> None:
        """Stop renewing ``beat`` without ending it."""
        with self._lock:
            if beat in self._beats:
                self._beats.remove(beat)
                if beat.session_key is not None:
                    self._expiring.append(beat)
                    self.background.wake_by(beat.trust.over)

    def loss_of(self, beat: Beat) -> HoldfastError:
        """Why trust in ``beat`` has ended."""
        if beat.withheld_since is not None:
            return OwnershipUnknown(f"the event loop did not turn for {now() - beat.withheld_since:.1f} s or more")
        late = max(self.background.late(), now() - self._answered_by)
        error = loss_by_silence(beat.trust, late, now())
        error.__cause__ = beat.error
        return error

    def extend(self, beat: Beat, asked_at: float) -> None:
        """The user renewed the beat at ``asked_at``."""
        with self._lock:
            beat.trust = after(BeatAnswer.RENEWED, beat.trust, asked_at, now())[1]

    def remove_owner(self, owner: LeaseOwner) -> tuple[list[str], list[KeptLease]]:
        """A client closes: the beats that are its own, to be ended, and its leases on beats shared with others."""
        with self._lock:
            own = [beat for beat in self._beats if not beat.acquires and len(beat.leases_of(owner)) == len(beat.leases)]
            self._beats = [beat for beat in self._beats if beat not in own]
            shared = [lease for beat in self._beats for lease in beat.leases_of(owner)]
            for beat in self._beats:
                for lease in shared:
                    beat.remove(lease.token)
            return [beat.id for beat in own], shared

    def give_up(self, owner: LeaseOwner, *, dies: bool) -> tuple[list[str], list[KeptLease]]:
        """As ``remove_owner``, in a handler of a signal, and without the leases of guards. A beat that is the owner's
        alone is ended whatever acquires are in flight; if the process dies, so are those that were requested."""
        with self._lock:
            leases = {
                beat: [each for each in beat.leases_of(owner) if not each.ends_with_block] for beat in self._beats
            }
            own = [beat for beat in self._beats if len(leases[beat]) == len(beat.leases)]
            self._beats = [beat for beat in self._beats if beat not in own]
            shared = [lease for beat in self._beats for lease in leases[beat]]
            for beat in self._beats:
                for lease in leases[beat]:
                    beat.remove(lease.token)
            return [beat.id for beat in [*own, *(self._requested if dies else [])]], shared

    def release_later(self, name: str, token: str) -> None:
        """Release a lease that the database does not take back now, however long that takes."""
        self.background.retry("lease_release", {"name": name, "token": token}, patience=math.inf)

    def undo_acquire(
        self, name: str, token: str, ttl: float, beat: Beat | None, kind: str = "lease", sendings: int = 1
    ) -> None:
        """Give back what an unanswered acquire may have been granted, or may yet be: it may still be in flight.

        ``sendings``: how often it was sent. The last one may be granted after the grant of the one before was released:
        one release for each is retried until it succeeds.

        If nothing else uses its beat, that is ended with it; nothing renews it, so after a TTL it has expired in any
        case. Otherwise the release is retried for longer than the server lets a statement run.
        """
        with self._lock:
            is_alone = beat is None or (beat in self._requested and beat.acquires == 1)
            if beat is not None and is_alone:
                self._requested.remove(beat)  # no other acquire may use it now
            elif beat is not None:
                beat.is_doubtful = True
        verb, patience = ("abandon", min(UNDO_PATIENCE, ttl)) if is_alone else ("release", UNDO_PATIENCE)
        for _ in range(sendings):
            self.background.retry(f"{kind}_{verb}", {"name": name, "token": token}, patience=patience, until=True)

    def purge(self, *, after: float = 0.0) -> None:
        """Delete rows that have expired by then: there may be no other process that does."""
        self.background.retry("purge", {}, patience=PURGE_EVERY, until=False, delay=after + 0.01 if after else 0.0)

    def _end_if_empty(self, beat: Beat) -> None:
        if beat.leases or beat.acquires:
            return
        empty_since, beat.empty_since = beat.empty_since, now()
        self._expiring = [other for other in self._expiring if other is not beat]
        if beat in self._beats:
            self.background.wake_by(min(beat.due, beat.empty_since + LINGER))
        elif empty_since is None and all(other.id != beat.id for other in self._beats):
            # Lost before, and the work under it has stopped by now: its row need not wait for its expiry.
            self.background.retry("beat_end", {"beat": beat.id}, patience=beat.trust.ttl, until=False)

    # The heartbeat, in the background thread.

    def next_due(self) -> float | None:
        with self._lock:
            dues = [when for beat in self._beats for when in (beat.next_beat(), beat.ends_at()) if when is not None]
            dues += [beat.trust.over for beat in self._expiring]
            if self._beats:
                dues.append(self._purge_at)
            if any(map(self._lives_with_owner, self._requested)):
                dues.append(now() + LINGER)  # a lost session is noticed, and an idle one is closed after the answer
            return min(dues, default=None)

    def call_timeout(self) -> float:
        with self._lock:
            return budget(min((beat.trust.left(now()) for beat in self._beats), default=IDLE))

    def needs_session(self) -> bool:
        return bool(self._beats or self._expiring) or self.needs_owner_key()

    def needs_owner_key(self) -> bool:
        with self._lock:
            return any(map(self._lives_with_owner, [*self._beats, *self._requested, *self._expiring]))

    def show_owner(self) -> None:
        with self._lock:
            for beat in filter(self._lives_with_owner, self._beats):
                beat.due = 0.0

    def _lives_with_owner(self, beat: Beat) -> bool:
        return beat.session_key == self.background.owner_key

    def session_lost(self, error: Exception | None) -> None:
        with self._lock:
            self._expiring = [beat for beat in self._expiring if not beat.lives_with_session]
            lost = [beat for beat in self._beats if beat.lives_with_session]
        for beat in lost:
            self._lose(beat, OwnershipUnknown(f"the session that held it was lost ({error})"))

    def last_statements(self) -> list[tuple[str, dict[str, Any]]]:
        with self._lock:
            beats, self._beats = self._beats, []
            return [("beat_end", {"beat": beat.id}) for beat in beats]

    def beat(self) -> None:
        with self._lock:
            self._expiring = [beat for beat in self._expiring if beat.trust.over > now()]
            beats = sorted(self._beats, key=lambda beat: beat.trust.until)
        for beat in beats:
            ends_at = beat.ends_at()
            if ends_at is not None and ends_at <= now():
                self._end(beat)
            elif beat.trust.left(now()) <= 0:  # reported before anything is asked, which may take its time
                self._lose(beat, self.loss_of(beat))
            elif beat.due <= now() and self._may_renew(beat):
                self._renew(beat)
        with self._lock:
            if self._beats and self._purge_at <= now():
                self._purge_at = now() + jitter(0.5 * PURGE_EVERY, PURGE_EVERY)
                self.purge()

    def _end(self, beat: Beat) -> None:
        with self._lock:
            if beat.ends_at() is not None and beat in self._beats:
                self._beats.remove(beat)
                self.background.retry("beat_end", {"beat": beat.id}, patience=beat.trust.ttl, until=False)
                self.background.retry("purge", {}, patience=0.0)

    def _may_renew(self, beat: Beat) -> bool:
        """False while a lease does not let the beat be renewed: it is looked at again when that changes."""
        if beat.is_shared:  # none of its leases is asked
            return True
        with self._lock:
            conditions = [lease.may_renew for lease in beat.leases.values() if lease.may_renew is not None]
        if all(condition(lambda: self._hurry(beat)) for condition in conditions):
            beat.withheld_since = None
            return True
        if beat.withheld_since is None:
            beat.withheld_since = now()
        elif now() - beat.withheld_since >= WITHHELD and beat.failures == 0:
            beat.failures = 1
            log.event(
                "keeper.beat", WARNING,
                "a heartbeat to %(database)s is withheld, because the event loop does not turn; the lease is lost in "
                "%(left).1f s unless it does",
                database=str(self.database), outcome="withheld", left=beat.trust.left(now()),
            )  # fmt: skip
        with self._lock:
            beat.due = now() + WITHHELD
        return False

    def _hurry(self, beat: Beat) -> None:
        """In any thread: a heartbeat that was withheld may be sent now."""
        with self._lock:
            beat.due = now()
        self.background.wake()

    def _renew(self, beat: Beat) -> None:
        self._remove_orphans(beat)
        asked_at = now()
        self._answered_by = asked_at + _CALLS * self.call_timeout()
        answer, generation = self._ask(beat)
        if telemetry.listeners:
            telemetry.emit("keeper.beat", outcome=answer.value, seconds=now() - asked_at)
        with self._lock:
            if beat not in self._beats:  # lost meanwhile, with its session
                return
            step, beat.trust = after(answer, beat.trust, asked_at, now())
        if step is BeatStep.KEEP:
            if beat.failures:
                log.event(
                    "keeper.beat", INFO, "the heartbeat to %(database)s succeeds again after %(failures)d failures",
                    database=str(self.database), outcome="renewed", failures=beat.failures,
                )  # fmt: skip
            beat.due, beat.failures, beat.error = asked_at + beat.every, 0, None
            if generation == beat.generation or self._check_leases(beat, generation):
                self._report_beat(beat)
        elif step is BeatStep.RETRY:
            beat.failures += 1
            beat.due = now() + backoff(beat.failures, beat.trust.left(now()))
            self._report_beat(beat)
        elif step is BeatStep.LOST:
            self._lose(beat, loss_by_expiry(beat.trust, self.background.late()))
        else:
            self._lose(beat, self.loss_of(beat))
        self._answered_by = math.inf

    def _ask(self, beat: Beat) -> tuple[BeatAnswer, int]:
        try:
            session = self.background.session(self.call_timeout() * 2)
            rows = session.call("beat_renew", {"beat": beat.id}, self.call_timeout())
        except EngineError as error:
            log.event(
                "keeper.beat", WARNING,
                "a heartbeat to %(database)s failed; leases are lost in %(left).1f s unless one succeeds: %(error)s",
                database=str(self.database), outcome="unknown", left=beat.trust.left(now()), error=str(error),
            )  # fmt: skip
            beat.error = error
            self.background.doubt_session(error)
            return BeatAnswer.UNKNOWN, 0
        return (BeatAnswer.RENEWED, rows[0]["generation"]) if rows else (BeatAnswer.LOST, 0)

    def _remove_orphans(self, beat: Beat) -> None:
        with self._lock:
            orphans = beat.orphans()
        for lease in orphans:
            self.remove(beat, lease.token)
            self.release_later(lease.name, lease.token)

    def _check_leases(self, beat: Beat, generation: int) -> bool:
        """A new generation: one of our leases was taken by force or by a twin of the same holder, or is recalled. Or
        the server has been started, and may have lost an acquire or a release: a lease that only the database has is
        released.

        Returns False if the database did not say which one; then this heartbeat proves nothing. While an acquire is in
        flight, which may have been granted and taken away already, the generation is looked at again.
        """
        with self._lock:
            leases, acquires = dict(beat.leases), beat.acquires
        try:
            rows = self.background.session(self.call_timeout()).call(
                "beat_leases", {"beat": beat.id}, self.call_timeout()
            )
            wanted = self.background.session(self.call_timeout()).call(
                "beat_wanted", {"beat": beat.id}, self.call_timeout()
            )
        except EngineError as error:
            self.background.doubt_session(error)
            beat.due = now() + backoff(1, beat.trust.left(now()))  # the generation still differs: ask again
            return False
        held, recalled = {(row["name"], row["fence"]) for row in rows}, {row["fence"] for row in wanted}
        if not acquires:
            beat.generation = generation
        with self._lock:  # now: one that was granted after the answer is ours
            grants = {(lease.name, lease.fence) for lease in [*leases.values(), *beat.leases.values()]}
            unknown = held - grants if not (acquires or beat.acquires) else ()
        for name, fence in unknown:
            asked = {"beat": beat.id, "name": name, "fence": fence}
            self.background.retry("beat_release", asked, patience=math.inf)
        lost = [
            lease
            for token, lease in leases.items()
            if (lease.name, lease.fence) not in held and self.remove(beat, token)
        ]
        history = self._history(lost)
        for lease in lost:
            self._report_loss(lease, loss_by_others(history, lease.name, lease.fence, _UNRECORDED))
        for lease in leases.values():
            if lease.fence in recalled and lease.on_recall is not None and lease not in lost:
                lease.on_recall()
        return True

    def _history(self, lost: list[KeptLease]) -> list[Any]:
        """The latest ended grants, which say by whom a lease was taken away; none if the database does not answer."""
        if not lost:
            return []
        name, limit = lost[0].name if len(lost) == 1 else None, min(HISTORY_LIMIT, 100 + 2 * len(lost))
        try:
            session = self.background.session(self.call_timeout())
            return list(session.call("lease_history", {"name": name, "limit": limit}, self.call_timeout()))
        except EngineError as error:
            self.background.doubt_session(error)
            return []

    def _lose(self, beat: Beat, error: HoldfastError) -> None:
        """Stop renewing the beat, and report the loss of all its leases.

        The row of the beat stays in the database, because the work under it may not have stopped yet. The row expires
        and is purged then, or it is deleted when the last of its grants is released.
        """
        with self._lock:
            if beat not in self._beats:
                return
            self._beats.remove(beat)
            leases = list(beat.leases.values())
            self.background.retry("purge", {}, patience=PURGE_EVERY, until=False, delay=beat.trust.ttl)
        error.__cause__ = beat.error
        for lease in leases:
            self._report_loss(lease, error)

    def _report_loss(self, lease: KeptLease, error: HoldfastError) -> None:
        try:
            lease.on_lost(error)
        except Exception:
            log.event(
                "lease.callback_failed", ERROR, "on_lost of lease %(lease)r failed", exc_info=True, lease=lease.name
            )

    def _report_beat(self, beat: Beat) -> None:
        if beat.is_shared:  # none of its leases is told: do not look at ten thousand of them
            return
        with self._lock:
            callbacks = [lease.on_beat for lease in beat.leases.values() if lease.on_beat is not None]
        for callback in callbacks:
            callback(beat.error)


_keepers: dict[tuple[Database, bool], Keeper] = {}


def keeper_of(database: Database, *, brittle: bool = False) -> Keeper:
    """The keeper of ``database`` in this process; ``brittle``: for leases that one missed heartbeat may end."""
    return _keepers.get((database, brittle)) or _create(database, brittle)


def keepers_of(database: Database) -> list[Keeper]:
    """Those that exist."""
    return [_keepers[database, brittle] for brittle in (False, True) if (database, brittle) in _keepers]


def _create(database: Database, brittle: bool) -> Keeper:
    """Under the lock of the background thread, which is reentrant: a signal handler may want a keeper, too."""
    background = background_of(database, brittle=brittle)
    with background.lock:
        keeper = background.heartbeat = _keepers.setdefault((database, brittle), Keeper(background))
    telemetry.register(keeper)
    return keeper


@forks.in_child
def _forget() -> None:
    """The parent's leases are not held by a forked child."""
    _keepers.clear()
