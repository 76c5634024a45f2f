"""The lock: mutual exclusion that lives with a session of our own, so the application may commit as it likes.

The handle says what is wanted, the grant is the proof of having it. How locks share sessions, and who is next, is for
``lock.mux`` to say; this module asks, and gives the answers their names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any

from holdfast.database.engine_async import AsyncEngine
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, Unanswered, Unreachable
from holdfast.lock.grant_async import AsyncLockGrant
from holdfast.lock.locks_async import CALL_TIMEOUT, AsyncLocks, owner
from holdfast.lock.standing import standing
from holdfast.lock.terms import Target, check_on_lost, refusal, target, texts
from holdfast.lock.tickets import Key, Name, State, Ticket
from holdfast.names import OnLost, Unset, check_timeout
from holdfast.runtime import forks, telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import AsyncCancelScope, sleep


class AsyncLock:
    """A lock to be had: ``async with lock as grant``, ``acquire``, ``try_acquire`` or ``or_skip``."""

    __slots__ = ("_entered", "_on_lost", "_space", "_target", "_timeout")

    def __init__(self, space: AsyncLockSpace, name: Name, timeout: float | None, on_lost: OnLost[Any]) -> None:
        if type(timeout) is not float or not timeout >= 0.0:
            timeout = check_timeout(timeout)
        if on_lost != "flag":
            check_on_lost(on_lost, cancels=AsyncCancelScope.cancels)
        self._target = space.texts[name] if type(name) is str else target(name, space.texts)
        self._space, self._timeout, self._on_lost = space, timeout, on_lost
        self._entered: list[AsyncLockGrant] = []

    @property
    def name(self) -> Name:
        return self._target.name

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}>"

    async def acquire(self, *, timeout: float | Unset | None = Unset.UNSET) -> AsyncLockGrant:
        """The grant; AcquireTimeout after ``timeout`` seconds (None: wait for ever), NotAcquired at once if that is 0,
        LockReentered at once if this very thread or task has it already, or the block of a task that awaits it."""
        limit = self._timeout if timeout is Unset.UNSET else check_timeout(timeout)
        grant = self._make()
        try:
            state = await self._take(grant, limit)
            if state == "held":
                return grant
        except BaseException:
            grant._abandon()
            raise
        raise self._refused(state, limit, grant)

    async def try_acquire(self) -> AsyncLockGrant | None:
        """The grant, or None when somebody has it, be it this very thread or task."""
        grant = self._make()
        try:
            return grant if await self._skips(grant) else None
        except BaseException:
            grant._abandon()
            raise

    def or_skip(self) -> AsyncSkip:
        """A block that runs with the grant, or with None when somebody has it."""
        return AsyncSkip(self)

    async def __aenter__(self) -> AsyncLockGrant:
        """With all that ``_take`` does in here: this is the way that is to be fast."""
        space, wanted, limit = self._space, self._target, self._timeout
        grant = AsyncLockGrant(space, wanted.name, self._on_lost)
        try:
            try:
                if space.era != forks.era:
                    space.check_usable()
                if (key := wanted.key or space.key_of(wanted)) is None:
                    state = await self._ask_first(grant, limit) or grant._ticket.state
                else:
                    grant._ticket = ticket = Ticket(key, wanted.label, None, limit > 0)
                    state = await space.sessions.acquire(ticket, limit or CALL_TIMEOUT) or ticket.state
                if state == "held" and self._on_lost == "flag":
                    grant._ticket.block = True
                    self._entered.append(grant)
                    return grant
                state = await self._go_on(grant, state, limit)
            except BaseException:
                grant._abandon()
                raise
            if state == "held":
                grant._enter()
                self._entered.append(grant)
                return grant
        except BaseException:
            grant._abandon()
            raise
        raise self._refused(state, limit, grant)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            entered = self._entered
            grant = entered[0] if len(entered) == 1 else _innermost(entered)
            if self._on_lost != "flag":
                await grant._leave(kind, error, trace)
            elif grant._takes_back():
                await self._space.sessions.release(grant._ticket)
        except EngineError as problem:
            grant._put_off(problem)
        except BaseException:
            _abandon_innermost(self._entered)
            raise
        entered.remove(grant)

    def _refused(self, state: State, limit: float, grant: AsyncLockGrant) -> Exception:
        return refusal(self.name, state, waited=limit or None, contended=grant._ticket.contended)

    def _make(self) -> AsyncLockGrant:
        return AsyncLockGrant(self._space, self._target.name, self._on_lost)

    async def _skips(self, grant: AsyncLockGrant) -> bool:
        state = await self._take(grant, 0.0)
        if state in ("held", "busy", "reentered"):
            return state == "held"
        raise refusal(self.name, state, waited=None, contended=False)

    async def _take(self, grant: AsyncLockGrant, limit: float) -> State:
        """Abandoned when it is cut short, and again by whoever called: an interrupt may come in the midst of it."""
        try:
            state = await self._ask(grant, limit) or grant._ticket.state
            if state != "held" or self._on_lost != "flag":
                state = await self._go_on(grant, state, limit)
        except BaseException:
            grant._abandon()
            raise
        return state

    def _ask(self, grant: AsyncLockGrant, limit: float) -> Awaitable[State | None]:
        """Once; what became of it is in the ticket, if it is not the answer."""
        space, wanted = self._space, self._target
        if space.era != forks.era:
            space.check_usable()
        if (key := wanted.key or space.key_of(wanted)) is None:
            return self._ask_first(grant, limit)
        grant._ticket = ticket = Ticket(key, wanted.label, None, limit > 0)
        return space.sessions.acquire(ticket, limit or CALL_TIMEOUT)

    async def _ask_first(self, grant: AsyncLockGrant, limit: float) -> State | None:
        """The number of its namespace is asked for at first use, and that takes time, too: maybe too much."""
        space, wanted = self._space, self._target
        until = now() + (limit or CALL_TIMEOUT)
        try:
            number = await space.number(wanted.namespace, until - now())
        except (Unanswered, Unreachable):
            if now() < until - 0.01:
                raise
            return "gone"
        grant._ticket = ticket = Ticket((number, wanted.number), wanted.label, None, limit > 0)
        return await space.sessions.acquire(ticket, until - now())

    async def _go_on(self, grant: AsyncLockGrant, state: State, limit: float) -> State:
        """It outlives a restart of the database: whoever waits goes on asking until its time is up."""
        until, pause, contended = now() + (limit or CALL_TIMEOUT), 0.1, False
        while True:
            ticket = grant._ticket
            if state == "held":
                if self._on_lost != "flag":
                    grant._listen()
                state = ticket.state
            if state == "released":  # before we could look: its client is being closed
                self._space.engine.check_open()
            if state not in ("failed", "lost"):
                return state
            problem, deadline = ticket.problem, ticket.deadline or until
            contended = contended or ticket.contended or state == "lost"
            if not (contended and isinstance(problem, Unreachable | Unanswered) and now() + pause < deadline):
                raise self._told(problem)
            grant._start_over()
            await sleep(pause)
            self._space.check_usable()
            pause = min(pause * 2, 1.0)
            grant._ticket = again = Ticket(ticket.key, ticket.name, None, ticket.waits)
            state = await self._space.sessions.acquire(again, deadline - now()) or again.state

    def _told(self, problem: Exception | None) -> Exception:
        """A fresh one: several may have failed together, and tracebacks grow."""
        if isinstance(problem, Refused):
            told: Exception = self._space.engine.translate(problem)
        elif problem is None:
            told = EngineError(f"lock {self.name!r} was not acquired")
        else:
            told = type(problem)(*problem.args)
        told.__cause__ = problem
        return told


class AsyncLockSpace:
    """All locks of one client: their sessions, and the numbers of their namespaces."""

    lock: type[AsyncLock] = AsyncLock
    """Made by whoever has the space, with one call less on the way."""

    def __init__(self, engine: AsyncEngine, database: Database, *, kept: int, extra: int) -> None:
        self.engine, self.texts = engine, texts(database.schema, database.dialect == "sqlite")
        self.sessions = AsyncLocks(database, engine.owner, engine.check_open, kept=kept, extra=extra)
        self.era = forks.era
        self._be_measured()

    def _be_measured(self) -> None:
        telemetry.register(self)
        telemetry.follow(self)

    def _gauges(self) -> Iterable[tuple[str, float]]:
        """Asks nobody."""
        pump = self.sessions._pump
        found = standing([] if pump is None else list(pump.mux.claims.values()))
        return [("locks_held", found.held), ("lock_waiters", found.waiting)]

    def listened(self, heard: bool) -> None:
        """Whoever is not listened to locks as fast as can be."""
        if not heard:
            self.lock = AsyncLock
            return
        from holdfast.lock.measured_async import AsyncMeasuredLock

        self.lock = AsyncMeasuredLock

    def check_usable(self) -> None:
        """Is the client closed, or a fork of itself? Whether it is on its own loop is for the sessions to say."""
        self.engine.check_usable()
        self.sessions.notice_fork()
        if self.era != forks.era:
            self.era = forks.era
            self._be_measured()

    def key_of(self, wanted: Target) -> Key | None:
        """Of a number in a namespace; None when the namespace's own is not known yet."""
        number = self.sessions.namespaces.get(wanted.namespace)
        return None if number is None else (number, wanted.number)

    async def number(self, namespace: str, timeout: float) -> bytes:
        """Of a namespace: stable from its first use on."""
        [row] = await self.engine.call("lock_namespace", {"name": namespace}, timeout=min(timeout, CALL_TIMEOUT))
        self.sessions.namespaces[namespace] = number = b"%d" % row["id"]
        return number

    async def close(self) -> None:
        await self.sessions.close(EngineError(f"the client of {self.engine.database} was closed meanwhile"))


class AsyncSkip:
    """What ``or_skip`` gives: the block runs in any case."""

    __slots__ = ("_entered", "_lock")

    def __init__(self, lock: AsyncLock) -> None:
        self._lock = lock
        self._entered: list[AsyncLockGrant] = []
        """Also of those who were given None: their blocks end, too."""

    async def __aenter__(self) -> AsyncLockGrant | None:
        grant = self._lock._make()
        try:
            held = await self._lock._skips(grant)
            if held:
                grant._enter()
            self._entered.append(grant)
            return grant if held else None
        except BaseException:
            grant._abandon()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            grant = _innermost(self._entered)
            await grant._leave(kind, error, trace)
        except BaseException:
            _abandon_innermost(self._entered)
            raise
        self._entered.remove(grant)


def _innermost(entered: list[AsyncLockGrant]) -> AsyncLockGrant:
    """Of the block that ends: the last one begun by whoever leaves, as one handle may be entered in many tasks at once.

    Nobody knows which one it is when it was begun elsewhere. Then one that holds nothing: what is held is freed by the
    last who leaves, never under somebody who still works.
    """
    me = owner()
    for grant in reversed(entered):
        if grant._ticket.owner == me:
            return grant
    if not entered:
        raise RuntimeError("a lock is left that was not entered")
    return next((grant for grant in entered if grant.lost), entered[-1])


def _abandon_innermost(entered: list[AsyncLockGrant]) -> None:
    with suppress(RuntimeError, ValueError):
        grant = _innermost(entered)
        grant._abandon()
        entered.remove(grant)
