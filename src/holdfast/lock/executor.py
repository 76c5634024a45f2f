"""The locks of one Client: a caller's thread uses a free session itself; the rest is done on the loop of a background
thread, by the executor of ``executor_async``.

Ctrl-C, or what else raises in a thread from outside, may interrupt a caller at any point. Its request is then handed to
the background thread, which no signal interrupts: it reads what is outstanding, unlocks the key, and gives the session
back (``LoopExecutor.finish``). If the interrupt hits an event of the pool, all sessions are closed, and all grants of
the client are reported as lost (``LoopExecutor.repair``).
"""

from __future__ import annotations

import os
import threading
from time import sleep
from typing import TYPE_CHECKING

from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, Unanswered, Unreachable
from holdfast.lock.executor_async import CALL_TIMEOUT, THREAD, LoopExecutor, background
from holdfast.lock.pool import LockRequest, LockSession, Pool
from holdfast.lock.terms import State
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import NAP, Wakeup

if TYPE_CHECKING:
    from holdfast.database.engine import Engine

_CLOSE_TIMEOUT = 2.0


class _Me(threading.local):
    """Identifies a thread. Thread idents are reused, and context variables are inherited, so neither serves."""

    def __init__(self) -> None:
        self.owner: object = THREAD if threading.current_thread().name == THREAD else object()


_me = _Me()


def owner() -> object:
    """Identifies the caller: its thread."""
    return _me.owner


def _wake(request: LockRequest) -> None:
    waker, request.since = request.waker, now()
    if waker is not None:  # else it has seen its state, and is being released already
        waker.set()


class Executor:
    def __init__(self, database: Database, engine: Engine, *, kept: int, extra: int) -> None:
        self.database, self._engine = database, engine
        self._limits = (kept, extra)
        self._pid = os.getpid()
        self._core: LoopExecutor | None = None
        self._starting = threading.RLock()  # a signal handler may need it in the thread that has it

    def acquire(self, request: LockRequest, timeout: float) -> State:
        """The state of the request, once it is decided; "gone" after ``timeout``. When it raises, the background thread
        removes what is left of it."""
        core = self._core or self._start()
        request.owner = request.caller = me = _me.owner
        request.since = time = now()
        request.deadline = deadline = time + timeout
        if core.pool.writer is me:
            raise self._interrupted()
        try:
            while True:
                with core.mutex:
                    pool = core.pool
                    if pool.writer is None:
                        session = pool.acquire(request)
                        break
                self._await_repair(core, pool, deadline)
            if session is None:
                if pool.actions:
                    core.post(core.carry_out)
            elif not self._send_own(core, pool, session, request, False, timeout):
                return "gone"
            if request.state == "queued" and not self._wait(core, pool, request, "queued", deadline):
                return "gone"
            return request.state
        except BaseException:
            self._break_off(core, request, me)
            raise

    def release(self, request: LockRequest) -> None:
        """When it returns, the request is "released" if it was held until then, unless the background thread has to
        unlock it: the server did not answer in time, or a finalizer calls this in the middle of another call."""
        core, me = self._core, _me.owner
        if core is None:
            return
        try:
            if me is THREAD or core.pool.writer is me:  # the garbage collector ends a block here
                core.post(core.finish, request)
                return
            request.waker, request.caller, session = None, me, None
            with core.mutex:
                pool = core.pool
                if pool.writer is None:
                    session = pool.release(request, me)
                    if pool.wakes:
                        core.wake_decided()
            if session is None:
                if pool.actions or pool.writer is not None:
                    core.post(core.recover)
            elif not self._send_own(core, pool, session, request, True, CALL_TIMEOUT):
                return
            if request.state == "held" and not self._wait(core, pool, request, "held", now() + CALL_TIMEOUT + 1.0):
                raise Unanswered(f"{self.database} did not answer in time")
        except BaseException:
            self._break_off(core, request, me)
            raise

    def abandon(self, request: LockRequest) -> None:
        """Release it, whatever its state, and do not wait for it."""
        if self._core is not None:
            self._core.post(self._core.finish, request)

    def close(self, error: EngineError) -> None:
        core, self._core = self._core, None
        if core is None or self._pid != os.getpid():
            return
        closed = threading.Event()

        def close() -> None:
            core.close(error)
            closed.set()

        core.post(close)
        closed.wait(_CLOSE_TIMEOUT)

    @property
    def pool(self) -> Pool | None:
        return None if self._core is None else self._core.pool

    def notice_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._core, self._starting = os.getpid(), None, threading.RLock()

    def _start(self) -> LoopExecutor:
        kept, extra = self._limits
        with self._starting:
            if self._engine.closing:
                raise EngineError(f"the client of {self._engine.database} is closed")
            pool = Pool(kept=kept, extra=extra, server_queues=self.database.dialect == "postgres")
            core = LoopExecutor(self.database, pool, background.loop(), _wake, shared=True)
            self._core = self._core or core  # a signal handler may have made one meanwhile
            return self._core

    def _send_own(
        self, core: LoopExecutor, pool: Pool, session: LockSession, request: LockRequest, unlocks: bool, timeout: float
    ) -> bool:
        """Send the own try or unlock of a request, and wait for the answer. False: none in time."""
        try:
            patience = background.patience if timeout >= CALL_TIMEOUT else max(0.0, timeout) * 1e3
            answer = session.wire.run(request.entry, unlocks, patience)
        except EngineError as error:
            core.post(core.fail, session, error)
            if request.state == "held" and isinstance(error, Refused):  # the release is tried again without its caller
                raise
            return True
        if answer is None:
            request.caller = None  # this thread is out of the call, see _wait
            core.post(core.finish, request)
            return False
        with core.mutex:
            is_intact = pool.writer is None
            has_more = is_intact and pool.sender_answered(session, answer, request.caller)
        if not is_intact:  # an interrupted event of another thread: this session is closed with all others
            core.post(core.finish, request)
        elif has_more:
            core.post(core.let_go, session)
        return True

    def _interrupted(self) -> Unreachable:
        return Unreachable(
            "a signal handler interrupted another call for a lock in this thread, and cannot use locks until that call "
            "goes on. Use another thread"
        )

    def _wait(self, core: LoopExecutor, pool: Pool, request: LockRequest, undecided: State, deadline: float) -> bool:
        """Wait until the state is decided; False if it is not in time. Unreachable if the answer would have to come
        through a call of this very thread. The pool sets the state before it looks for the waker, so none is missed.
        Looks again every NAP: Python handles a signal that arrives just before a wait only after it, and a pool that
        was given up may not wake all its waiters."""
        request.waker = waker = Wakeup()
        session = None if request.entry is None else request.entry.session
        sender = None if session is None else session.sender
        if sender is not None and sender is not request and sender.caller is request.caller:
            raise self._interrupted()
        while request.state == undecided and not waker.wait(max(0.0, min(deadline - now(), NAP))):
            if core.pool is not pool:
                with core.mutex:
                    pool.fail(request, undecided, Unanswered("an interrupt broke the locks of this client off"))
            elif now() >= deadline:
                with core.mutex:
                    if pool.writer is None:
                        pool.give_up(request, request.caller)
                core.post(core.finish, request)
                return False
        return True

    def _break_off(self, core: LoopExecutor, request: LockRequest, me: object) -> None:
        """An exception has ended the call. If it was in the middle of an event, this thread may call again."""
        request.caller = None
        core.pool.break_off(me)
        core.post(core.finish, request)

    def _await_repair(self, core: LoopExecutor, pool: Pool, deadline: float) -> None:
        """An interrupted event has left the pool half changed. The background thread begins with a new one."""
        core.post(core.recover)
        while core.pool is pool:
            if now() >= deadline:
                raise Unreachable("an interrupt corrupted the locks of this client, and they are not rebuilt yet")
            sleep(0.001)


__all__ = ["CALL_TIMEOUT", "Executor", "owner"]
