"""The lease: durable, exclusive, expiring, fenced.

The handle says what is wanted, the grant is the proof of having it. Whether a lease is free is decided by the database
alone; this module asks, waits, and keeps the books.
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
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.lease.keepers import Keeper, Pulse
from holdfast.lease.trust import Trust
from holdfast.names import Held, LeaseTerms, Unset, check_timeout
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.identity import check_token, new_token
from holdfast.runtime.waiting_async import AsyncScope, AsyncSignal, check_function, here, sleep

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G", bound=AsyncLeaseGrant)

PATIENT = 2.0
"""``_while_busy`` of those who must not be turned away over a row that is just being cleared away."""
_ANSWER = 1.0
"""Seconds that the database has for its answer at the least, however soon whoever waits for the lease gives up."""


class AsyncHandle(ABC, Generic[G]):
    """A lease to be had, by whichever name: how it is asked for, waited for, entered and left."""

    _what, _statement = "lease", "lease_acquire"
    _more: Mapping[str, Any] = {}
    _while_busy = 0.05
    """Seconds to try again, even without a timeout, while the row is just being changed by somebody else."""

    def __init__(
        self, engine: AsyncEngine, terms: LeaseTerms, timeout: float | None, info: Mapping[str, Any] | None = None
    ) -> None:
        """``info``: for the people who look at the lease, where its heartbeat is its own."""
        if terms.on_lost == "cancel" and not AsyncScope.cancels:
            raise ValueError(
                "on_lost='cancel' is for asyncio: a thread cannot be cancelled. Use 'flag', 'exit' or a callable."
            )
        self._engine, self._terms, self._timeout = engine, terms, check_timeout(timeout)
        self._info = info
        self._entered: list[tuple[int, G]] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} ttl={self._terms.ttl:g}>"

    @property
    def name(self) -> str:
        return self._terms.name

    async def acquire(self, *, timeout: float | Unset | None = Unset.UNSET) -> G:
        """The grant, or NotAcquired at once; AcquireTimeout after ``timeout`` seconds (None: wait for ever)."""
        limit = self._timeout if isinstance(timeout, Unset) else check_timeout(timeout)
        got: list[G] = []
        try:
            held = await self._wait(limit, got)
            if held is None:
                return got[0]
        except BaseException:
            _abandon(got)
            raise
        raise self._refusal(held, limit or None)

    async def try_acquire(self) -> G | None:
        """The grant, or None when somebody has it."""
        got: list[G] = []
        try:
            return got[0] if await self._wait(0.0, got) is None else None
        except BaseException:
            _abandon(got)
            raise

    async def ask(self, got: list[G]) -> Held | None:
        """Once, without a second try while it is just being changed: who has it, or None with the grant in ``got``.
        So it is in the caller's hands before anything can interrupt."""
        try:
            held = await self._attempt(got)
            if held is None and telemetry.listeners:
                telemetry.tell("lease.acquired", kind=self._what, waited=0.0)
            return held
        except BaseException:
            _abandon(got)
            got.clear()
            raise

    @asynccontextmanager
    async def or_skip(self) -> AsyncIterator[G | None]:
        """A block that runs with the grant, or with None when somebody has it."""
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
            self._entered.append((here(), grant))
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

    def _refusal(self, held: Held, waited: float | None) -> NotAcquired:
        return held.refusal(waited, datetime.now(UTC))

    def _last_entered(self) -> tuple[int, G]:
        """The block that ends is the last one begun here; or the only one, begun elsewhere (by a fixture, say)."""
        mine = [entry for entry in self._entered if entry[0] == here()] or self._entered
        if not mine or (len(self._entered) > 1 and mine is self._entered):
            raise RuntimeError(
                f"lease {self.name!r} is left where it was not entered, and entered more than once elsewhere"
            )
        return mine[-1]

    async def _wait(self, limit: float, got: list[G]) -> Held | None:
        """Ask until it is ours or time is up: None with the grant in ``got``, or who has it."""
        started = now()
        held = await self._wait_from(started, limit, got)
        if telemetry.listeners:
            event = "lease.acquired" if held is None else "lease.refused"
            telemetry.tell(event, kind=self._what, waited=now() - started)
        return held

    async def _wait_from(self, started: float, limit: float, got: list[G]) -> Held | None:
        """Woken by a release; asks on its own besides, in case nobody wakes us."""
        patience = _patience(limit or CALL_TIMEOUT)
        held = await self._attempt(got, patience)
        while held is not None and held.remaining is None and now() < started + self._while_busy:
            await sleep(jitter(0.001, 0.005))
            held = await self._attempt(got, patience)
        if held is None or limit == 0:
            return held
        signal, keeper = AsyncSignal(), self._keeper
        keeper.watch(self.name, signal.set)
        try:
            while held is not None and (left := started + limit - now()) > 0:
                if held.session_watch is not None:
                    keeper.keep_vigil(self.name, held.session_watch)
                await signal.wait(min(self._pause(held, keeper.waiting(self.name)), left))
                held = await self._ask_again(got, started + limit)
            return held
        finally:
            keeper.unwatch(self.name, signal.set)

    async def _ask_again(self, got: list[G], until: float) -> Held | None:
        """A waiter outlives a restart of the database: it goes on asking until its time is up."""
        pause = 0.1
        while True:
            try:
                return await self._attempt(got, _patience(until - now()))
            except (Unreachable, Unanswered):
                if now() + pause >= until:
                    raise
            await sleep(pause)
            pause = min(pause * 2, 1.0)

    def _pause(self, held: Held, waiting: int) -> float:
        """The waiters of a process share the asking: together they ask as often as one."""
        if held.remaining is None:
            return jitter(0.002, 0.02)
        return min(self._engine.poll * waiting * jitter(0.5, 1.5), held.remaining + jitter(0.001, 0.01))

    async def _attempt(self, got: list[G], patience: float = CALL_TIMEOUT) -> Held | None:
        """Ask once. The token is ours, so whatever is interrupted half-way can be given back."""
        terms, engine, token = self._terms, self._engine, new_token()
        engine.check_usable()
        session_key = await self._session_key(patience) if terms.failover == "session" else None
        keeper = self._keeper
        shares = terms.auto_renew and not terms.apart
        pulse = keeper.borrow(terms.ttl, session_key) if shares else None
        try:
            row, asked_at = await self._ask(token, pulse, session_key, patience)
            if row["status"] == "beat_lost" and pulse is not None:
                if session_key is not None:  # it may have gone with the session
                    session_key = await self._session_key(patience)
                lost, pulse = pulse, keeper.borrow(terms.ttl, session_key, instead_of=pulse)
                keeper.give_back(lost)
                row, asked_at = await self._ask(token, pulse, session_key, patience)
            if row["fence"] is None:
                return Held(self.name, row["held_by"], row["remaining"], row["session_watch"])
            if engine.closing:
                raise EngineError(f"the client of {engine.database} was closed meanwhile")
            trust = Trust.counted(terms.ttl, asked_at, row["remaining"])
            grant = self._granted(row, token, trust)
            if terms.auto_renew:
                grant.keep(row["beat"], session_key)
            else:
                engine.unkept[token] = grant.name
            if row["status"] == "taken_over":
                keeper.purge_soon()
                telemetry.tell("lease.taken_over", kind=self._what)
            got.append(grant)
            if engine.closing:  # what it held was collected before this was added
                raise EngineError(f"the client of {engine.database} was closed meanwhile")
            return None
        except (Unreachable, Refused, SchemaMismatch):
            raise  # certainly not granted
        except BaseException:
            self._give_up(token, pulse)
            raise
        finally:
            if pulse is not None:
                keeper.give_back(pulse)

    async def _ask(
        self, token: str, pulse: Pulse | None, session_key: int | None, patience: float
    ) -> tuple[dict[str, Any], float]:
        terms, asked_at = self._terms, now()
        parameters = {
            "name": terms.name,
            "holder": self._holder,
            "ttl": terms.ttl,
            "token": token,
            "beat": pulse.beat if pulse else None,
            "reenter": terms.reenter,
            "at_least": terms.at_least,
            "solo": not terms.auto_renew,
            "session_key": session_key,
            "process": None if pulse and pulse.founded else self._process,
        }
        rows = await self._engine.call(self._statement, {**parameters, **self._more}, timeout=patience)
        [row] = rows
        if isinstance(rows, Repeated) and row["status"] in {"held", "busy"}:
            self._give_up(token, pulse)
        return row, asked_at

    def _give_up(self, token: str, pulse: Pulse | None) -> None:
        """Nobody has heard whether it was granted, or will be: so nobody would release it."""
        telemetry.tell("lease.abandoned", kind=self._what)
        self._keeper.abandon(self._terms.name, token, self._terms.ttl, pulse, self._what)

    @abstractmethod
    def _granted(self, row: dict[str, Any], token: str, trust: Trust) -> G:
        """What whoever asked is handed."""

    @property
    def _keeper(self) -> Keeper:
        return self._engine.keeper_for(self._terms)

    @property
    def _process(self) -> dict[str, Any]:
        process = self._engine.process
        return process if self._info is None else {**process, "info": self._info}

    @property
    def _holder(self) -> str:
        label: str = self._engine.process["label"]
        return self._terms.holder or label

    async def _session_key(self, patience: float) -> int:
        """Asked for every time, because asking also keeps the session open until the answer has come."""
        keeper, ready = self._keeper, AsyncSignal()
        keeper.want_session(ready.set)
        await ready.wait(patience)
        if keeper.session_key is None:
            raise keeper.session_problem or EngineError(
                f"no session on {self._engine.database} for lease {self.name!r}"
            )
        return keeper.session_key


class AsyncLease(AsyncHandle[AsyncLeaseGrant]):
    """A lease to be had: ``async with lease as grant``, ``acquire``, ``try_acquire``, ``or_skip``, or a decorator."""

    async def adopt(self, token: str) -> AsyncLeaseGrant:
        """A grant from a token handed over by its holder, who goes on renewing it. LeaseLost when it is not good."""
        if self._terms.on_lost != "flag":
            raise ValueError(
                f"on_lost={self._terms.on_lost!r} cannot be kept for an adopted lease {self.name!r}: its holder is "
                "told of a loss, not this process. Look at grant.check()."
            )
        asked_at = now()
        rows = await self._engine.call("lease_status", {"name": self.name, "token": check_token(token)})
        if not rows:
            raise LeaseLost(f"lease {self.name!r}: the token is not, or no longer, the one that holds it")
        [row] = rows
        trust = Trust.counted(row["ttl"], asked_at, row["remaining"])
        return AsyncLeaseGrant(self._engine, self._terms, row["holder"], check_token(token), row["fence"], trust)

    def _granted(self, row: dict[str, Any], token: str, trust: Trust) -> AsyncLeaseGrant:
        return AsyncLeaseGrant(self._engine, self._terms, self._holder, token, row["fence"], trust)


def _patience(left: float) -> float:
    return min(CALL_TIMEOUT, max(_ANSWER, left))


def _abandon(grants: Sequence[AsyncLeaseGrant]) -> None:
    """Interrupted on the way to the caller: nobody would ever release them."""
    for grant in grants:
        grant.abandon()
