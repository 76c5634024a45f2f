# Generated from measured_async.py by scripts/unasync.py. Do not edit.
"""The lock that a client makes while somebody listens: the same one, and it tells what becomes of it."""

from __future__ import annotations

from typing import Any

from holdfast.lock.grant import LockGrant
from holdfast.lock.handle import Lock, LockSpace
from holdfast.lock.hold import Hold
from holdfast.lock.tickets import Name, State
from holdfast.names import OnLost
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now

_REASONS = {"gone": "timeout"}
"""What a refusal is called, if not as the state of its ticket."""


class MeasuredGrant(LockGrant):
    __slots__ = ("_hold",)

    def __init__(self, space: LockSpace, name: Name, on_lost: OnLost[Any]) -> None:
        super().__init__(space, name, on_lost)
        self._hold = Hold()

    def _takes_back(self) -> bool:
        ours = super()._takes_back()
        if ours:
            self._hold.end()
        return ours

    def _abandon(self) -> None:
        self._hold.end()
        super()._abandon()

    def _lose(self, error: Exception) -> None:
        self._hold.lose()
        super()._lose(error)


class MeasuredLock(Lock):
    __slots__ = ()

    def _make(self) -> MeasuredGrant:
        return MeasuredGrant(self._space, self._target.name, self._on_lost)

    def __enter__(self) -> LockGrant:
        grant = self._make()
        try:
            state = self._take(grant, self._timeout)
            if state == "held":
                grant._enter()
                self._entered.append(grant)
                return grant
        except BaseException:
            grant._abandon()
            raise
        raise self._refused(state, self._timeout, grant)

    def _take(self, grant: LockGrant, limit: float) -> State:
        assert isinstance(grant, MeasuredGrant)
        asked_at = now()
        try:
            state = super()._take(grant, limit)
        except Exception:
            telemetry.emit("lock.refused", reason="error")
            raise
        if state != "held":
            telemetry.emit("lock.refused", reason=_REASONS.get(state, state))
            return state
        grant._hold.begin(asked_at)
        if self._on_lost == "flag":
            grant._ticket.tell = grant._hold.lose  # not the grant's own: the pump would keep it alive
        if grant._ticket.state == "lost":  # before anybody could be told
            grant._hold.lose()
        return state
