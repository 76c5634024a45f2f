"""The lock as callers use it. A handle describes the lock that is wanted, and a grant is the proof of holding it.

Locks live on sessions of holdfast, so the application may commit as it likes. Which session, and who is next, is
decided in ``lock.pool``; this module asks its executor, and turns the answers into grants and errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any

from holdfast.database.engine_async import AsyncEngine
from holdfast.database.url import Database
from holdfast.errors import EngineError, HoldfastError, Refused, Unanswered, Unreachable
from holdfast.lock.executor_async import CALL_TIMEOUT, AsyncExecutor, owner
from holdfast.lock.grant_async import NO_REQUEST, AsyncLockGrant
from holdfast.lock.pool import LockRequest
from holdfast.lock.terms import Key, Name, State, Target, check_on_lost, refusal, target, texts
from holdfast.names import OnLost, Unset, check_timeout
from holdfast.runtime import forks, telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import AsyncCancelScope, sleep

_REASONS = {"gone": "timeout"}
"""What telemetry calls a refusal, if not by the state of its request."""


class AsyncLock:
    """Describes a lock; nothing is asked of the database until it is acquired: ``async with lock as grant``,
    ``acquire``, ``try_acquire`` or ``or_skip``."""

    __slots__ = ("_entered", "_on_lost", "_shared", "_space", "_target", "_timeout")

    def __init__(
        self, space: AsyncLockSpace, name: Name | Target, timeout: float | None, shared: bool, on_lost: OnLost[Any]
    ) -> None:
        if type(timeout) is not float or not timeout >= 0.0:
            timeout = check_timeout(timeout)
        if on_lost != "flag":
            check_on_lost(on_lost, cancels=AsyncCancelScope.cancels)
        self._target = space.texts[name] if type(name) is str else target(name, space.texts)
        self._space, self._timeout, self._shared, self._on_lost = space, timeout, shared, on_lost
        self._entered: list[AsyncLockGrant] = []

    @property
    def name(self) -> Name:
        return self._target.name

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}{' shared' if self._shared else ''}>"

    async def acquire(self, *, timeout: float | Unset | None = Unset.UNSET) -> AsyncLockGrant:
        """The grant. AcquireTimeout after ``timeout`` seconds (None: wait for ever), NotAcquired at once if it is 0,
        LockReentered at once if this thread or task holds it already."""
        limit = self._timeout if timeout is Unset.UNSET else check_timeout(timeout)
        grant = AsyncLockGrant(self._space, self._target.name, self._on_lost)
        try:
            state = await self._ask(grant, limit)
            if state == "held":
                grant._stays_locked = True
                return grant
        except BaseException:
            grant._abandon()
            raise
        raise await self._refusal(state, limit, grant)

    async def try_acquire(self) -> AsyncLockGrant | None:
        """The grant, or None when it is held, also by this thread or task."""
        grant = AsyncLockGrant(self._space, self._target.name, self._on_lost)
        try:
            grant._stays_locked = await self._try(grant)
            return grant if grant._stays_locked else None
        except BaseException:
            grant._abandon()
            raise

    def or_skip(self) -> AsyncSkip:
        """A block that runs with the grant, or with None when the lock is held."""
        return AsyncSkip(self)

    async def __aenter__(self) -> AsyncLockGrant:
        limit = self._timeout
        grant = AsyncLockGrant(self._space, self._target.name, self._on_lost)
        try:
            state = await self._ask(grant, limit)
            if state == "held":
                if grant._request.on_loss is not None:
                    grant._enter()
                self._entered.append(grant)
                return grant
        except BaseException:
            grant._abandon()
            raise
        raise await self._refusal(state, limit, grant)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """hot: does what ``_exit`` does, without its calls, where there is nothing but to release."""
        try:
            entered = self._entered
            is_plain = self._on_lost == "flag" and len(entered) == 1
            if is_plain:
                grant = entered[0]
                if grant._begin_release():
                    await self._space.executor.release(grant._request)
        except EngineError as problem:
            grant._release_later(problem)
        except BaseException:
            if len(self._entered) == 1:
                grant = self._entered[0]
                grant._abandon()
                self._entered.remove(grant)
            raise
        if is_plain:
            entered.remove(grant)
        else:
            await _exit(entered, kind, error, trace)

    async def _try(self, grant: AsyncLockGrant) -> bool:
        state = await self._ask(grant, 0.0)
        if state in ("held", "busy", "reentered"):
            return state == "held"
        raise refusal(self.name, state, waited=None, contended=False)

    async def _ask(self, grant: AsyncLockGrant, limit: float) -> State:
        """The state of the request. If this is interrupted, the caller abandons the grant."""
        space, wanted, timeout = self._space, self._target, limit or CALL_TIMEOUT
        if space.era != forks.era:
            space.check_usable()
        if telemetry.listeners:
            return await self._ask_and_report(grant, limit)
        if (key := wanted.key or space.key_of(wanted)) is None:
            return await self._ask_slowly(grant, limit)
        grant._request = request = LockRequest(key, wanted.label, limit > 0, self._shared)
        state = await space.executor.acquire(request, timeout) or request.state
        if state == "held" and self._on_lost == "flag":
            return state
        return await self._settle(grant, state)

    async def _ask_slowly(self, grant: AsyncLockGrant, limit: float) -> State:
        """The number of the namespace is asked for at first use."""
        space, wanted = self._space, self._target
        until = now() + (limit or CALL_TIMEOUT)
        if (key := wanted.key or space.key_of(wanted)) is None:
            try:
                key = await space.find_key(wanted, until - now())
            except (Unanswered, Unreachable):
                if now() < until - 0.01:
                    raise
                return "gone"
        grant._request = request = LockRequest(key, wanted.label, limit > 0, self._shared)
        left = max(0.0, until - now())
        return await self._settle(grant, await space.executor.acquire(request, left) or request.state)

    async def _ask_and_report(self, grant: AsyncLockGrant, limit: float) -> State:
        asked_at = now()
        try:
            state = await self._ask_slowly(grant, limit)
        except Exception:
            telemetry.emit("lock.refused", reason="error")
            raise
        if state == "held":
            grant._acquired(asked_at)
        else:
            telemetry.emit("lock.refused", reason=_REASONS.get(state, state))
        return state

    async def _settle(self, grant: AsyncLockGrant, state: State) -> State:
        """A request that waits outlives a restart of the database: ask again until its time is up."""
        pause, contended = 0.1, False
        while True:
            request = grant._request
            if state == "held":
                if self._on_lost != "flag":
                    request.on_loss = grant._lose
                state = request.state  # if it is lost already, that was not reported
            if state == "released":  # its client was closed meanwhile
                self._space.engine.check_open()
            if state not in ("failed", "lost"):
                return state
            contended = contended or request.contended or state == "lost"
            is_gone = isinstance(request.error, Unreachable | Unanswered)
            if not (contended and is_gone and now() + pause < request.deadline):
                raise self._failure(request.error)
            grant._request, grant._loss = NO_REQUEST, None
            await sleep(pause)
            self._space.check_usable()
            pause = min(pause * 2, 1.0)
            grant._request = again = LockRequest(request.key, request.label, request.waits, request.shared)
            left = max(0.0, request.deadline - now())
            state = await self._space.executor.acquire(again, left) or again.state

    async def _refusal(self, state: State, limit: float, grant: AsyncLockGrant) -> Exception:
        from holdfast.lock.monitor_async import AsyncLockMonitor

        request, holder = grant._request, None
        if state == "gone" and request.contended:
            with suppress(HoldfastError):
                holder = await AsyncLockMonitor(self._space.engine, None)._find_holder(request.key)
        return refusal(self.name, state, waited=limit or None, contended=request.contended, holder=holder)

    def _failure(self, error: Exception | None) -> Exception:
        """A new error: several requests may have failed with the same one, and its traceback would grow."""
        if isinstance(error, Refused):
            failure: Exception = self._space.engine.translate(error)
        elif error is None:
            failure = EngineError(f"lock {self.name!r} was not acquired")
        else:
            failure = type(error)(*error.args)
        failure.__cause__ = error
        return failure


class AsyncLockSpace:
    """All locks of one client: their executor, and the numbers of their namespaces."""

    lock = AsyncLock
    """hot: to import it in ``client.lock`` takes 1 % of bench lock_pair."""

    def __init__(self, engine: AsyncEngine, database: Database, *, kept: int, extra: int) -> None:
        self.engine, self.texts = engine, texts(database.schema, database.dialect == "sqlite")
        self.executor = AsyncExecutor(database, engine.owner, engine.check_open, kept=kept, extra=extra)
        self.era = forks.era
        self._namespaces: dict[str, bytes] = {}
        telemetry.register(self)

    def _gauges(self) -> Iterable[tuple[str, float]]:
        pool = self.executor.pool
        held, waiting = (0, 0) if pool is None else pool.counts()
        return [("locks_held", held), ("lock_waiters", waiting)]

    def check_usable(self) -> None:
        """Raises if the client is closed. In a forked child it begins anew. The executor checks the event loop."""
        self.engine.check_usable()
        self.executor.notice_fork()
        if self.era != forks.era:
            self.era = forks.era
            telemetry.register(self)

    def key_of(self, wanted: Target) -> Key | None:
        """The key of a number in a namespace; None when the number of the namespace is not known yet."""
        number = self._namespaces.get(wanted.namespace)
        return None if number is None else (number, wanted.number)

    async def find_key(self, wanted: Target, timeout: float) -> Key:
        """Asks the database for the number of the namespace, which never changes."""
        parameters = {"name": wanted.namespace}
        [row] = await self.engine.call("lock_namespace", parameters, timeout=min(timeout, CALL_TIMEOUT))
        self._namespaces[wanted.namespace] = number = b"%d" % row["id"]
        return number, wanted.number

    async def close(self) -> None:
        await self.executor.close(EngineError(f"the client of {self.engine.database} was closed meanwhile"))


class AsyncSkip:
    """What ``or_skip`` returns: its block runs in any case."""

    __slots__ = ("_entered", "_lock")

    def __init__(self, lock: AsyncLock) -> None:
        self._lock = lock
        self._entered: list[AsyncLockGrant] = []
        """Also of blocks that were given None: they end, too."""

    async def __aenter__(self) -> AsyncLockGrant | None:
        lock = self._lock
        grant = AsyncLockGrant(lock._space, lock._target.name, lock._on_lost)
        try:
            is_held = await lock._try(grant)
            if is_held:
                grant._enter()
            self._entered.append(grant)
            return grant if is_held else None
        except BaseException:
            grant._abandon()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _exit(self._entered, kind, error, trace)


async def _exit(
    entered: list[AsyncLockGrant],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """A block of a handle ends."""
    try:
        grant = entered[0] if len(entered) == 1 else _innermost(entered)
        await grant._exit(kind, error, trace)
    except BaseException:
        with suppress(RuntimeError, ValueError):
            grant = _innermost(entered)
            grant._abandon()
            entered.remove(grant)
        raise
    entered.remove(grant)


def _innermost(entered: list[AsyncLockGrant]) -> AsyncLockGrant:
    """The grant of the block that ends: the last one that the caller entered, as several tasks may have entered one
    handle. If the caller entered none, one that is lost: a lock is never released while another task is still in its
    block.
    """
    me = owner()
    for grant in reversed(entered):
        if grant._request.owner == me:
            return grant
    if not entered:
        raise RuntimeError("this lock was not entered, and cannot be exited")
    return next((grant for grant in entered if grant.lost), entered[-1])
