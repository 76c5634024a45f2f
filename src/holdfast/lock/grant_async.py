"""The grant of a lock: proof of holding it, for as long as its session lives, and what happens when it is lost."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

from holdfast.errors import EngineError, HoldfastError, LockLost
from holdfast.lock.pool import LockRequest
from holdfast.lock.terms import Name
from holdfast.names import OnLost
from holdfast.runtime import forks
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import AsyncCancelScope
from holdfast.runtime.exit import LOST_STATUS
from holdfast.runtime.log import logger
from holdfast.runtime.telemetry import emit

if TYPE_CHECKING:
    from holdfast.lock.handle_async import AsyncLockSpace

log = logger("holdfast.lock")

NO_REQUEST = LockRequest((), "", waits=False, shared=False)
"""Of a grant for which the database was not asked yet."""


class AsyncLockGrant:
    """A lock we hold. Any thread or task may release it."""

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
        """True: to drop the grant does not release the lock. Set when ``acquire`` returns it, cleared by ``with``."""
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
            emit("lock.ended", held=now() - self._held_since)
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
        emit("lock.acquired", waited=since - asked_at)
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
            emit("lock.lost")
            emit("lock.ended", held=now() - self._held_since)
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
        to be abandoned, it is released here. A grant that ``acquire`` has returned stays locked, because the work that
        it protects may still be running, and the garbage collector must not decide who is next."""
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
