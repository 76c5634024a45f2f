"""The sessions of a client for its calls, on an event loop. ``call_dispatcher`` is for threads.

No caller sends: whatever adds a call or frees a session starts the next batch, and its answer is a callback. So a
caller that is cancelled leaves the batch to its neighbours.

On PostgreSQL two sessions share the load when there is enough for both (``SHARE``): while the server executes the batch
of one, the loop reads the answers of the other. So the second session is opened ahead, in the background, and no call
depends on it. Threads gain nothing by that: the interpreter runs one of them at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

from holdfast.database.background import Background
from holdfast.database.call_dispatcher import (
    IDLE,
    PATIENCE,
    READ_PATIENCE,
    abandoned_rows,
    has_its_target,
    late,
    lost_session,
    own_copy,
)
from holdfast.database.call_queue import MAX_CALLS, READS, Answer, CallQueue, QueuedCall, SessionToEnd, is_reading
from holdfast.database.sessions import LostSession, Row
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, Unanswered
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import AsyncOwner

TOLERANCE = 0.05
"""Seconds by which a batch may outlive the deadline of one of its calls."""
SHARE = 16
"""Calls that are worth a batch of their own on the second session: bench load, lease pairs."""
PAUSE = 0.005
"""Seconds between two looks for late calls."""


class AsyncCallSession(Protocol):
    shares: bool
    """Whether several calls may be in one transaction of it."""
    identity: Row | None
    """What another session needs to end it. Empty: nothing is executed after its end. None: it cannot be ended."""

    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> Awaitable[list[Row]]: ...
    def call_together(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], timeout: float
    ) -> Awaitable[list[Answer]]: ...
    async def script(self, text: str, timeout: float) -> None: ...
    def check_target(self) -> None:
        """EngineError when the database is no longer the one that was opened, such as a file that was replaced."""

    def close(self) -> None: ...


class AsyncOpener(Protocol):
    """What the dispatcher needs of its engine."""

    owner: AsyncOwner
    database: Database
    closed: bool

    @property
    def background(self) -> Background: ...
    async def open(self, timeout: float) -> AsyncCallSession:
        """A session that finds our tables."""


class _AsyncChannel:
    """A session, or the room for one, and what is being sent on it."""

    def __init__(self, *, only_reads: bool) -> None:
        self.only_reads = only_reads
        self.session: AsyncCallSession | None = None
        self.batch: list[QueuedCall] = []
        self.deadline = 0.0
        """The latest of the batch, or of the opening."""
        self.was_used = self.is_sent = False
        self.opening: asyncio.Task[None] | None = None
        self.opened_ahead = -inf
        """When that was last tried."""

    def is_free(self) -> bool:
        return not self.batch and (self.opening is None or self.opening.done())

    def short_calls(self) -> list[QueuedCall]:
        """Those of the batch that its session may outlive."""
        return [call for call in self.batch if call.deadline + TOLERANCE < self.deadline]


class AsyncCallDispatcher:
    def __init__(self, engine: AsyncOpener, sessions: int) -> None:
        self._engine = engine
        self._queue = CallQueue()
        self._channels = [_AsyncChannel(only_reads=1 < number == sessions - 1) for number in range(sessions)]
        self.lost: list[LostSession] = []
        """Sessions that are to be ended before anything else is sent."""
        self._closes_when_idle = self._is_late_armed = self._is_gathering = False
        self._timer: asyncio.TimerHandle | None = None
        """One for all callers, for the earliest deadline: a timer for each call would cost 3 us."""
        self._timer_at = inf

    async def call(
        self, name: str, parameters: Mapping[str, Any], deadline: float, *, alone: bool = False
    ) -> list[Row]:
        """The answer to a call. Unreachable when it was not sent before its deadline, Unanswered when it was,
        SessionToEnd when it was not sent because of a session that was lost while it waited."""
        call = QueuedCall(name, parameters, deadline, alone)
        call.receiver, call.since = asyncio.get_running_loop().create_future(), now()
        self._queue.add(call)
        if self._is_gathering:
            pass
        elif self._channels[0].batch and not (call.key is READS and self._may_read(0.0)):
            # hot: to look at all that wait, for each call, would cost 200 ms for 4,000
            self._limit(call.deadline)
            self._arm_late()
            if len(self._queue.waiting) == SHARE and self._sharing() is not None:
                self._serve()
        else:
            self._serve()
        try:
            rows: list[Row] = await call.receiver
            return rows
        finally:
            if call.answer is None and not self._queue.leave(call):
                self._find_abandoned()

    def is_busy(self) -> bool:
        """Whether something is being sent at this moment."""
        return any(channel.batch for channel in self._channels)

    @property
    def sessions(self) -> list[AsyncCallSession]:
        """Those that are open."""
        return [channel.session for channel in self._channels if channel.session is not None]

    async def close(self, deadline: float) -> None:
        """Calls that are being sent are Unanswered."""
        for channel in self._channels:
            if channel.opening is not None and not channel.batch:
                channel.opening.cancel()
            self._discard(channel)

    def _limit(self, deadline: float) -> None:
        """Look for late calls at that time."""
        if deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            seconds = max(0.0, deadline - now())
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        """Tell the callers whose time is over. Those whose session, or its opening, ends at the same time hear of it
        then, with the reason."""
        self._timer, self._timer_at = None, inf
        sent = [(call, channel.is_sent) for channel in self._channels for call in channel.short_calls()]
        calls = [*sent, *((call, False) for call in self._queue.waiting)]
        for call, is_sent in calls:
            if call.deadline > now():
                continue
            self._queue.leave(call)
            if not call.receiver.done():
                call.receiver.set_exception(late(self._engine.database, is_sent=is_sent))
        if left := [call.deadline for call, _ in calls if not call.receiver.done()]:
            self._limit(max(min(left), now() + PAUSE))

    # The sessions

    def _serve(self) -> None:
        """Send what waits, as far as there are free channels: see the rules in ``call_dispatcher``, and SHARE."""
        if self._queue.abandoned or self.lost:
            self._find_abandoned()
        for number, channel in enumerate(self._channels):
            if (oldest := self._queue.oldest()) is None:
                break
            if not channel.is_free():
                continue
            waited = now() - oldest.since
            if number == 0:
                load = self._queue.load() if (second := self._sharing()) is not None and second.is_free() else 0
                self._take(channel, limit=(load + 1) // 2 if load >= 2 * SHARE else MAX_CALLS)
            elif waited >= PATIENCE and not channel.only_reads:
                self._take(channel)
            elif channel is self._sharing() and self._queue.load() >= SHARE:
                self._take(channel, shared=True)
            elif waited >= PATIENCE or channel in self._may_read(waited):
                self._take(channel, reads=True)
        self._open_ahead()
        if self._queue.waiting:
            self._limit(min(call.deadline for call in self._queue.waiting))
        self._arm_late()

    def _take(
        self, channel: _AsyncChannel, *, reads: bool = False, shared: bool = False, limit: int = MAX_CALLS
    ) -> None:
        channel.is_sent = False
        self._queue.take(channel.batch, reads=reads, shared=shared, limit=limit)
        if channel.batch:
            channel.deadline = max(call.deadline for call in channel.batch)
            if short := channel.short_calls():
                self._limit(min(call.deadline for call in short))
            self._send(channel)

    def _sharing(self) -> _AsyncChannel | None:
        """The channel that shares the load, if its session is open. On SQLite one session at a time can write."""
        if len(self._channels) == 1 or self._engine.database.dialect == "sqlite":
            return None
        return self._channels[1] if self._channels[1].session is not None else None

    def _open_ahead(self) -> None:
        """Open the session that shares the load, when there is enough; after a failure not again for a while."""
        if len(self._channels) == 1 or self._engine.database.dialect == "sqlite" or self._engine.closed:
            return
        first, second = self._channels[:2]
        is_enough = len(first.batch) + len(self._queue.waiting) >= 2 * SHARE
        if is_enough and second.session is None and second.is_free() and now() >= second.opened_ahead + IDLE:
            second.opened_ahead, second.deadline = now(), now() + IDLE
            second.opening = asyncio.get_running_loop().create_task(self._open(second))

    def _find_abandoned(self) -> None:
        """What waits for a session that is lost would get no answer: its caller has to end the session."""
        self._queue.abandoned = abandoned_rows([channel.batch for channel in self._channels], self.lost)
        for call in filter(self._queue.is_held_up, list(self._queue.waiting) if self.lost else []):
            self._queue.leave(call)
            if not call.receiver.done():
                call.receiver.set_exception(SessionToEnd())

    def _may_read(self, waited: float) -> list[_AsyncChannel]:
        """The free channels beyond the first that reads may use."""
        if any(is_reading(channel.batch) for channel in self._channels):
            return []
        others = [channel for channel in self._channels[1:] if channel.is_free()]
        return [channel for channel in others if channel.session is not None or waited >= READ_PATIENCE]

    def _arm_late(self) -> None:
        """Serve again when the oldest call has waited for READ_PATIENCE, and for PATIENCE. If it has, the next free
        channel serves it."""
        if len(self._channels) > 1 and not self._is_late_armed and (oldest := self._queue.oldest()) is not None:
            waited = now() - oldest.since
            seconds = (READ_PATIENCE if waited < READ_PATIENCE else PATIENCE) - waited
            if seconds > 0:
                self._is_late_armed = True
                asyncio.get_running_loop().call_later(seconds, self._on_late)

    def _on_late(self) -> None:
        self._is_late_armed = False
        if self._queue.waiting:
            self._serve()

    def _send(self, channel: _AsyncChannel) -> None:
        if channel.session is None:
            channel.opening = asyncio.get_running_loop().create_task(self._open(channel))
            return
        session, batch = channel.session, channel.batch
        self._queue.start(batch, shares=session.shares)
        if not batch:
            return
        channel.is_sent = True
        timeout = max(0.01, channel.deadline - now())
        try:
            answer: Awaitable[Any]
            if len(batch) > 1:
                answer = session.call_together([(call.name, call.parameters) for call in batch], timeout)
            else:
                answer = session.call(batch[0].name, batch[0].parameters, timeout)
            asyncio.ensure_future(answer).add_done_callback(lambda future: self._on_answer(channel, session, future))
        except Exception as error:
            self._fail(channel, error)
            self._serve()

    async def _open(self, channel: _AsyncChannel) -> None:
        """In a task of its own, which no caller's cancellation ends. Of a session that is opened ahead, a failure
        concerns no call."""
        try:
            session = await self._engine.open(max(0.05, channel.deadline - now()))
        except BaseException as error:
            channel.opening = None
            if isinstance(error, Unanswered):
                error._session = LostSession({})  # no call was sent
            self._fail(channel, error if isinstance(error, Exception) else Unanswered("the event loop was closed"))
            if not isinstance(error, Exception):
                raise
        else:
            channel.opening = None
            if self._engine.closed:
                session.close()
                self._fail(channel, EngineError(f"the client of {self._engine.database} is closed"))
            else:
                channel.session, channel.was_used = session, True
                if not self._closes_when_idle:
                    self._close_when_idle()
                self._send(channel)
        self._serve()

    def _on_answer(self, channel: _AsyncChannel, session: AsyncCallSession, future: asyncio.Future[Any]) -> None:
        batch = channel.batch
        error = Unanswered("the event loop was closed") if future.cancelled() else future.exception()
        if isinstance(error, Refused) and len(batch) == 1:
            self._settle(channel, [error])
        elif error is not None:
            if isinstance(error, Unanswered) and channel.session is session:
                error._session = lost_session(session, batch, self.lost)
                self._discard(channel)
            self._fail(channel, error)
        else:
            self._settle(channel, future.result() if len(batch) > 1 else [future.result()])
        channel.was_used = True
        if not self._closes_when_idle:
            self._close_when_idle()
        if not self._is_gathering:
            self._is_gathering = True
            asyncio.get_running_loop().call_soon(self._gathered)

    def _gathered(self) -> None:
        """The tasks that were answered have run: what they asked for next is sent together."""
        self._is_gathering = False
        self._serve()

    def _settle(self, channel: _AsyncChannel, answers: Sequence[Answer]) -> None:
        batch, channel.batch = channel.batch, []
        for call in self._queue.settle(batch, answers):
            if call.receiver.done():
                continue
            if isinstance(call.answer, BaseException):
                call.receiver.set_exception(call.answer)
            else:
                call.receiver.set_result(call.answer)

    def _fail(self, channel: _AsyncChannel, error: BaseException) -> None:
        batch, channel.batch = channel.batch, []
        for call in self._queue.fail(batch, error):
            if not call.receiver.done():
                call.receiver.set_exception(own_copy(error))

    def _discard(self, channel: _AsyncChannel) -> None:
        session, channel.session = channel.session, None
        if session is not None:
            session.close()

    # Idle sessions

    def _close_when_idle(self) -> None:
        self._closes_when_idle = True
        self._engine.background.call_later(IDLE, self._on_idle_timer)

    def _on_idle_timer(self) -> None:
        """In the background thread."""
        if self._engine.owner.alive():
            self._engine.owner.call(self._close_idle)
        else:  # the loop is closed, so nothing else would close them
            for channel in self._channels:
                self._discard(channel)

    def _close_idle(self) -> None:
        """Close the sessions that were not used since the last time."""
        is_used = False
        for channel in self._channels:
            if channel.batch or (channel.session is not None and channel.was_used and has_its_target(channel.session)):
                channel.was_used, is_used = False, True
            else:
                self._discard(channel)
        self._closes_when_idle = False
        if is_used and not self._engine.closed:
            self._close_when_idle()
