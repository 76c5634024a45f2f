"""The guard: at most one running instance, which fails closed.

Nothing in the block runs before the lease is proven to be held, and nothing after it may have passed on. Any doubt ends
the process: first by SystemExit in its main thread, so that blocks are left and exit hooks run; then, before the TTL
ends, by a timer of the kernel, however long these take. A process that is paused meanwhile never continues.

    enter: create the timer ─→ acquire ─→ arm the timer ─→ wipe ─→ check ─→ the block runs
    each heartbeat:            confirmed: put the timer off       failed: SystemExit, or the timer kills
    leave: not lost:           disarm the timer ─→ release        lost: the timer stays armed, the lease expires

The order of these steps is what makes it fail closed. A change must keep it.
"""

from __future__ import annotations

import atexit
import os
import threading
from types import TracebackType
from typing import Any

from holdfast.database.engine_async import CALL_TIMEOUT, AsyncEngine, AsyncResource
from holdfast.errors import EngineError, HoldfastError, LeaseLost, NotAcquired
from holdfast.lease.admin_async import AsyncLeases
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.lease.handle_async import PATIENT, AsyncHandle
from holdfast.lease.terms import LeaseTerms
from holdfast.lease.trust import Trust, margin
from holdfast.recipes.guard_terms import LOST, REFUSED, UNPROVEN
from holdfast.runtime.clock import now
from holdfast.runtime.exit import MainThreadExit
from holdfast.runtime.kill_timer import KillTimer
from holdfast.runtime.log import CRITICAL, INFO, WARNING, logger

log = logger("holdfast.guard")

_RELEASE_TIMEOUT = 3.0
"""Seconds that the release at the end of the block may take."""


class AsyncGuardGrant(AsyncLeaseGrant):
    """The grant of a guard. Only leaving the block releases it."""

    _ends_with_block = True
    _inside = False
    """Whether the block runs."""

    async def release(self, *, timeout: float = CALL_TIMEOUT) -> bool:
        """RuntimeError inside the guard's block, which would run on without its lease."""
        self._refuse_inside()
        return await super().release(timeout=timeout)

    def _abandon(self) -> None:
        self._refuse_inside()
        super()._abandon()

    def _refuse_inside(self) -> None:
        if self._inside and self._pid == os.getpid():
            raise RuntimeError(f"guard {self.name!r} is released by leaving its block, and not inside it")


class _AsyncGuardLease(AsyncHandle[AsyncGuardGrant]):
    _busy_patience = PATIENT

    def _granted(self, row: dict[str, Any], token: str, trust: Trust) -> AsyncGuardGrant:
        return AsyncGuardGrant(self._engine, self._terms, self._holder, token, row["fence"], trust)


class AsyncGuard:
    """``async with client.guard(name) as grant``: SystemExit before the block unless the lease is held, and the end of
    the process as soon as it may not be held any more."""

    def __init__(self, engine: AsyncEngine, terms: LeaseTerms, timeout: float, *, wipe_on_start: bool) -> None:
        self._engine, self._timeout, self._wipe = engine, timeout, wipe_on_start
        self._terms = terms._replace(on_beat=self._on_beat)
        self._lock = threading.Lock()
        """For what the background thread uses, too: grant, loss and timer."""
        self._entered = threading.Lock()
        """Held from the entry of the block to its end."""
        self._grant: AsyncGuardGrant | None = None
        self._loss: HoldfastError | None = None
        """Why the lease is lost."""
        self._kill_timer: KillTimer | None = None
        self._ending = MainThreadExit()
        self._resource: AsyncResource | None = None
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        return self._terms.name

    @property
    def token(self) -> str | None:
        """The secret proof, while the lease is held."""
        return None if self._grant is None else self._grant.token

    async def __aenter__(self) -> AsyncGuardGrant:
        """SystemExit with code 75 when another process holds the lease, 69 when it is not proven that we do."""
        if not self._entered.acquire(blocking=False):  # a refused second entry must not disarm the timer of the first
            raise RuntimeError(f"guard {self.name!r} is entered already, with this same object")
        self._pid, self._loss = os.getpid(), None
        self._ending.prepare()
        try:
            self._kill_timer = KillTimer()
            grant = await _AsyncGuardLease(self._engine, self._terms, self._timeout).acquire()
        except BaseException as error:
            self._reset()
            if isinstance(error, Exception):  # of any kind: it is not proven that we hold the lease
                refused = isinstance(error, NotAcquired) and error.holder is not None
                raise self._system_exit(REFUSED if refused else UNPROVEN, error) from error
            raise
        try:
            self._arm(grant)
            if self._wipe:
                count = await AsyncLeases(self._engine).wipe(grant)
                log.event(
                    "guard.acquired", WARNING,
                    "guard %(guard)r is acquired with fence %(fence)d: wiped %(wiped)d other lease(s)",
                    guard=self.name, fence=grant.fence, wiped=count,
                )  # fmt: skip
            self._check_held(grant)
        except BaseException as error:
            await self._release(grant)
            if isinstance(error, Exception):
                raise self._system_exit(UNPROVEN, error) from error
            raise
        log.event(
            "guard.acquired", INFO, "guard %(guard)r is acquired with fence %(fence)d",
            guard=self.name, fence=grant.fence,
        )  # fmt: skip
        return grant

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """SystemExit with code 70 when the lease was lost."""
        grant = self._grant
        if grant is None or self._pid != os.getpid():  # in a fork, lease, timer and signals belong to the parent
            return
        if self._loss is not None or grant.lost:  # the timer stays armed: exit hooks may take long
            self._leave_block(grant)
            grant._let_expire()
            if kind is None or not issubclass(kind, SystemExit):
                raise self._system_exit(LOST, self._loss or "it could not be confirmed in time")
            return
        await self._release(grant)

    def _arm(self, grant: AsyncGuardGrant) -> None:
        """From here on the kernel ends the process unless heartbeats are confirmed. Raises when the lease is lost by
        now: a heartbeat may have failed before the timer was armed."""
        self._resource = self._engine.register(AsyncResource(check=self._refuse_close))
        atexit.register(self._let_expire)
        grant._inside = True
        with self._lock:
            self._grant = grant
            if self._kill_timer is not None:
                self._kill_timer.ends_at(self._kill_time(grant))
        self._check_held(grant)

    def _check_held(self, grant: AsyncGuardGrant) -> None:
        grant.check()
        if self._loss is not None:
            raise self._loss

    def _kill_time(self, grant: AsyncGuardGrant) -> float:
        """Between the end of trust and the end of the TTL: exit hooks have most of the time in between."""
        return grant._trusted_until + 0.9 * margin(self._terms.ttl)

    async def _release(self, grant: AsyncGuardGrant) -> None:
        """Disarm first: the block is over, and the database may take longer than the TTL to answer."""
        self._leave_block(grant)
        self._disarm()
        try:
            await grant.release(timeout=_RELEASE_TIMEOUT)
        except EngineError as error:
            # Else it would be renewed for ever, if an open transaction that it protects was the reason.
            grant._abandon()
            log.event(
                "guard.released_late", WARNING, "guard %(guard)r is released later, or expires: %(error)s",
                guard=self.name, error=str(error),
            )  # fmt: skip
        finally:
            self._reset()

    def _leave_block(self, grant: AsyncGuardGrant) -> None:
        """From here on nothing of the block runs, so the lease may be released."""
        atexit.unregister(self._let_expire)
        grant._inside = False
        self._engine.unregister(self._resource)

    def _refuse_close(self) -> None:
        raise RuntimeError(
            f"the client guards this process with {self.name!r}: leave the guard's block before you close it"
        )

    def _disarm(self) -> None:
        with self._lock:
            self._grant = None
            if self._kill_timer is not None:
                self._kill_timer.close()
                self._kill_timer = None

    def _reset(self) -> None:
        """As before the entry: no timer, no signal handler, free to be entered again."""
        self._disarm()
        self._ending.forget()
        self._entered.release()

    def _let_expire(self) -> None:
        """The interpreter exits while a thread is still in the block: it cannot be stopped, so nothing is released."""
        if self._grant is not None and self._pid == os.getpid():
            self._grant._let_expire()

    def _on_beat(self, problem: HoldfastError | None, lost: bool) -> None:
        """In the background thread, after each heartbeat: put the timer off, or end the process.

        All of it under the lock: if the block is left at this moment, there is no timer to put off, and nothing to
        end."""
        with self._lock:
            grant, timer = self._grant, self._kill_timer
            if problem is None or not lost:
                if problem is None and self._loss is None and grant is not None and timer is not None:
                    timer.ends_at(self._kill_time(grant))
                return
            if self._loss is not None:
                return
            self._loss = problem
            if grant is None or timer is None:  # not entered yet, or left already
                return
            grant._let_expire()  # else closing the client would release it while hooks and threads still run
            if isinstance(problem, LeaseLost):  # another process may hold it already
                timer.ends_at(min(now() + margin(self._terms.ttl), self._kill_time(grant)))
        log.event(
            "guard.lost", CRITICAL, "guard %(guard)r is lost: %(error)s; this process ends with code %(code)d",
            guard=self.name, error=str(problem), code=LOST,
        )  # fmt: skip
        self._ending.begin(LOST)

    def _system_exit(self, code: int, reason: object) -> SystemExit:
        log.event(
            "guard.exits", CRITICAL, "guard %(guard)r: %(reason)s; this process ends with code %(code)d",
            guard=self.name, reason=str(reason), code=code,
        )  # fmt: skip
        return SystemExit(code)
