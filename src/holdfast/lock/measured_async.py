"""The lock that a client makes while somebody listens: the same one, and it tells what becomes of it."""

from __future__ import annotations

from holdfast.lock.grant_async import AsyncLockGrant
from holdfast.lock.handle_async import AsyncLock, AsyncLockSpace
from holdfast.lock.hold import Hold
from holdfast.lock.tickets import Name, State
from holdfast.names import OnLost
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now

_REASONS = {"gone": "timeout"}
"""What a refusal is called, if not as the state of its ticket."""


class AsyncMeasuredGrant(AsyncLockGrant):
    __slots__ = ("hold",)

    def __init__(self, space: AsyncLockSpace, name: Name, on_lost: OnLost) -> None:
        super().__init__(space, name, on_lost)
        self.hold = Hold()

    def takes_back(self) -> bool:
        ours = super().takes_back()
        if ours:
            self.hold.end()
        return ours

    def abandon(self) -> None:
        self.hold.end()
        super().abandon()

    def lose(self, error: Exception) -> None:
        self.hold.lose()
        super().lose(error)


class AsyncMeasuredLock(AsyncLock):
    __slots__ = ()

    def make(self) -> AsyncMeasuredGrant:
        return AsyncMeasuredGrant(self._space, self._target.name, self._on_lost)

    async def __aenter__(self) -> AsyncLockGrant:
        grant = self.make()
        try:
            state = await self._take(grant, self._timeout)
            if state == "held":
                grant.enter()
                self._entered.append(grant)
                return grant
        except BaseException:
            grant.abandon()
            raise
        raise self._refused(state, self._timeout, grant)

    async def _take(self, grant: AsyncLockGrant, limit: float) -> State:
        assert isinstance(grant, AsyncMeasuredGrant)
        asked_at = now()
        try:
            state = await super()._take(grant, limit)
        except Exception:
            telemetry.emit("lock.refused", reason="error")
            raise
        if state != "held":
            telemetry.emit("lock.refused", reason=_REASONS.get(state, state))
            return state
        grant.hold.begin(asked_at)
        if self._on_lost == "flag":
            grant.ticket.tell = grant.hold.lose  # not the grant's own: the pump would keep it alive
        if grant.ticket.state == "lost":  # before anybody could be told
            grant.hold.lose()
        return state
