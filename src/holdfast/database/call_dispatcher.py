"""The sessions of a client for its calls, in threads: the thread of a caller sends. ``call_dispatcher_async`` is for
tasks.

A caller that finds a session free leads: it takes the calls that wait, its own among them, sends them, distributes the
answers, and wakes the threads that lead next. All others wait for an answer, for their turn to lead, or for their
deadline. Of a batch, the call with the latest deadline leads, because the leader waits as long as any of them may.

The first session takes what comes. Another one would split the batches of calls that only wait for a commit, so it
takes calls that only read, if no others are being read, and the oldest call when that has waited for PATIENCE: what is
sent may wait for a row. Of three or more sessions the last one is for reads alone, so stuck writes delay no read.

What waits is in ``CallQueue``, which decides; here is only who sends, and what an interrupt leaves behind: Ctrl-C may
come at any bytecode. So a channel is locked by a lock that knows its owner, and ``_leave`` ends every call. A wake-up
that an interrupt lost costs half a second: then each thread that waits looks again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

from holdfast.database.background import Background
from holdfast.database.call_queue import (
    MAX_CALLS,
    READS,
    Answer,
    CallQueue,
    Key,
    QueuedCall,
    SessionToEnd,
    is_reading,
    written_row,
)
from holdfast.database.sessions import LostSession, Row
from holdfast.database.url import Database
from holdfast.errors import EngineError, HoldfastError, Refused, Unanswered, Unreachable
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import NAP, Owner
from holdfast.runtime.log import WARNING, logger

log = logger("holdfast.engine")

IDLE = 1.0
"""Seconds after which an unused session is closed: a process that only holds leases needs only the session of the
background thread."""
END_PATIENCE = 5.0
"""Seconds in which the server must end a session whose call was not answered."""
READ_PATIENCE, PATIENCE = 0.01, 0.05
"""Seconds that a read, and any call, waits before it opens another session: to connect takes longer than a commit."""
OCCUPIED = "another call of this client is in progress, and this one cannot wait for it any longer"


class CallSession(Protocol):
    shares: bool
    """Whether several calls may be in one transaction of it."""
    identity: Row | None
    """What another session needs to end it. Empty: nothing is executed after its end. None: it cannot be ended."""
    committed: list[Answer] | None
    """The answers of ``call_together``, once they are certain, and although it was interrupted. Never on PostgreSQL."""

    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]: ...
    def call_together(self, calls: Sequence[tuple[str, Mapping[str, Any]]], timeout: float) -> list[Answer]: ...
    def script(self, text: str, timeout: float) -> None: ...
    def check_target(self) -> None:
        """EngineError when the database is no longer the one that was opened, such as a file that was replaced."""

    def close(self) -> None: ...


class Opener(Protocol):
    """What the dispatcher needs of its engine."""

    owner: Owner
    database: Database
    closed: bool

    @property
    def background(self) -> Background: ...
    def open(self, timeout: float) -> CallSession:
        """A session that finds our tables."""


class _Channel:
    """A session, or the room for one, and what is being sent on it."""

    def __init__(self, *, only_reads: bool) -> None:
        self.only_reads = only_reads
        self.lock = threading.RLock()  # it knows its owner
        self.session: CallSession | None = None
        self.batch: list[QueuedCall] = []
        self.is_sent = self.was_used = False

    def is_mine(self) -> bool:
        # private: RLock._is_owned, tested in tests/test_private_names.py
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]


class _Receiver:
    """What a caller waits with. The lock is free once there is something to do for it."""

    __slots__ = ("thread", "wake")

    def __init__(self) -> None:
        self.thread, self.wake = threading.get_ident(), threading.Lock()
        self.wake.acquire()

    def notify(self) -> None:
        try:  # noqa: SIM105 - hot: contextlib.suppress costs more than the rest
            self.wake.release()
        except RuntimeError:
            pass  # it is free already


class CallDispatcher:
    def __init__(self, engine: Opener, sessions: int) -> None:
        self._engine = engine
        self._queue = CallQueue()
        self._mutex = threading.RLock()
        """Guards the queue. It knows its owner, too."""
        self._channels = [_Channel(only_reads=1 < number == sessions - 1) for number in range(sessions)]
        self.lost: list[LostSession] = []
        """Sessions that are to be ended before anything else is sent."""
        self._closes_when_idle = False

    def call(self, name: str, parameters: Mapping[str, Any], deadline: float, *, alone: bool = False) -> list[Row]:
        """The answer to a call. Unreachable when it was not sent before its deadline, Unanswered when it was,
        SessionToEnd when it was not sent because of a session that was lost while it waited."""
        self.check_free()
        call = QueuedCall(name, parameters, deadline, alone)
        try:
            queue = self._queue
            if queue.waiting or queue.abandoned or not (channel := self._channels[0]).lock.acquire(False):
                call.receiver, call.since = _Receiver(), now()
                with self._mutex:
                    queue.add(call)
                return self._answer(call)
            channel.is_sent = False  # hot: no other call waits. The queue would cost 5 us, a tenth of a call
            channel.batch.append(call)
            self._send(channel)
            channel.lock.release()
            if isinstance(call.answer, list):
                return call.answer
            assert call.answer is not None
            raise call.answer
        finally:
            try:
                self._leave(call)
            except BaseException:  # a second Ctrl-C
                self._leave(call)
                raise

    def check_free(self) -> None:
        """Unreachable when this thread is inside: a signal handler that interrupted a call would wait for itself."""
        if self._mutex._is_owned() or any(channel.is_mine() for channel in self._channels):  # type: ignore[attr-defined]
            raise Unreachable(OCCUPIED)

    def is_busy(self) -> bool:
        """Whether something is being sent at this moment."""
        return any(channel.batch for channel in self._channels)

    @property
    def sessions(self) -> list[CallSession]:
        """Those that are open."""
        return [channel.session for channel in self._channels if channel.session is not None]

    def close(self, deadline: float) -> None:
        """Unreachable when a call was not answered before ``deadline``, and keeps its session."""
        self.check_free()
        for channel in self._channels:
            if not channel.lock.acquire(timeout=max(0.0, deadline - now())):
                raise Unreachable(OCCUPIED)
            try:
                self._discard(channel)
            finally:
                channel.lock.release()
        self._wake_next()

    # The caller

    def _answer(self, call: QueuedCall) -> list[Row]:
        # hot: the next batch is full without it, and its leader is awake. To look for that one first took 60 us of
        # processor time for each call of 128 threads in bench load
        is_turn_possible = call.key is READS or len(self._queue.waiting) <= MAX_CALLS
        while call.answer is None:
            if self._queue.abandoned:
                self._check_order(call)
            waited = now() - call.since
            if is_turn_possible and (channel := self._enter(call, waited)) is not None:
                if self._take(channel, call, waited):
                    self._send(channel)
                channel.lock.release()
                next_leaders = self._wake_next()
                if call.answer is not None:
                    break
                if call in next_leaders:  # it was rolled back, and is next
                    continue
            left = call.deadline - now()
            if left <= 0:
                with self._mutex:  # else it may be answered while it is said to be late
                    if call.answer is None:
                        raise self._late(call)
                break
            if waited < PATIENCE:
                patience = READ_PATIENCE if call.key is READS and waited < READ_PATIENCE else PATIENCE
                left = min(left, max(0.0, call.since + patience - now()))
            call.receiver.wake.acquire(timeout=min(left, NAP))
            is_turn_possible = True
        if isinstance(call.answer, BaseException):
            raise call.answer
        return call.answer

    def _check_order(self, call: QueuedCall) -> None:
        """SessionToEnd, if it waits for a session that is lost: no answer will come of that."""
        with self._mutex:
            self._find_abandoned()
            if self.lost and call in self._queue.waiting and self._queue.is_held_up(call):
                raise SessionToEnd

    def _find_abandoned(self) -> None:
        """The caller has the mutex."""
        self._queue.abandoned = abandoned_rows([channel.batch for channel in self._channels], self.lost)

    def _late(self, call: QueuedCall) -> EngineError:
        """The caller has the mutex."""
        self._queue.leave(call)
        is_sent = any(call in channel.batch and channel.is_sent for channel in self._channels)
        return late(self._engine.database, is_sent=is_sent)

    def _enter(self, call: QueuedCall, waited: float) -> _Channel | None:
        """A channel for this call that is free, locked."""
        if (first := self._channels[0]).lock.acquire(False):
            return first
        # no generator: an interrupt while it is closed would be ignored
        reads, being_read = call.key is READS, [channel for channel in self._channels if is_reading(channel.batch)]
        for channel in self._channels[1:]:
            if channel.only_reads and not reads:
                continue
            may_read = reads and not being_read and (channel.session is not None or waited >= READ_PATIENCE)
            if (may_read or waited >= PATIENCE) and channel.lock.acquire(False):
                return channel
        return None

    def _take(self, channel: _Channel, call: QueuedCall, waited: float) -> bool:
        """Take the next batch, if this caller is the one to send it."""
        reads = channel is not self._channels[0] and (channel.only_reads or waited < PATIENCE)
        with self._mutex:
            if self._queue.abandoned:
                self._find_abandoned()
            leader = _leader(self._queue, reads=reads)
            if leader is None or leader.receiver.thread != call.receiver.thread:
                return False
            channel.is_sent = False
            self._queue.take(channel.batch, reads=reads)
            return True

    def _send(self, channel: _Channel) -> None:
        batch = channel.batch
        deadline = max(call.deadline for call in batch)
        try:
            if (session := channel.session) is None:
                session = channel.session = self._open(max(0.05, deadline - now()))
                if not self._closes_when_idle:
                    self._close_when_idle()
            if len(batch) > 1:
                with self._mutex:  # a caller whose time is over must know whether its call is sent
                    self._queue.start(batch, shares=session.shares)
                    session.committed = None
                    channel.is_sent = True
                if not batch:
                    return
            channel.is_sent = True
            answers = _ask(session, batch, max(0.01, deadline - now()))
        except Exception as error:
            if isinstance(error, Unanswered):
                if session is not None:
                    error._session = lost_session(session, batch, self.lost)
                self._discard(channel)
            self._fail(channel, error)
        else:
            self._settle(channel, answers)
            channel.was_used = True
            if not self._closes_when_idle:
                self._close_when_idle()

    def _open(self, timeout: float) -> CallSession:
        try:
            return self._engine.open(timeout)
        except Unanswered as error:
            error._session = LostSession({})  # no call was sent
            raise

    def _leave(self, call: QueuedCall) -> None:
        """The end of a call, whatever ended it."""
        wakes_next = call.receiver is None or call.answer is None  # hot: not each of a batch, whose leader does it
        if call.answer is None:
            call.has_left = True  # first: it must not be put back into the queue, where others would find it
        for channel in self._channels:
            if channel.is_mine():  # interrupted
                wakes_next = True
                if channel.batch and channel.is_sent:
                    session = channel.session
                    error = Unanswered("the thread that sent this call with its own was interrupted")
                    if session is not None:
                        error._session = lost_session(session, channel.batch, self.lost)
                    self._discard(channel)
                    if session is not None and session.committed is not None and len(channel.batch) > 1:
                        self._settle(channel, session.committed)
                    else:
                        self._fail(channel, error)
                elif channel.batch:
                    with self._mutex:
                        self._queue.put_back(channel.batch)
                        channel.batch = []
                channel.lock.release()
        if call.answer is None:
            with self._mutex:
                if not self._queue.leave(call):
                    self._find_abandoned()
        if wakes_next and self._queue.waiting:
            self._wake_next()

    def _wake_next(self) -> list[QueuedCall]:
        """Wake the threads that lead next, and return their calls: the next batch may be one of writes, and a session
        free for reads."""
        with self._mutex:
            if self._queue.abandoned:
                self._find_abandoned()
            leaders = [leader for reads in (False, True) if (leader := _leader(self._queue, reads=reads)) is not None]
        for leader in leaders:
            leader.receiver.notify()
        return leaders

    def _settle(self, channel: _Channel, answers: Sequence[Answer]) -> None:
        with self._mutex:
            answered = self._queue.settle(channel.batch, answers)
            channel.batch = []
        for call in answered:
            if call.receiver is not None:
                call.receiver.notify()

    def _fail(self, channel: _Channel, error: Exception) -> None:
        with self._mutex:
            failed = self._queue.fail(channel.batch, error)
            channel.batch = []
            self._find_abandoned()  # its session may be lost
        for call in failed:
            if call.receiver is not None:
                call.answer = own_copy(error)
                call.receiver.notify()

    def _discard(self, channel: _Channel) -> None:
        session, channel.session = channel.session, None
        if session is not None:
            session.close()

    # Idle sessions

    def _close_when_idle(self) -> None:
        self._closes_when_idle = True
        self._engine.background.call_later(IDLE, self._close_idle)

    def _close_idle(self) -> None:
        """In the background thread: close the sessions that were not used since the last time."""
        is_used = False
        for channel in self._channels:
            if channel.is_mine() or not channel.lock.acquire(blocking=False):
                is_used = True
                continue
            try:
                if channel.session is not None and channel.was_used and has_its_target(channel.session):
                    channel.was_used, is_used = False, True
                else:
                    self._discard(channel)
            finally:
                channel.lock.release()
        self._closes_when_idle = False
        if is_used and not self._engine.closed:
            self._close_when_idle()
        self._wake_next()  # a caller may have met a channel that we had locked


def _leader(queue: CallQueue, *, reads: bool) -> QueuedCall | None:
    return max(queue.next_batch(reads=reads), key=lambda call: call.deadline, default=None)


def _ask(session: CallSession, batch: Sequence[QueuedCall], timeout: float) -> list[Answer]:
    if len(batch) > 1:
        return session.call_together([(call.name, call.parameters) for call in batch], timeout)
    [call] = batch
    try:
        return [session.call(call.name, call.parameters, timeout)]
    except Refused as error:
        return [error]


def late(database: Database, *, is_sent: bool) -> EngineError:
    """The error of a call whose time is over."""
    return Unanswered(f"{database} did not answer in time") if is_sent else Unreachable(OCCUPIED)


def lost_session(session: Any, batch: Sequence[QueuedCall], lost_sessions: list[LostSession]) -> LostSession:
    """Of a session that is closed while a batch on it is not answered. Added to the list if it is to be ended."""
    rows = [row for call in batch if (row := written_row(call)) is not None]
    lost = LostSession(session.identity if rows else {}, now() + END_PATIENCE, rows)
    if lost.identity:
        lost_sessions.append(lost)
    return lost


def abandoned_rows(batches: Iterable[Sequence[QueuedCall]], lost_sessions: Iterable[LostSession]) -> list[Key]:
    """The rows of writes that may still be executed, and whose callers have left, or whose sessions are lost."""
    rows = [row for batch in batches for call in batch if call.has_left and (row := written_row(call)) is not None]
    return rows + [row for lost in lost_sessions for row in lost.rows]


def own_copy(error: BaseException) -> BaseException:
    """For one of several callers: an exception that is raised twice mixes up their tracebacks."""
    if not isinstance(error, HoldfastError):
        return error
    twin = copy(error)
    twin.__cause__ = error.__cause__
    return twin


def has_its_target(session: Any) -> bool:
    try:
        session.check_target()
    except EngineError as error:
        log.event("database.replaced", WARNING, "%(error)s", error=str(error))
        return False
    return True
