"""For how long a lock was had, told to whoever listens. It knows nothing of the grant, which may be dropped."""

from __future__ import annotations

from holdfast.runtime.clock import now
from holdfast.runtime.telemetry import emit


class Hold:
    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: float | None = None

    def begin(self, asked_at: float) -> None:
        self._since = since = now()
        emit("lock.acquired", waited=since - asked_at)

    def end(self, *, lost: bool = False) -> None:
        """The first time alone."""
        since, self._since = self._since, None
        if since is None:
            return
        if lost:
            emit("lock.lost")
        emit("lock.ended", held=now() - since)

    def lose(self, _: Exception | None = None) -> None:
        """Called by the pump: the session that held it is gone."""
        self.end(lost=True)
