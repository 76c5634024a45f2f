"""The lease handle: asks for a lease, waits for it, and gives it back at the end of a block.

Whether a lease is free is decided by the database alone. The token is made before asking, so an acquire that is
interrupted at any point can be undone.

    acquire ─ _wait ─ _attempt ─ _call: "lease_acquire" ─→ granted: a grant, which the keeper renews
                         ↑                              └→ refused: wait for a release, or poll
                         └──────────────────────────────────┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from holdfast.database.engine_async import CALL_TIMEOUT, AsyncEngine, Repeated
from holdfast.errors import EngineError, LeaseLost, NotAcquired, Refused, SchemaMismatch, Unanswered, Unreachable
from holdfast.lease.grant_async import AsyncHeldLeases, AsyncLeaseGrant
from holdfast.lease.keeper import Beat, keeper_of
from holdfast.lease.terms import LeaseTerms, Refusal
from holdfast.lease.trust import Trust
from holdfast.names import Unset, check_timeout
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency_async import AsyncCancelScope, AsyncWakeup, check_function, current_id, sleep
from holdfast.runtime.identity import check_token, new_token

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G", bound=AsyncLeaseGrant)

PATIENT = 2.0
"""``_busy_patience`` of a lease that must not be refused while its expired row is purged."""
_MIN_TIMEOUT = 1.0
"""Seconds that one call to the database may take, even if the caller's own timeout is shorter."""


class AsyncHandle(ABC, Generic[G]):
    """How a lease is asked for, waited for, entered and left. Recipes have statements and grants of their own."""

    _kind = "lease"
    _statement: str | None = None
    """Instead of the one for the kind of lease."""
    _more: Mapping[str, Any] = {}
    """Further parameters of the statement."""
    _busy_patience = 0.05
    """Seconds to ask again, even without a timeout, while the row is being changed."""

    def __init__(
        self, engine: AsyncEngine, terms: LeaseTerms, timeout: float | None, info: Mapping[str, Any] | None = None
    ) -> None:
        """``info`` is shown in listings, for a lease that has a beat of its own."""
        if terms.on_lost == "cancel" and not AsyncCancelScope.cancels:
            raise ValueError(
                "on_lost='cancel' is for asyncio: a thread cannot be cancelled. Use 'flag', 'exit' or a callable."
            )
        self._engine, self._terms, self._timeout = engine, terms, check_timeout(timeout)
        self._info = info
        self._repeated: list[str] = []
        """Tokens of acquires in flight: each as often as its call was sent again."""
        self._entered: list[tuple[int, G]] = []
        """The task or thread that entered a block, and its grant."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} ttl={self._terms.ttl:g}>"

    @property
    def name(self) -> str:
        return self._terms.name

    async def acquire(self, *, timeout: float | Unset | None = Unset.UNSET) -> G:
        """The grant, or NotAcquired at once; AcquireTimeout after ``timeout`` seconds (None: wait for ever)."""
        limit = self._timeout if isinstance(timeout, Unset) else check_timeout(timeout)
        grants: list[G] = []
        try:
            refusal = await self._wait(limit, grants)
            if refusal is None:
                return grants[0]
        except BaseException:
            _abandon(grants)
            raise
        raise self._error(refusal, limit or None)

    async def try_acquire(self) -> G | None:
        """The grant, or None when the lease is held."""
        grants: list[G] = []
        try:
            return grants[0] if await self._wait(0.0, grants) is None else None
        except BaseException:
            _abandon(grants)
            raise

    async def _ask(self, grants: list[G]) -> Refusal | None:
        """Ask once. Appends the grant to ``grants``, so that the caller has it before anything can interrupt."""
        try:
            refusal = await self._attempt(grants)
            if refusal is None and telemetry.listeners:
                telemetry.emit("lease.acquired", kind=self._kind, waited=0.0)
            return refusal
        except BaseException:
            _abandon(grants)
            grants.clear()
            raise

    @asynccontextmanager
    async def or_skip(self) -> AsyncIterator[G | None]:
        """A block that runs with the grant, or with None when the lease is held."""
        grant = await self.try_acquire()
        if grant is None:
            yield None
        else:
            async with grant:
                yield grant

    async def __aenter__(self) -> G:
        grant = await self.acquire()
        try:
            await grant.__aenter__()
            self._entered.append((current_id(), grant))
            return grant
        except BaseException:
            _abandon([grant])
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = None
        try:
            entry = self._last_entered()
            await entry[1].__aexit__(kind, error, trace)
        except BaseException:
            entry = entry or self._last_entered()
            _abandon([entry[1]])
            raise
        finally:
            if entry is not None:
                self._entered.remove(entry)

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """Decorator: every call runs under the lease, or raises NotAcquired."""
        check_function(function)

        @wraps(function)
        async def under_lease(*args: P.args, **kwargs: P.kwargs) -> T:
            async with self:
                return await function(*args, **kwargs)

        return under_lease

    def _error(self, refusal: Refusal, waited: float | None) -> NotAcquired:
        return refusal.as_error(waited, datetime.now(UTC))

    def _last_entered(self) -> tuple[int, G]:
        """The last block entered in this task; or the only one, which may have been entered elsewhere (a fixture)."""
        mine = [entry for entry in self._entered if entry[0] == current_id()] or self._entered
        if not mine or (len(self._entered) > 1 and mine is self._entered):
            raise RuntimeError(
                f"the handle of lease {self.name!r} was entered several times, and not in this task or thread: exit it "
                "where it was entered"
            )
        return mine[-1]

    async def _wait(self, limit: float, grants: list[G]) -> Refusal | None:
        """Ask until the lease is granted (None, with the grant in ``grants``) or ``limit`` seconds have passed."""
        started = now()
        refusal = await self._wait_from(started, limit, grants)
        if telemetry.listeners:
            event = "lease.acquired" if refusal is None else "lease.refused"
            telemetry.emit(event, kind=self._kind, waited=now() - started)
        return refusal

    async def _wait_from(self, started: float, limit: float, grants: list[G]) -> Refusal | None:
        """A release wakes us. Polling is the net for a wake-up that was lost."""
        timeout = _call_timeout(limit or CALL_TIMEOUT)
        refusal = await self._attempt(grants, timeout)
        while refusal is not None and refusal.remaining is None and now() < started + self._busy_patience:
            await sleep(jitter(0.001, 0.005))
            refusal = await self._attempt(grants, timeout)
        if refusal is None or limit == 0:
            return refusal
        signal, background = AsyncWakeup(), keeper_of(self._engine.database, brittle=self._terms.brittle).background
        background.subscribe(self.name, signal.set)
        try:
            while refusal is not None and (left := started + limit - now()) > 0:
                if refusal.session_key is not None:
                    background.watch_session(self.name, refusal.session_key)
                await signal.wait(min(self._pause(refusal, background.listener.count(self.name)), left))
                refusal = await self._ask_again(grants, started + limit)
            return refusal
        finally:
            background.unsubscribe(self.name, signal.set)

    async def _ask_again(self, grants: list[G], until: float) -> Refusal | None:
        """A waiter survives a restart of the database: it asks again until its time is up."""
        pause = 0.1
        while True:
            try:
                return await self._attempt(grants, _call_timeout(until - now()))
            except (Unreachable, Unanswered):
                if now() + pause >= until:
                    raise
            await sleep(pause)
            pause = min(pause * 2, 1.0)

    def _pause(self, refusal: Refusal, waiters: int) -> float:
        """All waiters of a process together poll as often as one."""
        if refusal.remaining is None:
            return jitter(0.002, 0.02)
        return min(self._engine.poll * waiters * jitter(0.5, 1.5), refusal.remaining + jitter(0.001, 0.01))

    async def _attempt(self, grants: list[G], timeout: float = CALL_TIMEOUT) -> Refusal | None:
        """Ask once. Undone if it is interrupted before the grant is in ``grants``."""
        self._engine.check_usable()
        token = new_token()
        if self._terms.failover != "session":
            owner_key = await self._owner_key(timeout) if self._terms.failover == "owner" else None
            return await self._attempt_with(token, owner_key, grants, timeout)
        background = keeper_of(self._engine.database, brittle=True).background
        try:
            return await self._attempt_with(token, await self._session_key(token, timeout), grants, timeout)
        finally:
            background.leave_session(token)

    async def _attempt_with(
        self, token: str, session_key: int | None, grants: list[G], timeout: float
    ) -> Refusal | None:
        terms, engine = self._terms, self._engine
        keeper = keeper_of(engine.database, brittle=terms.brittle)
        shares = terms.auto_renew and not terms.has_own_beat
        beat = keeper.reserve(terms.ttl, session_key) if shares else None
        try:
            row, asked_at = await self._call(token, beat, session_key, timeout)
            if row["status"] == "beat_lost" and beat is not None:
                if terms.failover == "session":  # the beat may have gone with it
                    session_key = await self._session_key(token, timeout)
                lost, beat = beat, keeper.reserve(terms.ttl, session_key, instead_of=beat)
                keeper.unreserve(lost)
                row, asked_at = await self._call(token, beat, session_key, timeout)
            if row["fence"] is None:
                return Refusal(self.name, row["held_by"], row["remaining"], row["session_watch"])
            engine.check_open()
            held = engine.state(AsyncHeldLeases)
            grant = self._granted(row, token, Trust.granted(terms.ttl, asked_at, row["remaining"]))
            if terms.auto_renew:
                grant._keep(beat.id if beat else token, session_key)
            else:
                held.unrenewed[token] = grant.name
            if row["status"] == "taken_over":
                keeper.purge()
                telemetry.emit("lease.taken_over", kind=self._kind)
            grants.append(grant)
            engine.check_open()  # again: a close in between has not seen this grant
            return None
        except (Unreachable, Refused, SchemaMismatch):
            raise  # certainly not granted
        except BaseException:
            self._undo(token, beat)
            raise
        finally:
            if beat is not None:
                keeper.unreserve(beat)
            while token in self._repeated:
                self._repeated.remove(token)

    async def _call(
        self, token: str, beat: Beat | None, session_key: int | None, timeout: float
    ) -> tuple[dict[str, Any], float]:
        """The row that the database answered with, and when it was asked."""
        terms, asked_at = self._terms, now()
        parameters = {
            "name": terms.name,
            "holder": self._holder,
            "ttl": terms.ttl,
            "token": token,
            # A beat for this lease alone has the secret of the lease.
            "beat": beat.id if beat else token if terms.auto_renew else None,
            "at_least": terms.at_least,
            "solo": not terms.auto_renew,
            "session_key": session_key,
            "process": None if beat and beat.exists else self._process,
        }
        if terms.kind == "plain":
            parameters["reenter"] = terms.reenter
        rows = await self._engine.call(
            self._statement or terms.statement,
            {**parameters, **self._more},
            timeout=timeout,
            on_repeat=lambda: self._repeated.append(token),
        )
        [row] = rows
        if row["status"] == "beat_lost" and isinstance(rows, Repeated):
            telemetry.emit("lease.abandoned", kind=self._kind)  # the first sending may have been granted before
        return row, asked_at

    def _undo(self, token: str, beat: Beat | None) -> None:
        """The acquire was not answered: undo it in the background, in case it was or will be granted."""
        telemetry.emit("lease.abandoned", kind=self._kind)
        keeper = keeper_of(self._engine.database, brittle=self._terms.brittle)
        sendings = 1 + self._repeated.count(token)
        keeper.undo_acquire(self._terms.name, token, self._terms.ttl, beat, self._kind, sendings)

    @abstractmethod
    def _granted(self, row: dict[str, Any], token: str, trust: Trust) -> G:
        """The grant for the caller."""

    @property
    def _process(self) -> dict[str, Any]:
        process = self._engine.process
        return process if self._info is None else {**process, "info": self._info}

    @property
    def _holder(self) -> str:
        label: str = self._engine.process["label"]
        return self._terms.holder or label

    async def _owner_key(self, timeout: float) -> int | None:
        """The owner key of this process, which is locked; None where sessions cannot be used, and the TTL decides."""
        background = keeper_of(self._engine.database).background
        if not background.has_owner_key and now() >= background.lacks_owner_key_until:
            ready = AsyncWakeup()
            background.request_owner_key(ready.set)
            await ready.wait(timeout)
        return background.owner_key if background.has_owner_key else None

    async def _session_key(self, token: str, timeout: float) -> int:
        """The key that the background session has locked. The session stays open for this acquire."""
        background, ready = keeper_of(self._engine.database, brittle=True).background, AsyncWakeup()
        background.request_session_key(token, ready.set)
        await ready.wait(timeout)
        if background.session_key is None:
            raise background.session_error or EngineError(
                f"no session on {self._engine.database} for lease {self.name!r}"
            )
        return background.session_key


class AsyncLease(AsyncHandle[AsyncLeaseGrant]):
    """A lease to acquire: ``async with lease as grant``, ``acquire``, ``try_acquire``, ``or_skip``, or a decorator."""

    async def adopt(self, token: str) -> AsyncLeaseGrant:
        """A grant from a token that its holder handed over, and goes on renewing. LeaseLost when it is not valid."""
        if self._terms.on_lost != "flag":
            raise ValueError(
                f"on_lost={self._terms.on_lost!r} cannot be kept for an adopted lease {self.name!r}: the loss is "
                "reported to its holder, not to this process. Use grant.check()."
            )
        asked_at = now()
        rows = await self._engine.call("lease_status", {"name": self.name, "token": check_token(token)})
        if not rows:
            raise LeaseLost(f"lease {self.name!r}: the token is not, or no longer, the one that holds it")
        [row] = rows
        trust = Trust.granted(row["ttl"], asked_at, row["remaining"])
        return AsyncLeaseGrant(self._engine, self._terms, row["holder"], check_token(token), row["fence"], trust)

    def _granted(self, row: dict[str, Any], token: str, trust: Trust) -> AsyncLeaseGrant:
        return AsyncLeaseGrant(self._engine, self._terms, self._holder, token, row["fence"], trust)


def _call_timeout(left: float) -> float:
    return min(CALL_TIMEOUT, max(_MIN_TIMEOUT, left))


def _abandon(grants: Sequence[AsyncLeaseGrant]) -> None:
    """Release in the background what was interrupted on its way to the caller."""
    for grant in grants:
        grant._abandon()
