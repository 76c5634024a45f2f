"""The locks of one Client: a caller's thread uses a free session itself; the rest is done on the loop of a background
thread, by the executor of ``executor_async``.

Ctrl-C, or what else raises in a thread from outside, may interrupt a caller at any point. Its request is then handed to
the background thread, which no signal interrupts: it reads what is outstanding, unlocks the key, and gives the session
back (``LoopExecutor.finish``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import sleep

from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, Unanswered, Unreachable
from holdfast.lock import background
from holdfast.lock.executor_async import CALL_TIMEOUT, LoopExecutor
from holdfast.lock.pool import Pool, Request, Session
from holdfast.lock.terms import Key, State
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import NAP, Owner, Wakeup

_CLOSE_TIMEOUT = 2.0


class _Me(threading.local):
    """Identifies a thread: the system uses its numbers again, and contexts are passed on."""

    def __init__(self) -> None:
        self.owner: object = background.THREAD if threading.current_thread().name == background.THREAD else object()


_me = _Me()


def owner() -> object:
    """Identifies the caller: its thread."""
    return _me.owner


def _wake(request: Request) -> None:
    request.waker.set()


class Executor:
    def __init__(self, database: Database, _: Owner, check_open: Callable[[], None], *, kept: int, extra: int) -> None:
        self.database, self._check_open = database, check_open
        self._limits = (kept, extra)
        self._pid = os.getpid()
        self._core: LoopExecutor | None = None
        self._starting = threading.RLock()  # a signal handler may need it in the thread that has it

    def acquire(self, request: Request, timeout: float) -> State:
        """The state of the request, once it is decided; "gone" after ``timeout``. When it raises, nothing of it
        stays."""
        core = self._core or self._start()
        request.owner = me = _me.owner
        if request.key not in core.labels:
            core.remember(request)
        request.deadline = deadline = now() + timeout
        if core.pool.writer is me:
            raise self._interrupted()
        try:
            while True:
                with core.mutex:
                    pool = core.pool
                    if pool.writer is None:
                        session = pool.acquire(request)
                        if session is None and request.state == "queued":
                            self._prepare_to_wait(request, me)
                        break
                self._await_repair(core, pool, deadline)
            if session is not None:
                if not self._drive(core, pool, session, request, timeout):
                    return "gone"
            elif pool.actions:
                core.post(core.carry_out)
            if request.state == "queued" and not self._wait(core, pool, request, deadline):
                return "gone"
            return request.state
        except BaseException:
            self._break_off(core, request, me)
            raise

    def release(self, request: Request) -> None:
        """When it returns, the request is "released" if it was held until then."""
        core, me = self._core, _me.owner
        if core is None:
            return
        try:
            if me is background.THREAD or core.pool.writer is me:  # the garbage collector ends a block here
                core.post(core.finish, request)
                return
            request.waker, session, leaves = None, None, False
            with core.mutex:
                pool = core.pool
                if pool.writer is None:
                    session = pool.release(request, me)
                    if leaves := session is None and request.state == "held":
                        self._prepare_to_wait(request, me)
                    if pool.wakes:
                        core.wake_decided()
                else:
                    core.post(core.recover)
            if session is not None:
                leaves = self._drive(core, pool, session, request, CALL_TIMEOUT) and request.state == "held"
            elif pool.actions:
                core.post(core.carry_out)
            if leaves and not self._wait(core, pool, request, now() + CALL_TIMEOUT + 1.0):
                raise Unanswered(f"{self.database} did not answer in time")
        except BaseException:
            self._break_off(core, request, me)
            raise

    def abandon(self, request: Request) -> None:
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
    def labels(self) -> dict[Key, str]:
        """Names of what was locked here, by key: the database has them a moment later."""
        return {} if self._core is None else self._core.labels.copy()

    @property
    def pool(self) -> Pool | None:
        return None if self._core is None else self._core.pool

    def notice_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._core, self._starting = os.getpid(), None, threading.RLock()

    def _start(self) -> LoopExecutor:
        kept, extra = self._limits

        def make() -> Pool:
            return Pool(kept=kept, extra=extra, server_queues=self.database.dialect == "postgres")

        with self._starting:
            self._check_open()
            core = LoopExecutor(self.database, make, background.loop(), _wake, shared=True)
            self._core = self._core or core  # a signal handler may have made one meanwhile
            return self._core

    def _drive(self, core: LoopExecutor, pool: Pool, session: Session, request: Request, timeout: float) -> bool:
        """Send ``session.flight``, which is one op of this request, and wait for the answer. False: none in time."""
        try:
            answer = session.wire.run(
                session.flight[0], timeout * 1e3 if timeout < CALL_TIMEOUT else background.patience
            )
        except EngineError as error:
            with core.mutex:
                request.waker = Wakeup()
            core.post(core.fail, session, error)
            if request.state == "held" and isinstance(error, Refused):  # the release is tried again without its caller
                raise
            return True
        if answer is None:
            request.owner = None  # this thread is out of the call, see _prepare_to_wait
            core.post(core.finish, request)
            return False
        with core.mutex:
            if pool.writer is None:
                pool.answered(session, (answer,), request.owner)
                if pool.wakes:
                    core.wake_decided()
            if request.state == "queued":
                request.waker = Wakeup()
        if pool.actions or session.over:
            core.post(core.let_go, session)
        if pool.writer is not None:
            core.post(core.recover)
        return True

    def _prepare_to_wait(self, request: Request, me: object) -> None:
        """Under the mutex. Unreachable if the answer would have to come through a call of this very thread."""
        request.waker = Wakeup()
        session = request.entry.session if request.entry is not None else None
        if session is not None and session.driver is not None and session.driver.owner is me:
            raise self._interrupted()

    def _interrupted(self) -> Unreachable:
        return Unreachable(
            "this thread is in the middle of another call for a lock, which a signal handler has interrupted: it would "
            "wait for itself. Lock in another thread"
        )

    def _wait(self, core: LoopExecutor, pool: Pool, request: Request, deadline: float) -> bool:
        """Wait until the state is decided; False if it is not in time. In naps: Python handles a signal that arrives
        just before a wait only after it; and a pool that was given up may not wake everybody."""
        undecided = request.state
        while not request.waker.wait(max(0.0, min(deadline - now(), NAP))) and request.state == undecided:
            if core.pool is not pool:
                request.state, request.error = "failed", Unanswered("an interrupt broke the locks of this client off")
            elif now() >= deadline:
                with core.mutex:
                    if pool.writer is None:
                        pool.give_up(request, request.owner)
                core.post(core.finish, request)
                return False
        return True

    def _break_off(self, core: LoopExecutor, request: Request, me: object) -> None:
        """An exception has ended the call. If it was in the middle of an event, this thread may call again."""
        request.owner = None
        if core.pool.writer is me:
            core.pool.writer = core
        core.post(core.finish, request)

    def _await_repair(self, core: LoopExecutor, pool: Pool, deadline: float) -> None:
        """An interrupted event has left the pool half changed. The background thread begins with a new one."""
        core.post(core.recover)
        while core.pool is pool:
            if now() >= deadline:
                raise Unreachable("an interrupt broke the locks of this client off, and they are not restored yet")
            sleep(0.001)


__all__ = ["CALL_TIMEOUT", "Executor", "owner"]
