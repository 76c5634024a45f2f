"""The guard: one running instance, which fails closed.

Nothing runs before the lease is ours, and nothing after it may have passed on. Whatever is in doubt ends the process:
by SystemExit in its main thread, so that it can put things in order, and however long that takes, before the TTL ends
by the kernel. A process that is stopped meanwhile never goes on.
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
from holdfast.runtime.exit import Ending
from holdfast.runtime.kill_timer import DeadMan
from holdfast.runtime.log import logger

log = logger("holdfast.guard")

_GOODBYE = 3.0
"""Seconds in which the database must have taken the lease back."""


class AsyncGuardGrant(AsyncLeaseGrant):
    """The lease behind a guard. It is given back by leaving the block, and by nothing that is done inside it."""

    inside = False

    async def release(self, *, timeout: float = CALL_TIMEOUT) -> bool:
        """RuntimeError inside the guard's block: what is in it would go on without its lease."""
        self._refuse_inside()
        return await super().release(timeout=timeout)

    def abandon(self) -> None:
        self._refuse_inside()
        super().abandon()

    def _refuse_inside(self) -> None:
        if self.inside and self._pid == os.getpid():
            raise RuntimeError(f"guard {self.name!r} is released by leaving its block, and not inside it")


class _AsyncGuardLease(AsyncHandle[AsyncGuardGrant]):
    _busy_patience = PATIENT

    def _granted(self, row: dict[str, Any], token: str, trust: Trust) -> AsyncGuardGrant:
        return AsyncGuardGrant(self._engine, self._terms, self._holder, token, row["fence"], trust)


class AsyncGuard:
    """``async with client.guard(key) as grant``: SystemExit unless it is ours; the process ends when it may not be."""

    def __init__(self, engine: AsyncEngine, terms: LeaseTerms, *, wipe_on_start: bool) -> None:
        self._engine, self._wipe = engine, wipe_on_start
        self._terms = terms._replace(on_beat=self._heard)
        self._lock, self._use = threading.Lock(), threading.Lock()
        self._grant: AsyncGuardGrant | None = None
        self._problem: HoldfastError | None = None
        self._dead_man: DeadMan | None = None
        self._ending = Ending()
        self._resource: AsyncResource | None = None
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        return self._terms.name

    @property
    def token(self) -> str | None:
        """The secret proof, while it is held."""
        return None if self._grant is None else self._grant.token

    async def __aenter__(self) -> AsyncGuardGrant:
        if not self._use.acquire(blocking=False):  # whoever is refused stands down, and not the other's timer
            raise RuntimeError(f"guard {self.name!r} is entered already, by this very object")
        self._pid, self._problem = os.getpid(), None
        self._ending.prepare()
        try:
            self._dead_man = DeadMan()
            grant = await _AsyncGuardLease(self._engine, self._terms, 0.0).acquire()
        except BaseException as error:
            self._stand_down()
            if isinstance(error, Exception):  # whatever it is: we do not know that it is ours
                refused = isinstance(error, NotAcquired) and error.holder is not None
                raise self._exit(REFUSED if refused else UNPROVEN, error) from error
            raise
        try:
            self._begin(grant)
            if self._wipe:
                count = await AsyncLeases(self._engine).wipe(grant)
                log.warning(
                    "guard %r is ours, with fence %d: wiped %d other lease(s)",
                    self.name,
                    grant.fence,
                    count,
                    extra={"event": "guard.acquired", "guard": self.name, "fence": grant.fence, "wiped": count},
                )
            self._prove(grant)
        except BaseException as error:
            await self._give_back(grant)
            if isinstance(error, Exception):
                raise self._exit(UNPROVEN, error) from error
            raise
        log.info(
            "guard %r is ours, with fence %d",
            self.name,
            grant.fence,
            extra={"event": "guard.acquired", "guard": self.name, "fence": grant.fence},
        )
        return grant

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        grant = self._grant
        if grant is None or self._pid != os.getpid():  # a fork of it: the lease, the timer and the signals are not ours
            return
        if self._problem is not None or grant.lost:  # the timer stays: hooks that come after us may take their time
            self._leave(grant)
            grant.let_expire()
            if kind is None or not issubclass(kind, SystemExit):
                raise self._exit(LOST, self._problem or "it could not be confirmed in time")
            return
        await self._give_back(grant)

    def _begin(self, grant: AsyncGuardGrant) -> None:
        """Unless a heartbeat comes back, the kernel ends us. One may have failed already, before we were here."""
        self._resource = self._engine.register(AsyncResource(check=self._refuse_close))
        atexit.register(self._let_expire)
        grant.inside = True
        with self._lock:
            self._grant = grant
            if self._dead_man is not None:
                self._dead_man.ends_at(self._end_of(grant))
        self._prove(grant)

    def _prove(self, grant: AsyncGuardGrant) -> None:
        grant.check()
        if self._problem is not None:
            raise self._problem

    def _end_of(self, grant: AsyncGuardGrant) -> float:
        """When trust has ended and the hooks had most of the time that is left until the TTL does, too."""
        return grant.trusted_until + 0.9 * margin(self._terms.ttl)

    async def _give_back(self, grant: AsyncGuardGrant) -> None:
        """The timer first: the block is over, and the database may take longer to answer than the TTL is."""
        self._leave(grant)
        self._disarm()
        try:
            await grant.release(timeout=_GOODBYE)
        except EngineError as problem:
            grant.abandon()  # refused while a transaction is open that it protects, it would be renewed for ever
            log.warning(
                "guard %r is released later, or expires: %s",
                self.name,
                problem,
                extra={"event": "guard.released_late", "guard": self.name, "error": str(problem)},
            )
        finally:
            self._stand_down()

    def _leave(self, grant: AsyncGuardGrant) -> None:
        """From here on nothing of the block runs, so the lease may go."""
        atexit.unregister(self._let_expire)
        grant.inside = False
        self._engine.unregister(self._resource)

    def _refuse_close(self) -> None:
        raise RuntimeError(
            f"the client guards this process with {self.name!r}: leave the guard's block before you close it"
        )

    def _disarm(self) -> None:
        with self._lock:
            self._grant = None
            if self._dead_man is not None:
                self._dead_man.close()
                self._dead_man = None

    def _stand_down(self) -> None:
        self._disarm()
        self._ending.forget()
        self._use.release()

    def _let_expire(self) -> None:
        """The interpreter goes while a thread is in the block still: what cannot be stopped is not released."""
        if self._grant is not None and self._pid == os.getpid():
            self._grant.let_expire()

    def _heard(self, problem: HoldfastError | None, lost: bool) -> None:
        """In the keeper's thread, after each heartbeat. It is the main thread that ends the process, or the kernel.

        All under one lock: the block may be left this very moment, and then there is nothing to put off or to end."""
        with self._lock:
            grant, dead_man = self._grant, self._dead_man
            if problem is None or not lost:
                if problem is None and self._problem is None and grant is not None and dead_man is not None:
                    dead_man.ends_at(self._end_of(grant))
                return
            if self._problem is not None:
                return
            self._problem = problem
            if grant is None or dead_man is None:  # not entered yet, or left already
                return
            grant.let_expire()  # whoever closes the client would give it away while hooks and threads still work
            if isinstance(problem, LeaseLost):  # somebody else may be at work already
                dead_man.ends_at(min(now() + margin(self._terms.ttl), self._end_of(grant)))
        log.critical(
            "guard %r is lost: %s; this process ends with code %d",
            self.name,
            problem,
            LOST,
            extra={"event": "guard.lost", "guard": self.name, "error": str(problem)},
        )
        self._ending.begin(LOST)

    def _exit(self, code: int, why: object) -> SystemExit:
        log.critical(
            "guard %r: %s; this process ends with code %d",
            self.name,
            why,
            code,
            extra={"event": "guard.exits", "guard": self.name, "code": code},
        )
        return SystemExit(code)
