"""The grant of a lock: proof of holding it, for as long as its session lives, and what happens when that is lost."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.errors import EngineError, HoldfastError, LockLost
from holdfast.lock.tickets import Name, Ticket
from holdfast.names import OnLost
from holdfast.runtime import forks
from holdfast.runtime.concurrency_async import AsyncCancelScope
from holdfast.runtime.exit import LOST_STATUS
from holdfast.runtime.log import logger

if TYPE_CHECKING:
    from holdfast.lock.handle_async import AsyncLockSpace

log = logger("holdfast.lock")

_NONE = Ticket((), "", None, waits=False)
"""Of a grant that nobody has asked for yet."""


class AsyncLockGrant:
    """A lock we hold. Any thread or task may release it."""

    __slots__ = ("__weakref__", "_era", "_on_lost", "_ours", "_over", "_scope", "_space", "_ticket", "name")

    def __init__(self, space: AsyncLockSpace, name: Name, on_lost: OnLost[Any]) -> None:
        self.name = name
        self._space, self._on_lost = space, on_lost
        self._over: HoldfastError | None = None
        self._ours = True  # deleted by whoever gives it back: that is one step, and of two threads one does it
        self._scope = AsyncCancelScope() if on_lost == "cancel" else None
        self._era = forks.era
        self._ticket = _NONE

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
            if not self._takes_back():
                return False
            await self._space.sessions.release(self._ticket)
            self._ticket.tell = None
            return self._ticket.state == "released"
        except BaseException:
            self._abandon()
            raise

    def _takes_back(self) -> bool:
        """Is it to be unlocked? Of all who release it, in whatever threads, one is told so, and unlocks it, or says
        ``_abandon`` when it is cut short: another may have it by the time the second one comes."""
        if self._era != forks.era or self._ticket.state != "held":
            return False
        try:
            del self._ours
        except AttributeError:
            return False
        return True

    def _abandon(self) -> None:
        """Interrupted on the way to the caller: nobody would ever release it."""
        with suppress(AttributeError):
            del self._ours
        if self._era == forks.era:
            self._space.sessions.abandon(self._ticket)

    def _start_over(self) -> None:
        """It was lost before anybody had it, or not granted: it is asked for again."""
        self._ticket, self._over = _NONE, None

    def _lose(self, error: Exception) -> None:
        """Called by the pump: the session that held it is gone."""
        if self._ticket.state != "lost" or self._over is not None:  # it has started over meanwhile, or knows
            return
        self._over = problem = self._loss(error)
        if self._on_lost == "exit":
            log.critical(
                "%s; on_lost='exit': this process ends now",
                problem,
                extra={"event": "lock.exits", "lock": self.name, "error": str(problem)},
            )
            os._exit(LOST_STATUS)
        if self._scope is not None:
            self._scope.cancel(problem)
        elif callable(self._on_lost):
            self._space.engine.owner.notify(self._on_lost, self)

    def __del__(self) -> None:
        """Nobody can release it any more. It stays locked: whoever dropped it may still be at the work it protects, and
        when the garbage collector comes is no answer to who may go in."""
        try:
            if self._ticket.state != "held" or not hasattr(self, "_ours"):
                return
        except AttributeError:  # interrupted when it was made
            return
        if self._era == forks.era and not self._space.engine.closing:
            warnings.warn(
                f"the grant of lock {self.name!r} was dropped without release: it is locked until its client is closed",
                ResourceWarning,
                stacklevel=1,
                source=self,
            )

    def _listen(self) -> None:
        """Held now. Whoever only looks at ``lost`` sees it in the ticket; the others are told by the pump, which knows
        the grant then, also when nobody else does."""
        self._ticket.tell = self._lose

    async def __aenter__(self) -> Self:
        """LockLost when it is gone already: the block would run unlocked."""
        self.check()
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(kind, error, trace)

    def _enter(self) -> None:
        """A block begins."""
        self._ticket.block = True
        if self._scope is not None:
            self._scope.enter()

    async def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The block is over."""
        try:
            if self._scope is not None:
                self._scope.exit(kind, error, trace)
        finally:
            try:
                await self.release()
            except EngineError as problem:
                self._put_off(problem)

    def _put_off(self, problem: EngineError) -> None:
        """The pump goes on until it is free, or its session is gone."""
        self._abandon()
        log.warning(
            "lock %r is released later, the database did not take it now: %s",
            self.name,
            problem,
            extra={"event": "lock.released_late", "lock": self.name, "error": str(problem)},
        )

    def _loss(self, error: Exception | None) -> LockLost:
        problem = LockLost(f"lock {self.name!r} is lost with the session that held it: {error}")
        problem.__cause__ = error
        return problem

    def _problem(self) -> HoldfastError | None:
        if self._over is not None:
            return self._over
        if self._era != forks.era:
            return LockLost(f"lock {self.name!r} belongs to the parent process, not to this fork of it")
        if self._space.engine.closing:
            return LockLost(f"lock {self.name!r} was released when its client was closed")
        ours = hasattr(self, "_ours")
        if self._ticket.state == "lost" and ours:  # and about to be told
            return self._loss(self._ticket.problem)
        if not ours or self._ticket.state != "held":
            return LockLost(f"lock {self.name!r} was released")
        return None
