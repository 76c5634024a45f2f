"""The lock as callers use it. A handle describes the lock that is wanted, and a grant is the proof of holding it.

Locks live on sessions of holdfast, so the application may commit as it likes. Which session, and who is next, is
decided in ``lock.pool``; this module asks its executor, and turns the answers into grants and errors.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

from holdfast.database.engine_async import AsyncEngine
from holdfast.database.url import Database
from holdfast.errors import EngineError, HoldfastError, LockLost, Refused, Unanswered, Unreachable
from holdfast.lock import log
from holdfast.lock.executor_async import CALL_TIMEOUT, AsyncExecutor, owner
from holdfast.lock.pool import LockRequest
from holdfast.lock.terms import PAIR, Key, Name, State, Target, check_on_lost, refusal, target, targets
from holdfast.names import OnLost, Unset, check_timeout
from holdfast.runtime import forks, telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import AsyncCancelScope, sleep
from holdfast.runtime.exit import LOST_STATUS

if TYPE_CHECKING:
    from holdfast.lock.monitor_async import AsyncHolderLookup
    from holdfast.lock.records import LockRecord

_REASONS = {"gone": "timeout"}
"""What telemetry calls a refusal, if not by the state of its request."""
NO_REQUEST = LockRequest((), "", waits=False, shared=False)
"""Of a grant for which the database was not asked yet."""


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
        is_plain = type(name) is str or (type(name) is tuple and tuple(map(type, name)) == PAIR)
        self._target = space.targets[name] if is_plain else target(name, space.targets)  # type: ignore[index]
        self._space, self._timeout = space, timeout
        self._shared, self._on_lost = shared, on_lost
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
        """A contended request outlives a restart of the database: if its session is lost, ask again until its time is
        up."""
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
        request, holder = grant._request, None
        if state == "gone" and request.contended:
            holder = await self._space.find_holder(request.key)
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


class AsyncLockGrant:
    """A lock we hold, for as long as the session that holds it lives. Any thread or task may release it."""

    __slots__ = (
        "__weakref__", "_era", "_held_since", "_loss", "_on_lost", "_request", "_scope", "_space", "_stays_locked",
        "_unreleased", "name",
    )  # fmt: skip

    def __init__(self, space: AsyncLockSpace, name: Name, on_lost: OnLost[Any]) -> None:
        self.name = name
        self._space, self._on_lost, self._request = space, on_lost, NO_REQUEST
        self._loss: HoldfastError | None = None
        self._scope = AsyncCancelScope() if on_lost == "cancel" else None
        self._era = forks.era
        self._stays_locked = False
        """If True, dropping the grant keeps the lock. Set when ``acquire`` returns it, cleared by ``with``."""
        self._held_since: float | None = None
        """Set while telemetry has listeners."""
        self._unreleased = True  # deleted by the caller that releases it: of two threads, only one can

    def __reduce__(self) -> Any:
        return self._space.engine.__reduce__()  # raises

    def __repr__(self) -> str:
        return f"<LockGrant {self.name!r} {'lost' if self.lost else 'held'}>"

    @property
    def lost(self) -> bool:
        """True once we may no longer act as the holder, and for ever after."""
        return self._problem() is not None

    def check(self) -> None:
        """Raise LockLost when it is gone: released, or lost with the session that held it."""
        if (problem := self._problem()) is not None:
            raise type(problem)(*problem.args) from problem.__cause__

    async def release(self) -> bool:
        """Give it back; True if it was still ours. A second release is harmless, and so is one in a forked child."""
        try:
            if not self._begin_release():
                return False
            await self._space.executor.release(self._request)
            self._request.on_loss = None
            return self._request.state == "released"
        except BaseException:
            self._abandon()
            raise

    def _begin_release(self) -> bool:
        """Whether this call is the one that releases it. It calls ``_abandon`` if it is interrupted."""
        if self._era != forks.era or self._request.state != "held":
            return False
        try:
            del self._unreleased
        except AttributeError:
            return False
        if self._held_since is not None:
            telemetry.emit("lock.ended", held=now() - self._held_since)
        return True

    def _abandon(self) -> None:
        """Its caller was interrupted, and will not release it: release it, without waiting for that."""
        with suppress(AttributeError):
            del self._unreleased
        if self._era == forks.era:
            self._space.executor.abandon(self._request)

    def _acquired(self, asked_at: float) -> None:
        """Telemetry has listeners."""
        self._held_since = since = now()
        telemetry.emit("lock.acquired", waited=since - asked_at)
        if self._request.on_loss is None:
            self._request.on_loss = weak_lose(self)
        if self._request.state == "lost":  # before it could be reported
            self._lose(self._request.error)

    def _lose(self, error: Exception | None) -> None:
        """Called by the executor: the session that held it is gone."""
        if self._request.state != "lost" or self._loss is not None:
            return
        self._loss = loss = self._lost_with(error)
        if self._held_since is not None:
            telemetry.emit("lock.lost")
            telemetry.emit("lock.ended", held=now() - self._held_since)
        if self._on_lost == "exit":
            log.critical(
                "%s; on_lost='exit': this process ends now",
                loss,
                extra={"event": "lock.exits", "lock": self.name, "error": str(loss)},
            )
            os._exit(LOST_STATUS)
        if self._scope is not None:
            self._scope.cancel(loss)
        elif callable(self._on_lost):
            self._space.engine.owner.notify(self._on_lost, self)

    def __del__(self) -> None:
        """Nothing can release it any more. If Ctrl-C came as ``__exit__`` was entered, or as an interrupted acquire was
        to be abandoned, it is released here, once its handle is dropped, too. A grant that ``acquire`` has returned
        stays locked, because the work that it protects may still be running, and the garbage collector must not decide
        who is next."""
        try:
            if self._request.state not in ("held", "queued"):
                return
        except AttributeError:  # interrupted in __init__
            return
        if self._era != forks.era or self._space.engine.closing:
            return
        if not (self._stays_locked and hasattr(self, "_unreleased")):
            self._abandon()
            return
        warnings.warn(
            f"the grant of lock {self.name!r} was dropped without release: it is locked until its client is closed",
            ResourceWarning,
            stacklevel=1,
            source=self,
        )

    async def __aenter__(self) -> Self:
        """LockLost when it is gone already: the block would run unlocked."""
        self.check()
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit(kind, error, trace)

    def _enter(self) -> None:
        """A block begins. From now on the executor does not keep the grant alive."""
        self._stays_locked = False
        if self._request.on_loss is not None:
            self._request.on_loss = weak_lose(self)
        if self._scope is not None:
            self._scope.enter()

    async def _exit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The block ends."""
        try:
            if self._scope is not None:
                self._scope.exit(kind, error, trace)
        finally:
            try:
                await self.release()
            except EngineError as problem:
                self._release_later(problem)

    def _release_later(self, problem: EngineError) -> None:
        """The executor goes on until it is unlocked, or its session is gone."""
        self._abandon()
        log.warning(
            "lock %r is released later, the database did not unlock it now: %s",
            self.name,
            problem,
            extra={"event": "lock.released_late", "lock": self.name, "error": str(problem)},
        )

    def _lost_with(self, error: Exception | None) -> LockLost:
        loss = LockLost(f"lock {self.name!r} is lost with the session that held it: {error}")
        loss.__cause__ = error
        return loss

    def _problem(self) -> HoldfastError | None:
        if self._loss is not None:
            return self._loss
        if self._era != forks.era:
            return LockLost(f"lock {self.name!r} belongs to the parent process, not to this fork of it")
        if self._space.engine.closing:
            return LockLost(f"lock {self.name!r} was released when its client was closed")
        is_ours = hasattr(self, "_unreleased")
        if self._request.state == "lost" and is_ours:
            return self._lost_with(self._request.error)
        if not is_ours or self._request.state != "held":
            return LockLost(f"lock {self.name!r} was released")
        return None


def weak_lose(grant: AsyncLockGrant) -> Any:
    """``grant._lose``, without keeping the grant alive."""
    reference = ref(grant)

    def lose(error: Exception | None) -> None:
        if (target := reference()) is not None:
            target._lose(error)

    return lose


class AsyncLockSpace:
    """All locks of one client: their executor, and the numbers of their namespaces."""

    lock = AsyncLock
    """hot: to import it in ``client.lock`` takes 1 % of bench lock_pair."""

    def __init__(self, engine: AsyncEngine, database: Database, *, kept: int, extra: int) -> None:
        self.engine, self.targets = engine, targets(database.schema, database.dialect == "sqlite")
        self.executor = AsyncExecutor(database, engine, kept=kept, extra=extra)
        self.era = forks.era
        self._lookup: AsyncHolderLookup | None = None
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
            self.era, self._lookup = forks.era, None
            telemetry.register(self)

    def key_of(self, wanted: Target) -> Key | None:
        """The key of a number in a namespace; None when the number of the namespace is not known yet."""
        number = self._namespaces.get(wanted.namespace)
        return None if number is None else (number, wanted.number)

    async def find_key(self, wanted: Target, timeout: float) -> Key:
        """Asks the database for the number of the namespace, which never changes. It does not ask in a session for
        locks: the answer may have to wait for a transaction that has just used the namespace for the first time."""
        parameters, timeout = {"name": wanted.namespace}, min(timeout, CALL_TIMEOUT)
        [row] = await self.engine.call("lock_namespace", parameters, timeout=timeout)
        self._namespaces[wanted.namespace] = number = b"%d" % row["id"]
        return number, wanted.number

    async def find_holder(self, key: Key) -> LockRecord | None:
        """Who holds a lock, for the message of a refusal; None if that is not known."""
        from holdfast.lock.monitor_async import AsyncHolderLookup

        if self._lookup is None:
            self._lookup = AsyncHolderLookup(self.engine)
        return await self._lookup.find(key)

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
    handle. If the caller entered none, because a task exits what another has entered: one that is lost, else the last.
    """
    me = owner()
    for grant in reversed(entered):
        if grant._request.owner == me:
            return grant
    if not entered:
        raise RuntimeError("this lock was not entered, and cannot be exited")
    return next((grant for grant in entered if grant.lost), entered[-1])
