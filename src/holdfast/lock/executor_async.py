"""Carries out what the pool decides, on an event loop: opens sessions, sends, receives, wakes, keeps time.

An AsyncClient has one on its own loop. A Client has one on the loop of a background thread, for all that the callers'
threads do not send themselves (``executor``). It decides nothing about locks.

Every event goes to the pool under ``mutex``. An interrupt during an event leaves the pool half changed. The next event
notices it, and ``_repair`` closes all sessions, reports every grant as lost, and begins with a new pool.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import threading
from asyncio import AbstractEventLoop, current_task, get_running_loop
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

from holdfast.database.socket_ready import is_readable
from holdfast.database.url import Database
from holdfast.errors import EngineError, Unanswered
from holdfast.lock import background, wire
from holdfast.lock.pool import Close, Lose, Open, Pool, Request, Send, Session, Wait
from holdfast.lock.terms import Key
from holdfast.lock.wire import LockWire
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import AsyncOwner
from holdfast.runtime.log import logger

log = logger("holdfast.lock")

CALL_TIMEOUT = 10.0
"""Seconds for a statement that never waits. A session that does not answer in this time is given up."""
SWEEP = 0.6
"""Seconds between two sweeps."""
MAX_NAMES = 10_000
_HANG_UP = getattr(select, "EPOLLRDHUP", 0)


class LoopExecutor:
    """``shared``: callers' threads use the hold sessions, too. Then the loop reads from such a session only while it
    has sent something itself; else an answer for a thread would wake it. ``waiting``: all requests that wait, where an
    interrupt may hit the loop: it may have taken one out of its queue."""

    def __init__(
        self, database: Database, pool: Callable[[], Pool], loop: AbstractEventLoop, wake: Callable[[Request], None],
        *, shared: bool, waiting: Iterable[Request] = (),
    ) -> None:  # fmt: skip
        self.database, self.loop, self.mutex = database, loop, threading.Lock()
        self.pool = pool()
        self._make_pool, self._wake, self._shared, self._waiting = pool, wake, shared, waiting
        self._sessions: set[Session] = set()
        """All sessions that were not closed, also those that an interrupted event has removed from the pool."""
        self.labels: dict[Key, str] = {}
        """Names of what was locked here, by key."""
        self._unwritten: dict[Key, str] = {}
        """Those that the database does not have yet."""
        self._draining: set[Session] = set()
        """Sessions whose outstanding answer belongs to a caller that was interrupted."""
        self._unburied: set[Session] = set()
        """Sessions that are over, and that a caller's thread has not let go of."""
        self._stuck: list[tuple[object, int]] = []
        """What was under way at the last sweep, and for how many sweeps."""
        self.sweep_timer: asyncio.TimerHandle | None = None
        self._polls: dict[Session, asyncio.TimerHandle] = {}
        self._watched: dict[int, Session] = {}
        self._epoll: Any = None

    # From any thread

    def post(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the process is ending, and the loop was closed
            self.loop.call_soon_threadsafe(callback, *arguments)

    def remember(self, request: Request) -> None:
        """Its name is to be written down, but not now. A number in a namespace needs none."""
        if len(self.labels) > MAX_NAMES:
            self.labels.clear()
            self._unwritten.clear()
        self.labels[request.key] = request.label
        if len(request.key) == 1:
            self._unwritten[request.key] = request.label

    def wake_decided(self) -> None:
        """Under the mutex. A request stays in ``wakes`` until it was woken: an interrupt in between wakes it twice."""
        wakes = self.pool.wakes
        while wakes:
            self._wake(wakes[0])
            wakes.popleft()

    # On the loop

    def event(self, event: Callable[..., Any], *arguments: Any) -> Any:
        """One event of the pool (a method of ``Pool``), and what follows from it."""
        with self.mutex:
            if self.pool.writer is not None:
                self._repair()
            result = event(self.pool, *arguments, self)
            self.wake_decided()
        if self.pool.actions:
            self.carry_out()
        return result

    def recover(self) -> None:
        """Begin with a new pool if an event was interrupted."""
        self.event(lambda *_: None)

    def carry_out(self) -> None:
        """Each action stays in ``actions`` until it is done."""
        actions = self.pool.actions
        while actions:
            action = actions[0]
            if isinstance(action, Send):
                if action.session.flight and not action.session.wire.is_expecting:  # else an interrupt came after it
                    self.send(action.session)
            elif isinstance(action, Wait):
                self._wait(action.session)
            elif isinstance(action, Open):
                self._open(action.session)
            elif isinstance(action, Close):
                self._close(action.session)
            else:
                self._report(action)
            actions.popleft()

    def send(self, session: Session) -> None:
        """Send ``session.flight``."""
        try:
            if self._shared and session.wire.descriptor is not None and not session.waits:
                self.loop.add_reader(session.wire.descriptor, self._readable, session)
            session.wire.send(session.flight)
            session.driver = None  # the answer comes here, also if the caller is cancelled
        except EngineError as error:
            self.loop.call_soon(self.lose, session, error)
            return
        if session.wire.descriptor is None:
            self.loop.call_soon(self._readable, session)

    def finish(self, request: Request) -> None:
        """Its caller was interrupted or timed out, anywhere: leave nothing of it. If it was sending, read what is
        outstanding, unlock its key, and give the session back."""
        session = request.session
        self.event(_give_up, request)
        for buried in [each for each in self._unburied if each.driver is request]:
            self._bury(buried)
        if session is not None and session.driver is request and not session.over:
            try:
                if session.wire.drain():
                    self._draining.add(session)
                    self.loop.add_reader(session.wire.descriptor, self._readable, session)
                    self._readable(session)  # the answer may have been received, but not taken
                else:
                    self.event(Pool.unanswered, session)
            except EngineError as error:
                session.driver = None
                self.lose(session, error)

    def fail(self, session: Session, error: EngineError) -> None:
        """What a caller has sent was answered with an error, or not at all."""
        if isinstance(error, Unanswered) or session.over:
            session.driver = None
            self.lose(session, error)
        else:
            self.event(Pool.refused, session, error)

    def let_go(self, session: Session) -> None:
        """A caller is done with the session, and there is something to do."""
        if session.over:
            self._bury(session)
        self.carry_out()

    def lose(self, session: Session, error: Exception) -> None:
        """The session is gone."""
        if session.over:
            self._bury(session)
            return
        log.warning(
            "a session for locks on %s is gone: %s",
            self.database,
            error,
            extra={"event": "lock.session_lost", "database": str(self.database), "error": str(error)},
        )
        if not session.opened:
            self._sessions.discard(session)
        self.event(Pool.lost, session, error)

    def close(self, error: Exception) -> None:
        self.event(Pool.close, error)

    def _readable(self, session: Session) -> None:
        if session.over:
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
        if session in self._draining:
            self._draining.discard(session)
            self.event(Pool.unanswered, session)
        elif not session.flight:
            if session.wire.descriptor is None and session.wire.problem() is not None:
                self._end_lost()  # it was won in a file that was removed, and that the hold sessions have, too
            else:
                self.event(Pool.waited, session, answers if isinstance(answers, EngineError) else None)
        elif isinstance(answers, EngineError):
            log.debug("%s: %s", self.database, answers)
            self.event(Pool.refused, session, answers)
        else:
            self.event(Pool.answered, session, answers)

    def _read_on(self, session: Session) -> None:
        """The answer is not complete."""
        if session.wire.descriptor is not None:
            if is_readable(session.wire.descriptor):
                self.loop.call_soon(self._readable, session)
        elif session.entry is not None and not session.flight:
            self._poll_later(session)

    def _poll_later(self, session: Session) -> None:
        if (timer := self._polls.pop(session, None)) is not None:
            timer.cancel()
        self._polls[session] = self.loop.call_later(session.wire.pause, self._readable, session)

    def _wait(self, session: Session) -> None:
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

    def _open(self, session: Session) -> None:
        self._sessions.add(session)
        self._sweep_later()

        def arrive(opened: LockWire | None, error: Exception | None) -> None:
            self.loop.call_soon_threadsafe(self._arrive, session, opened, error)

        wire.open_in_thread(self.database, CALL_TIMEOUT, arrive)

    def _arrive(self, session: Session, opened: LockWire | None, error: Exception | None) -> None:
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

    def _watch(self, session: Session) -> None:
        """Notice answers and the end of the connection; of a shared session, only its end."""
        descriptor = session.wire.descriptor
        if descriptor is None:
            return
        if session.waits or not self._shared:
            self.loop.add_reader(descriptor, self._readable, session)
        elif _HANG_UP:
            if self._epoll is None:
                self._epoll = select.epoll()
                self.loop.add_reader(self._epoll.fileno(), self._hung_up)
            self._watched[descriptor] = session
            self._epoll.register(descriptor, _HANG_UP)

    def _stop_reading(self, session: Session) -> None:
        if session.wire.descriptor is not None and not self.loop.is_closed():
            self.loop.remove_reader(session.wire.descriptor)

    def _unwatch(self, session: Session) -> None:
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

    def _read_end(self, session: Session) -> None:
        """The server has closed the connection; its last message says why, if no thread is reading it."""
        if session.over:
            return
        error: Exception = Unanswered(f"{self.database} closed the connection")
        if session.driver is None:
            try:
                session.wire.receive()
            except EngineError as problem:
                error = problem
        else:
            session.wire.hang_up()
        self.lose(session, error)

    def _close(self, session: Session) -> None:
        if session.wire is not None and session in self._sessions:
            self._unwatch(session)
            self._draining.discard(session)
            if session.driver is None or not self._shared:
                session.wire.close()
            else:
                self._unburied.add(session)
                if session.wire.descriptor is not None:  # its driver gets an error, and lets go of it
                    session.wire.hang_up()
            self._sessions.discard(session)

    def _bury(self, session: Session) -> None:
        """Close what its driver has let go of."""
        session.driver = None
        self._unburied.discard(session)
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

    def _repair(self) -> None:
        """Under the mutex. An event was interrupted: close all sessions, report every grant as lost, and begin anew. If
        this is interrupted as well, the next event repeats it."""
        error = Unanswered(f"an interrupt broke the locks of this client of {self.database} off: all were given up")
        broken, pool = self.pool, self._make_pool()
        losses = {action.request: action for action in broken.actions if isinstance(action, Lose)}
        entries = list(broken.entries.values())
        for request in [each for entry in entries for each in (*entry.holders, entry.leaving) if each is not None]:
            losses.setdefault(request, Lose(request, error))
            request.state, request.error = "lost", error
        waiting = {*self._waiting, *(request for entry in entries for request in entry.queue)} - losses.keys()
        for request in waiting:
            request.state, request.error = "failed", error
        for session in self._sessions:
            session.over = True
        pool.actions.extend(Close(session) for session in self._sessions)
        pool.actions.extend(losses.values())
        pool.wakes.extend(request for request in (*losses, *waiting) if request.waker is not None)
        self.pool = pool

    # The sweep

    def _sweep_later(self) -> None:
        if self.sweep_timer is None:
            self.sweep_timer = self.loop.call_later(SWEEP, self.sweep)

    def sweep(self) -> None:
        self.sweep_timer = None
        try:
            if not self._shared:
                self.recover()
                self._end_interrupted()
            self._write_names()
            self._end_lost()
            self._end_stuck()
            self.event(Pool.sweep)
        finally:
            if self._sessions:
                self._sweep_later()

    def _end_interrupted(self) -> None:
        """An interrupt may have come between an answer and the pool, or in the first step of a poll."""
        for session in self.pool.sessions:
            has_to_answer = session.flight or (session.entry is not None and not session.ended)
            if not session.opened or session.driver is not None or not has_to_answer:
                continue
            if session.wire.is_expecting:
                self._readable(session)
            else:
                self.lose(session, Unanswered(f"an interrupt lost an answer of {self.database}"))

    def _write_names(self) -> None:
        """Only of keys that are held or waited for now: the others would not be listed."""
        session = next((each for each in self.pool.holds if each.opened), None)
        if session is None or not self._unwritten:
            return
        names = [(key, name) for key, name in list(self._unwritten.items()) if key in self.pool.entries]
        for key, _ in names:
            self._unwritten.pop(key, None)
        if names:
            self.event(Pool.note, session, json.dumps([[int(key[0]), name] for key, name in names]))

    def _end_lost(self) -> None:
        """Sessions whose end no descriptor reports."""
        for session in self.pool.sessions:
            if not session.opened:
                continue
            if (problem := session.wire.problem()) is not None:
                self.lose(session, Unanswered(problem))
            elif not _HANG_UP and self._shared and not session.flight and session.driver is None:
                try:
                    session.wire.receive()
                except EngineError as error:
                    self.lose(session, error)

    def _end_stuck(self) -> None:
        """Sessions that do not answer."""
        before, self._stuck = self._stuck, []
        for session in self.pool.sessions:
            if (statement := self._under_way(session)) is not None:
                sweeps = 1 + next((count for other, count in before if other is statement), 0)
                self._stuck.append((statement, sweeps))
                if sweeps * SWEEP > (CALL_TIMEOUT if session.opened else 2 * CALL_TIMEOUT):
                    if session.driver is not None and self._shared:
                        session.wire.hang_up()
                    self.lose(session, Unanswered(f"{self.database} did not answer in time"))

    def _under_way(self, session: Session) -> object:
        """What identifies the statement that is under way; None if there is none that has to be answered soon."""
        if not session.opened:
            return session if session.held else None
        if not session.flight:
            return None
        if session.flight[0].verb == "note":
            return None  # a name is not worth the locks of a session
        descriptor = session.wire.descriptor
        if self._shared and session.driver is not None and (descriptor is None or is_readable(descriptor)):
            return None  # the answer is there, and a signal handler keeps the caller from reading it
        return session.flight


def _acquire(pool: Pool, request: Request, _: object) -> Session | None:
    return pool.acquire(request)


def _give_up(pool: Pool, request: Request, caller: object) -> None:
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


def _resolve(request: Request) -> None:
    if not request.waker.done():
        request.waker.set_result(None)


class AsyncExecutor:
    """The locks of one AsyncClient."""

    def __init__(
        self, database: Database, client: AsyncOwner, check_open: Callable[[], None], *, kept: int, extra: int
    ) -> None:
        self.database, self._client, self._check_open = database, client, check_open
        self._limits = (kept, extra)
        self._pid = os.getpid()
        self._core: LoopExecutor | None = None
        self._waiting: dict[Request, float] = {}
        """Requests that wait, and until when; those that are being released among them, without an end."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf

    def acquire(self, request: Request, timeout: float) -> Awaitable[Any]:
        """Awaited, the state of the request is decided. A caller that is interrupted calls ``abandon``. hot: returns a
        future, because a coroutine costs more."""
        loop = get_running_loop()
        if loop is not self._client.loop:
            self._client.check()
        core = self._core or self._start(loop)
        task = current_task(loop)
        request.owner = object() if task is None else ref(task)
        request.waker = waker = loop.create_future()
        if request.key not in core.labels:
            core.remember(request)
        session = core.event(_acquire, request)
        if session is not None:
            core.send(session)
            if session.wire.descriptor is None:
                core._readable(session)
        if request.state == "queued":
            self._waiting[request] = request.deadline = deadline = now() + timeout
            if deadline < self._alarm_at:
                self._set_alarm(core, deadline)
        elif not waker.done():
            waker.set_result(None)
        return waker

    def release(self, request: Request) -> Awaitable[None]:
        """Awaited, the request is "released" if it was held until then. It is released also if the caller is cancelled
        meanwhile."""
        core = self._core
        if core is None:
            return DONE
        if core.loop is not get_running_loop():
            return self._release_on(core.loop, request)
        if core.mutex.locked() or core.pool.writer is not None:  # the garbage collector ends a block during an event
            core.loop.call_soon(core.finish, request)
            return DONE
        request.waker = waker = core.loop.create_future()
        session = core.event(Pool.release, request)
        if session is not None:
            core.send(session)
            if session.wire.descriptor is None:
                core._readable(session)
        if request.state == "held":
            self._waiting[request] = math.inf
        elif not waker.done():
            waker.set_result(None)
        return waker

    async def _release_on(self, loop: AbstractEventLoop, request: Request) -> None:
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

    def abandon(self, request: Request) -> None:
        """Release it, whatever its state, and do not wait for it."""
        core = self._core
        if core is None:
            return
        try:
            is_here = get_running_loop() is core.loop
        except RuntimeError:
            is_here = False
        if is_here and not core.mutex.locked():
            self._waiting.pop(request, None)
            core.finish(request)
        else:
            core.post(self._abandon_there, request)

    def _abandon_there(self, request: Request) -> None:
        self._waiting.pop(request, None)
        if self._core is not None:
            self._core.finish(request)

    async def close(self, error: EngineError) -> None:
        core, self._core = self._core, None
        if core is not None and self._pid == os.getpid():
            core.close(error)

    @property
    def labels(self) -> dict[Key, str]:
        return {} if self._core is None else self._core.labels.copy()

    @property
    def pool(self) -> Pool | None:
        return None if self._core is None else self._core.pool

    def notice_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._core, self._alarm, self._alarm_at = os.getpid(), None, None, math.inf
            self._waiting.clear()

    def _start(self, loop: AbstractEventLoop) -> LoopExecutor:
        self._check_open()
        kept, extra = self._limits

        def make() -> Pool:
            return Pool(kept=kept, extra=extra, server_queues=self.database.dialect == "postgres")

        self._core = core = LoopExecutor(self.database, make, loop, self._wake, shared=False, waiting=self._waiting)
        background.loop().call_soon_threadsafe(_watch_loop, ref(core), ref(self))
        return core

    def _wake(self, request: Request) -> None:
        self._waiting.pop(request, None)
        _resolve(request)

    def _set_alarm(self, core: LoopExecutor, when: float) -> None:
        """One timer for all requests that wait. A distant deadline gets its timer when it is near: nearly every wait
        has ended by then, and timers make each round of the loop slower."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._alarm_at = when
        if when < math.inf:
            self._alarm = core.loop.call_later(min(max(0.0, when - now()), SWEEP), self._ring, core)
            self._alarm_at = min(when, now() + SWEEP)

    def restart_timers(self, core: LoopExecutor) -> None:
        """From the background thread, now and then: an interrupt in the first step of a timer's callback has lost the
        timer."""
        late = core.loop.time() - SWEEP
        for timer, callback in ((self._alarm, partial(self._ring, core)), (core.sweep_timer, core.sweep)):
            if timer is not None and timer.when() < late:
                core.post(callback)

    def _ring(self, core: LoopExecutor) -> None:
        self._alarm, self._alarm_at = None, math.inf
        time = now()
        for request in [each for each, deadline in self._waiting.items() if deadline <= time]:
            self._waiting.pop(request, None)
            core.finish(request)
            _resolve(request)
        self._set_alarm(core, min(self._waiting.values(), default=math.inf))


def _watch_loop(core_ref: ReferenceType[LoopExecutor], executor_ref: ReferenceType[AsyncExecutor]) -> None:
    """In the background thread: notice that a loop was closed while its client was open. Its sessions would keep their
    locks for as long as the process lives."""
    core, executor = core_ref(), executor_ref()
    if core is None or executor is None or executor._core is not core:
        return
    if not core.loop.is_closed():
        executor.restart_timers(core)
        background.loop().call_later(SWEEP, _watch_loop, core_ref, executor_ref)
        return
    log.warning(
        "the event loop of a client of %s was closed, and its locks with it",
        core.database,
        extra={"event": "lock.loop_closed", "database": str(core.database)},
    )
    error = Unanswered("its event loop was closed")
    with core.mutex:
        if core.pool.writer is not None:
            core._repair()
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


__all__ = ["CALL_TIMEOUT", "DONE", "AsyncExecutor", "LoopExecutor", "owner"]
