"""Carries out what the pool decides, on an event loop: opens sessions, sends, receives, wakes, keeps time.

An AsyncClient has a ``LoopExecutor`` on its own loop. A Client has one on the loop of a background thread
(``LoopThread``), for all that the callers' threads do not send themselves (``executor``). It decides nothing about
locks. ``LockWire`` is a session as it sees one.

Every event goes to the pool under ``mutex``. An interrupt during an event leaves the pool half changed. The next event
notices it, and ``repair`` closes all sessions, reports every grant as lost, and begins with a new pool.

Who reads from a session:

    a wait session                      the loop
    a hold session of an AsyncClient    the loop
    a hold session of a Client          the caller of ``session.sender``, in its thread, while it is set;
                                        the loop, while ``session.flight`` is under way;
                                        the loop, if the sender was interrupted or timed out (``_draining``)
    a session that has ended            its sender, until it lets go of it (``_still_used``)
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import select
import threading
from asyncio import AbstractEventLoop, current_task, get_running_loop
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from holdfast.database.sessions import is_readable
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, Unanswered, Unreachable
from holdfast.lock import log
from holdfast.lock.pool import (
    Action,
    Answers,
    Close,
    Entry,
    LockRequest,
    LockSession,
    Lose,
    Note,
    Op,
    Open,
    Pool,
    Send,
    Wait,
)
from holdfast.lock.terms import Key
from holdfast.runtime import forks
from holdfast.runtime.clock import now

if TYPE_CHECKING:
    from holdfast.database.engine_async import AsyncEngine

CALL_TIMEOUT = 10.0
"""Seconds for a statement that never waits. A session that does not answer in this time is given up."""
SWEEP = 0.6
"""Seconds between two sweeps."""
YOUNG = 0.1
"""Seconds that a lock is held before it gets a note, unless requests wait for it."""
NOTE_PAUSE = 3.0
"""Seconds after which a note that was not written is repeated."""
MAX_NAMES = 10_000
Wake = Callable[[LockRequest], None]
"""Wakes the caller of a request that is decided."""
_HANG_UP = getattr(select, "EPOLLRDHUP", 0)
THREAD = "holdfast-locks"


class LockWire(Protocol):
    """One session for locks: a PostgreSQL connection, or the lock files of an SQLite database. Methods raise Unanswered
    when it is gone."""

    @property
    def descriptor(self) -> int | None:
        """Readable when there is an answer. None: ``send`` has the answers at once, and waiting is polling."""

    @property
    def pause(self) -> float:
        """Seconds until it is worth while to poll again, where there is no descriptor."""

    @property
    def is_expecting(self) -> bool:
        """Whether ``receive`` still has to return an answer."""

    def run(self, entry: Entry, unlocks: bool, patience: float | None) -> bool | None:
        """Try or unlock a key and wait for the answer, in a thread that has the session to itself. None when nothing
        arrives within ``patience`` milliseconds. Then, and when it is interrupted, ``drain`` comes next."""

    def start(self, entry: Entry, unlocks: bool) -> None:
        """Try or unlock a key, to be answered by ``receive``."""

    def send(self, ops: Sequence[Op]) -> None:
        """Send ops in one statement, to be answered by ``receive``."""

    def wait(self, key: Key, shared: bool) -> None:
        """Block in the server's queue, to be answered by ``receive``."""

    def receive(self) -> Answers | EngineError | None:
        """The answers, one for each op, or the server's error. None: more is to come."""

    def drain(self) -> bool:
        """After an interrupt or a timeout: whether an answer is still to come, which ``receive`` then discards."""

    def problem(self) -> str | None:
        """Why what is locked here is locked no more, where no descriptor tells."""

    def has_failed_note(self) -> bool:
        """Whether a note that was answered could not be written. Reported once."""

    def hang_up(self) -> None:
        """Break the connection, from any thread: the one that uses it gets an error."""

    def close(self) -> None: ...

    def end(self) -> None:
        """Close it, and wait until the server has closed it, too, but not for long."""


def open_wire(database: Database, timeout: float) -> LockWire:
    if database.dialect == "sqlite":
        from holdfast.lock.file_locks import FileLockWire

        return FileLockWire.open(database, timeout)
    from holdfast.lock.postgres import PostgresLockWire

    return PostgresLockWire.open(database, timeout)


def open_in_thread(
    database: Database, timeout: float, arrive: Callable[[LockWire | None, Exception | None], None]
) -> None:
    """Call ``arrive`` with the session or the error, in a thread: connecting waits for the network and the resolver.
    Files are opened at once. ``arrive`` raises RuntimeError when its event loop is closed."""

    def connect() -> None:
        wire: LockWire | None = None
        problem: Exception | None = None
        try:
            wire = open_wire(database, timeout)
        except Exception as error:
            problem = error
        try:
            arrive(wire, problem)
        except RuntimeError:
            if wire is not None:
                wire.close()

    if database.dialect == "sqlite":
        try:
            arrive(open_wire(database, timeout), None)
        except Refused as error:
            arrive(None, error)
        return
    try:
        threading.Thread(target=connect, name="holdfast-connect", daemon=True).start()
    except RuntimeError as error:  # the system has no more threads
        arrive(None, Unreachable(f"{database}: {error}"))


def close_in_thread(wire: LockWire, closed: Callable[[], object]) -> None:
    """Call ``closed`` when the session has ended, in a thread: the server takes its time. Files are closed at once.
    ``closed`` raises RuntimeError when its event loop is closed."""

    def close() -> None:
        try:
            wire.end()
        finally:
            with suppress(RuntimeError):
                closed()

    if wire.descriptor is None:
        close()
        return
    try:
        threading.Thread(target=close, name="holdfast-close", daemon=True).start()
    except RuntimeError:  # the system has no more threads
        wire.close()
        closed()


class LoopThread:
    """An event loop in a daemon thread, one a process, for what the blocking flavour cannot do in its callers' threads.
    A forked child has no such thread, and begins with one of its own."""

    def __init__(self) -> None:
        self.patience: float | None = None
        """Milliseconds that a thread waits for an answer. None: for ever, because the loop ends sessions that do not
        answer."""
        self._running: dict[int, tuple[AbstractEventLoop, threading.Thread]] = {}
        """By ``forks.era``. The loop of a parent stays here: the parent uses its selector, too, so never close it."""
        atexit.register(self._stop)

    def loop(self) -> AbstractEventLoop:
        """Starts it at first use. Its callbacks wait for callers only while those change a pool."""
        running = self._running.get(forks.era)
        if running is None:
            loop = asyncio.SelectorEventLoop()  # not the application's kind, see ``sessions.is_readable``
            thread = threading.Thread(target=loop.run_forever, name=THREAD, daemon=True)
            thread.start()
            running = self._running.setdefault(forks.era, (loop, thread))
            if running[0] is not loop:  # another thread, or a signal handler, was faster
                self._end(loop, thread)
        return running[0]

    def _stop(self) -> None:
        """At the end of the process."""
        self.patience = 10_000.0
        if (running := self._running.pop(forks.era, None)) is not None:
            self._end(*running)

    def _end(self, loop: AbstractEventLoop, thread: threading.Thread) -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(1.0)
        if not thread.is_alive():
            loop.close()


background = LoopThread()


class LoopExecutor:
    """``shared``: callers' threads use the hold sessions, too. The loop then reads from such a session only while a
    statement of its own is under way. ``waiting``: requests that ``repair`` must fail although an interrupted event has
    taken them out of their queue. ``resume``: wakes a caller that may call again meanwhile."""

    def __init__(
        self, database: Database, pool: Pool, loop: AbstractEventLoop, wake: Wake, *, shared: bool,
        waiting: Iterable[LockRequest] = (), on_sweep: Callable[[], None] | None = None, resume: Wake | None = None,
    ) -> None:  # fmt: skip
        self.database, self.loop = database, loop
        self.mutex = threading.RLock()  # a signal handler or a finalizer may need it in the thread that has it
        self.pool = pool
        self._wake, self._resume, self._shared = wake, resume or wake, shared
        self._waiting, self._on_sweep = waiting, on_sweep
        self._sessions: set[LockSession] = set()
        """All sessions that were not closed, also those that an interrupted event has removed from the pool."""
        self._written: set[Key] = set()
        """Keys whose names the database has."""
        self._draining: set[LockSession] = set()
        """Sessions whose outstanding answer belongs to a caller that was interrupted or timed out."""
        self._still_used: set[LockSession] = set()
        """Ended sessions that a caller's thread still uses."""
        self._stuck: list[tuple[object, int]] = []
        """What was under way at the last sweep, and for how many sweeps."""
        self._is_swept = self._is_carrying_out = False
        self._failed_notes: dict[LockSession, float] = {}
        """Sessions whose last note was not written, and when that was known."""
        self._polls: dict[LockSession, asyncio.TimerHandle] = {}
        self._watched: dict[int, LockSession] = {}
        self._epoll: Any = None

    # From any thread

    def post(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the process is ending, and the loop was closed
            self.loop.call_soon_threadsafe(callback, *arguments)

    def wake_decided(self) -> None:
        """Under the mutex. A waiter that is not woken, because of an interrupt, looks at its state now and then."""
        wakes = self.pool.wakes
        while wakes:
            self._wake(wakes.popleft())

    # On the loop

    def event(self, event: Callable[..., Any], *arguments: Any) -> Any:
        """One event of the pool (a method of ``Pool``), and what follows from it."""
        with self.mutex:
            if self.pool.writer is not None:
                self.repair()
            result = event(self.pool, *arguments, self)
            self.wake_decided()
        if self.pool.actions:
            self.carry_out()
        return result

    def recover(self) -> None:
        """Begin with a new pool if an event was interrupted, and do what is left to do."""
        self.event(lambda *_: None)

    def carry_out(self) -> None:
        """Each action stays in ``actions`` until it is done. A finalizer that runs in between leaves its actions to the
        call that is under way."""
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        try:
            actions = self.pool.actions
            while actions:
                self._do(actions[0])
                actions.popleft()
        finally:
            self._is_carrying_out = False

    def _do(self, action: Action) -> None:
        if isinstance(action, Send):
            if action.session.flight and not action.session.wire.is_expecting:  # else an interrupt came after it
                self._send(action.session)
        elif isinstance(action, Wait):
            self._wait(action.session)
        elif isinstance(action, Open):
            self._open(action.session)
        elif isinstance(action, Close):
            self._close(action.session)
        else:
            self._report(action)

    def _send(self, session: LockSession) -> None:
        """Send ``session.flight``."""
        try:
            if self._shared and session.wire.descriptor is not None and not session.waits:
                self.loop.add_reader(session.wire.descriptor, self._readable, session)
            session.wire.send(session.flight)
        except EngineError as error:
            self.loop.call_soon(self.lose, session, error)
        if session.wire.descriptor is None:
            self.loop.call_soon(self._readable, session)

    def start(self, session: LockSession, request: LockRequest, unlocks: bool) -> None:
        """Send the own try or unlock of a task. The answer comes here, also if the task is cancelled."""
        try:
            session.wire.start(request.entry, unlocks)
        except EngineError as error:
            self.loop.call_soon(self.lose, session, error)
        else:
            if session.wire.descriptor is None:
                self._readable(session)

    def finish(self, request: LockRequest) -> None:
        """Its caller was interrupted or timed out, anywhere: leave nothing of it. If it was sending, read what is
        outstanding, unlock its key, and give the session back."""
        session = None if request.entry is None else request.entry.session
        self.event(_give_up, request)
        for session_left in [each for each in self._still_used if each.sender is request]:
            self._close_unused(session_left)
        if self._shared and session is not None and session.sender is request and not session.over:
            try:
                if session.wire.drain():
                    self._draining.add(session)
                    self.loop.add_reader(session.wire.descriptor, self._readable, session)
                    self._readable(session)  # the answer may have been received, but not taken
                else:
                    self.event(Pool.unanswered, session)
            except EngineError as error:
                self.event(Pool.left, session)
                self.lose(session, error)

    def fail(self, session: LockSession, error: EngineError) -> None:
        """What a caller has sent was answered with an error, or not at all."""
        if isinstance(error, Unanswered) or session.over:
            self.event(Pool.left, session)
            self.lose(session, error)
        else:
            self.event(Pool.refused, session, error)

    def let_go(self, session: LockSession) -> None:
        """A caller is done with the session, and there is something to do."""
        if session.over:
            self._close_unused(session)
        self.recover()

    def lose(self, session: LockSession, error: Exception) -> None:
        """The session is gone."""
        if session.over:
            self._close_unused(session)
            return
        log.info(
            "a session for locks on %s is gone: %s",
            self.database,
            error,
            extra={"event": "lock.session_lost", "database": str(self.database), "error": str(error)},
        )
        if not session.opened:
            self._sessions.discard(session)
        self.event(Pool.lost, session, error)

    def close(self, error: Exception) -> None:
        if not self._shared:
            self.recover()
            self._end_interrupted()
        self.event(Pool.close, error)

    def _readable(self, session: LockSession) -> None:
        is_threads = self._shared and not session.waits and not session.flight and session not in self._draining
        if session.over or is_threads:  # a thread may read from it
            return
        try:
            answers = session.wire.receive()
        except EngineError as error:
            self.lose(session, error)
            return
        if answers is None:
            self._read_on(session)
            return
        if self._shared and not session.waits:
            self._stop_reading(session)
        self._answered(session, answers)

    def _hear(self, session: LockSession) -> None:
        """``_readable`` for a session that no thread uses. hot: the answer to the own try or unlock of a task resumes
        the task. That is the last thing done here, because the task may call again."""
        if session.sender is None:
            self._readable(session)
            return
        try:
            answers = session.wire.receive()
        except EngineError as error:
            self.lose(session, error)
            return
        if answers is None:
            self._read_on(session)
            return
        if isinstance(answers, EngineError) or self.pool.writer is not None:
            self._answered(session, answers)
            return
        with self.mutex:
            pool = self.pool
            has_more = pool.sender_answered(session, answers[0], self)
        if has_more:
            if pool.actions:
                self.carry_out()
            wakes = pool.wakes
            while wakes:
                self._resume(wakes.popleft())

    def _answered(self, session: LockSession, answers: Answers | EngineError) -> None:
        refusal, answers = (answers, ()) if isinstance(answers, EngineError) else (None, answers)
        if session in self._draining:
            self._draining.discard(session)
            self.event(Pool.unanswered, session)
        elif not session.flight and session.sender is None:
            if session.wire.descriptor is None and session.wire.problem() is not None:
                self._end_lost()  # it was won in a file that was removed, and that the hold sessions have, too
            else:
                self.event(Pool.waited, session, refusal)
        elif refusal is not None:
            log.debug("%s: %s", self.database, refusal)
            if session.flight and session.flight[0].verb == "note":
                self._failed_notes[session] = now()
            self.event(Pool.refused, session, refusal)
        elif session.sender is None:
            self.event(Pool.answered, session, answers)
        else:
            self.event(Pool.sender_answered, session, answers[0])

    def _read_on(self, session: LockSession) -> None:
        """The answer is not complete."""
        if session.wire.descriptor is not None:
            if is_readable(session.wire.descriptor):
                self.loop.call_soon(self._readable, session)
        elif session.entry is not None and not session.flight:
            self._poll_later(session)

    def _poll_later(self, session: LockSession) -> None:
        if (timer := self._polls.pop(session, None)) is not None:
            timer.cancel()
        self._polls[session] = self.loop.call_later(session.wire.pause, self._readable, session)

    def _wait(self, session: LockSession) -> None:
        entry = session.entry
        if entry is None or session.ended or session.wire.is_expecting:  # an interrupt came after it
            return
        try:
            session.wire.wait(entry.key, entry.shared)
        except EngineError as error:
            self.loop.call_soon(self.lose, session, error)
            return
        if session.wire.descriptor is None:
            self._poll_later(session)

    def _open(self, session: LockSession) -> None:
        self._sessions.add(session)
        self._begin_to_sweep()

        def arrive(opened: LockWire | None, error: Exception | None) -> None:
            if opened is not None and session.over:  # the loop of a client that was closed may not run any more
                opened.close()
            self.loop.call_soon_threadsafe(self._arrive, session, opened, error)

        open_in_thread(self.database, CALL_TIMEOUT, arrive)

    def _arrive(self, session: LockSession, opened: LockWire | None, error: Exception | None) -> None:
        if opened is None:
            self._sessions.discard(session)
            self.event(Pool.lost, session, error or Unanswered(f"{self.database} did not answer"))
        elif session.over or session.wire is not None:  # an interrupt had it opened twice
            opened.close()
            if session.over:
                self._sessions.discard(session)
        else:
            session.wire = opened
            self._watch(session)
            self.event(Pool.opened, session)

    def _watch(self, session: LockSession) -> None:
        """Notice answers and the end of the connection; of a shared session, only its end."""
        descriptor = session.wire.descriptor
        if descriptor is None:
            return
        if not self._shared:
            self.loop.add_reader(descriptor, self._hear, session)
        elif session.waits:
            self.loop.add_reader(descriptor, self._readable, session)
        elif _HANG_UP:
            if self._epoll is None:
                self._epoll = select.epoll()
                self.loop.add_reader(self._epoll.fileno(), self._hung_up)
            self._watched[descriptor] = session
            self._epoll.register(descriptor, _HANG_UP)

    def _stop_reading(self, session: LockSession) -> None:
        if session.wire.descriptor is not None and not self.loop.is_closed():
            self.loop.remove_reader(session.wire.descriptor)

    def _unwatch(self, session: LockSession) -> None:
        self._stop_reading(session)
        if self._watched.pop(session.wire.descriptor, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(session.wire.descriptor)
            if not self._watched:  # a client that is never closed leaves no descriptor
                self.loop.remove_reader(self._epoll.fileno())
                self._epoll.close()
                self._epoll = None

    def _hung_up(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            if (session := self._watched.get(descriptor)) is not None:
                self._unwatch(session)
                self._read_end(session)

    def _read_end(self, session: LockSession) -> None:
        """The server has closed the connection; its last message says why, if no thread is reading it."""
        if session.over:
            return
        error: Exception = Unanswered(f"{self.database} closed the connection")
        if session.sender is None:
            try:
                session.wire.receive()
            except EngineError as problem:
                error = problem
        else:
            session.wire.hang_up()
        self.lose(session, error)

    def _close(self, session: LockSession) -> None:
        if session.wire is not None and session in self._sessions:
            self._unwatch(session)
            has_sender = self._shared and session.sender is not None and session not in self._draining
            self._draining.discard(session)
            self._failed_notes.pop(session, None)
            if (timer := self._polls.pop(session, None)) is not None:
                timer.cancel()
            if session in self.pool.closing:
                closed = partial(self.loop.call_soon_threadsafe, self.event, Pool.closed, session)
                close_in_thread(session.wire, closed)
            elif not has_sender:
                session.wire.close()
            else:
                self._still_used.add(session)
                if session.wire.descriptor is not None:  # its sender gets an error, and lets go of it
                    session.wire.hang_up()
            self._sessions.discard(session)

    def _close_unused(self, session: LockSession) -> None:
        """Close what its sender has let go of."""
        self.event(Pool.left, session)
        self._still_used.discard(session)
        if session.wire is not None:
            session.wire.close()

    def _report(self, action: Lose) -> None:
        request = action.request
        log.warning(
            "lock %s is lost: %s",
            repr(request.label) if len(request.key) == 1 else request.label,
            action.error,
            extra={"event": "lock.lost", "lock": request.label, "error": str(action.error)},
        )
        if request.on_loss is not None:
            try:
                request.on_loss(action.error)
            except Exception:  # the system has no more threads, say: the others are notified all the same
                log.exception(
                    "the loss of lock %r could not be reported",
                    request.label,
                    extra={"event": "lock.callback_failed", "lock": request.label},
                )

    def repair(self) -> None:
        """Under the mutex. An event was interrupted: close all sessions, report every grant as lost, and begin anew. If
        this is interrupted as well, the next event repeats it."""
        error = Unanswered(f"an interrupt broke the locks of this client of {self.database} off: all were given up")
        in_use = {each for each in self._sessions if self._shared and each.sender is not None}
        self.pool = self.pool.successor(error, self._sessions, self._waiting, in_use)

    # The sweep

    def _begin_to_sweep(self) -> None:
        """The timer is one of the background thread: in the loop of an application it would make each round slower, and
        an interrupt could lose it. Whether there is one is decided in that thread, too, which no signal interrupts."""
        background.loop().call_soon_threadsafe(_set_sweep, self)

    def sweep(self) -> None:
        self._is_carrying_out = False  # an interrupt may have come in between
        if not self._shared:
            self.recover()
            self._end_interrupted()
        self._write_notes()
        self._end_lost()
        self._end_stuck()
        self.event(Pool.sweep)
        if self._on_sweep is not None:
            self._on_sweep()

    def _end_interrupted(self) -> None:
        """An interrupt may have come between an answer and the pool, in the first step of a poll, or as a session
        arrived: the pool does not close a session that it does not know to be open."""
        for session in self.pool.sessions:
            if session.wire is not None and not session.opened:
                self._watch(session)
                self.event(Pool.opened, session)
            has_to_answer = session.under_way or (session.entry is not None and not session.ended)
            if not session.opened or not has_to_answer:
                continue
            if session.wire.is_expecting:
                self._readable(session)
            else:
                self.lose(session, Unanswered(f"an interrupt lost an answer of {self.database}"))

    def _write_notes(self) -> None:
        """Tell the database what is held here since when, and what is waited for, for those who look at its locks.
        Each session writes for itself. One that waits cannot; the first that does not wait writes for it."""
        first = next((each for each in self.pool.holds if each.opened), None)
        for session in self.pool.sessions:
            if session.wire is not None and session.wire.has_failed_note():
                self._failed_notes[session] = now()
            if now() - self._failed_notes.get(session, -math.inf) > NOTE_PAUSE:
                self.event(self._note_in, session, session is first)

    def _note_in(self, pool: Pool, session: LockSession, is_first_session: bool, caller: object) -> None:
        if pool.can_note(session) and (note := self._note(session, is_first_session)) is not None:
            pool.note(session, note, caller)

    def _note(self, session: LockSession, is_first_session: bool) -> Note | None:
        """What has changed since its last note; all of it, after one that was not written. A lock that is held for an
        instant is not worth a row, unless it is waited for."""
        pool, time = self.pool, now()
        current: dict[Key, tuple[LockRequest | None, int]] = {
            key: (entry.holders[0], pool.waiting(entry))
            for key, entry in session.held.items()
            if entry.stage == "held" and entry.holders and (entry.queue or time - entry.holders[0].since > YOUNG)
        }
        names: list[tuple[Key, str]] = []
        if (has_failed := self._failed_notes.pop(session, None) is not None) or len(self._written) > MAX_NAMES:
            self._written.clear()
        if is_first_session:
            for key, entry in pool.entries.items():
                if entry.stage in ("waiting", "parked") and (waiting := pool.waiting(entry)) > 0:
                    current[key] = None, waiting
                if len(key) == 1 and key not in self._written and (requests := entry.holders or entry.queue):
                    names.append((key, requests[0].label))
        noted = {} if has_failed else session.noted or {}
        held = [
            (key, None if holder is None else max(0.0, time - holder.since), waiting)
            for key, (holder, waiting) in current.items()
            if noted.get(key) != (holder, waiting)
        ]
        gone = [key for key in noted if key not in current]
        if not names and not held and not gone and not has_failed:
            return None
        is_first, session.noted = has_failed or session.noted is None, current
        self._written.update(key for key, _ in names)
        return Note(is_first, names, held, gone)

    def _end_lost(self) -> None:
        """Sessions whose end no descriptor reports."""
        for session in self.pool.sessions:
            if not session.opened:
                continue
            if (problem := session.wire.problem()) is not None:
                self.lose(session, Unanswered(problem))
            elif not _HANG_UP and self._shared and not session.flight and session.sender is None:
                try:
                    session.wire.receive()
                except EngineError as error:
                    self.lose(session, error)

    def _end_stuck(self) -> None:
        """Sessions that do not answer."""
        before, self._stuck = self._stuck, []
        for session in self.pool.sessions:
            if (statement := self._awaited_answer(session)) is not None:
                sweeps = 1 + next((count for other, count in before if other is statement), 0)
                self._stuck.append((statement, sweeps))
                if sweeps * SWEEP > (CALL_TIMEOUT if session.opened else 2 * CALL_TIMEOUT):
                    if session.sender is not None and self._shared:
                        session.wire.hang_up()
                    self.lose(session, Unanswered(f"{self.database} did not answer in time"))

    def _awaited_answer(self, session: LockSession) -> object:
        """What identifies the statement that is under way; None if there is none that has to be answered soon."""
        if not session.opened:
            return session if session.held else None
        descriptor = session.wire.descriptor
        if self._shared and session.sender is not None and (descriptor is None or is_readable(descriptor)):
            return None  # the answer is there, and a signal handler keeps the caller from reading it
        return session.sender or session.flight or None


def _set_sweep(core: LoopExecutor) -> None:
    """In the background thread."""
    if not core._is_swept:
        core._is_swept = True
        background.loop().call_later(SWEEP, _sweep, core)


def _sweep(core: LoopExecutor) -> None:
    """In the background thread, for as long as there are sessions, also of a client that was forgotten. If an event
    loop was closed while its client was open, its sessions would keep their locks for as long as the process lives: end
    them."""
    with core.mutex:
        core._is_swept = bool(core._sessions or core.pool.closing)
    if core._is_swept and core.loop.is_closed():
        _end_with_loop(core)
    elif core._is_swept:
        core.post(core.sweep)
        background.loop().call_later(SWEEP, _sweep, core)


def _end_with_loop(core: LoopExecutor) -> None:
    log.warning(
        "the event loop of a client of %s was closed, and its locks with it",
        core.database,
        extra={"event": "lock.loop_closed", "database": str(core.database)},
    )
    error = Unanswered("its event loop was closed")
    with core.mutex:
        if core.pool.writer is not None:
            core.repair()
        sessions = list(core._sessions)
        for session in sessions:
            core.pool.lost(session, error, core)
        losses = [action for action in core.pool.actions if isinstance(action, Lose)]
        core.pool.actions.clear()
    for session in sessions:
        if session.wire is not None:
            session.wire.hang_up()
    for action in losses:
        with suppress(RuntimeError):  # the callback was to run on that loop
            core._report(action)


def _give_up(pool: Pool, request: LockRequest, caller: object) -> None:
    """Unless the pool of the request was given up before."""
    if pool.entries.get(request.key) is request.entry:
        pool.give_up(request, caller)


class _Done:
    """To be awaited where there is nothing to wait for."""

    def __await__(self) -> Any:
        yield from ()


DONE = _Done()


def owner() -> object:
    """Identifies the caller: its task, known weakly. Outside a loop, where the garbage collector ends a block, it is
    equal to no other."""
    try:
        task = current_task()
    except RuntimeError:
        task = None
    return object() if task is None else ref(task)


_add_done_callback = asyncio.Future.add_done_callback


class _Answer(asyncio.Future[None]):
    """What one task waits for. It knows how to run the task, see ``AsyncExecutor._resume``, until the task is
    cancelled: then it must not keep the task alive."""

    step: Any = None
    context: Any = None

    def add_done_callback(self, step: Callable[[Any], object], *, context: Context | None = None) -> None:
        _add_done_callback(self, step, context=context)
        self.step, self.context = step, context

    def cancel(self, msg: Any = None) -> bool:
        self.step = None
        return super().cancel(msg)


def _resolve(request: LockRequest) -> None:
    """Nothing waits for it from now on. A future that stayed would keep its task alive, and a grant that it forgot."""
    answer = request.waker
    if answer is not None and not answer.done():
        answer.set_result(None)
    request.waker = None


class AsyncExecutor:
    """The locks of one AsyncClient."""

    def __init__(self, database: Database, engine: AsyncEngine, *, kept: int, extra: int) -> None:
        self.database, self._engine, self._client = database, engine, engine.owner
        self._limits = (kept, extra)
        self._pid = os.getpid()
        self._core: LoopExecutor | None = None
        self._waiting: dict[LockRequest, float] = {}
        """Requests that wait, and until when; those that are being released among them, without an end."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        """When the timer fires, or until when the sweep looks at deadlines instead."""

    def acquire(self, request: LockRequest, timeout: float) -> Awaitable[Any]:
        """Awaited, the state of the request is decided. A caller that is interrupted calls ``abandon``. hot: returns a
        future, because a coroutine costs more."""
        loop = get_running_loop()
        if loop is not self._client.loop:
            self._client.check()
        core = self._core or self._start(loop)
        task = current_task(loop)
        request.owner = object() if task is None else ref(task)
        with core.mutex:
            if core.pool.writer is not None:
                core.repair()
            session = core.pool.acquire(request)
        request.since = time = now()
        request.deadline = deadline = time + timeout
        waker: asyncio.Future[None]
        if session is not None:
            request.waker = waker = _Answer(loop=loop)
            core.start(session, request, False)
        elif request.state == "queued":
            request.waker = waker = loop.create_future()
            if core.pool.actions:
                core.carry_out()
        else:
            return DONE
        if request.state == "queued":
            self._waiting[request] = deadline
            if deadline < self._alarm_at or self._alarm_at < time:
                self._set_alarm()
        return waker

    def release(self, request: LockRequest) -> Awaitable[None]:
        """Awaited, the request is "released" if it was held until then, unless an earlier event was interrupted: then
        it is released a moment later. It is released also if the caller is cancelled meanwhile."""
        core = self._core
        if core is None:
            return DONE
        if core.loop is not get_running_loop():
            return self._release_on(core.loop, request)
        if core.pool.writer is not None:  # an event was interrupted, or the garbage collector ends a block during one
            core.loop.call_soon(core.finish, request)
            return DONE
        request.waker = waker = _Answer(loop=core.loop)
        with core.mutex:
            session = core.pool.release(request, core)
            if core.pool.wakes:
                core.wake_decided()
        if session is not None:
            core.start(session, request, True)
        elif core.pool.actions:
            core.carry_out()
        if request.state != "held":
            return DONE
        self._waiting[request] = math.inf
        return waker

    async def _release_on(self, loop: AbstractEventLoop, request: LockRequest) -> None:
        """Its session belongs to another loop, and can only be used there."""
        if loop.is_closed():
            return
        if not loop.is_running():
            raise RuntimeError(
                f"lock {request.label!r} belongs to {loop!r}, which is not running: it cannot be released"
            )

        async def release() -> None:
            if request.state == "held":
                await self.release(request)

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(release(), loop))

    def abandon(self, request: LockRequest) -> None:
        """Release it, whatever its state, and do not wait for it."""
        core = self._core
        if core is None:
            return
        try:
            is_here = get_running_loop() is core.loop
        except RuntimeError:
            is_here = False
        if is_here and core.pool.writer is None:
            self._waiting.pop(request, None)
            core.finish(request)
        else:
            core.post(self._abandon_there, request)

    def _abandon_there(self, request: LockRequest) -> None:
        self._waiting.pop(request, None)
        if self._core is not None:
            self._core.finish(request)

    async def close(self, error: EngineError) -> None:
        core, self._core = self._core, None
        if core is not None and self._pid == os.getpid():
            core.close(error)

    @property
    def pool(self) -> Pool | None:
        return None if self._core is None else self._core.pool

    def notice_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._core, self._alarm, self._alarm_at = os.getpid(), None, None, 0.0
            self._waiting.clear()

    def _start(self, loop: AbstractEventLoop) -> LoopExecutor:
        if self._engine.closing:
            raise EngineError(f"the client of {self._engine.database} is closed")
        kept, extra = self._limits
        pool = Pool(kept=kept, extra=extra, server_queues=self.database.dialect == "postgres")
        self._core = core = LoopExecutor(
            self.database, pool, loop, self._wake, shared=False, waiting=self._waiting, on_sweep=self._ring,
            resume=self._resume,
        )  # fmt: skip
        return core

    def _wake(self, request: LockRequest) -> None:
        request.since = now()
        _resolve(request)
        self._waiting.pop(request, None)  # last: after an interrupt, ``_ring`` finds it there and wakes it

    def _resume(self, request: LockRequest) -> None:
        """Run its task at once. Only in a callback of the loop, where no task is running. hot: a future alone lets the
        loop go round once more before the task runs, which takes a tenth of bench lock_pair."""
        answer = request.waker
        step = getattr(answer, "step", None)
        if request.contended or step is None or answer.done():
            self._wake(request)
            return
        request.waker = None
        self._waiting.pop(request, None)
        answer.remove_done_callback(step)
        answer.set_result(None)
        answer.context.run(step, answer)

    def _set_alarm(self) -> None:
        """One timer for all requests that wait, and none for a distant deadline: nearly every wait has ended by then,
        and timers make each round of the loop slower."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        time, first = now(), min(self._waiting.values(), default=math.inf)
        self._alarm_at = min(first, time + 2 * SWEEP)
        if first == self._alarm_at and self._core is not None:
            self._alarm = self._core.loop.call_later(max(0.0, first - time), self._ring)

    def _ring(self) -> None:
        """End the waits whose time is up. Called by the alarm and after each sweep; wakes again what an interrupt has
        kept from being woken."""
        time = now()
        for request, deadline in list(self._waiting.items()):
            is_decided = request.state != ("held" if deadline == math.inf else "queued")
            if deadline <= time or is_decided:
                if self._core is not None and not is_decided:
                    self._core.finish(request)
                _resolve(request)
                self._waiting.pop(request, None)
        self._set_alarm()


__all__ = ["CALL_TIMEOUT", "DONE", "AsyncExecutor", "LoopExecutor", "owner"]
