"""The guard: one running instance, which fails closed.

Nothing runs before the lease is ours, and nothing after it may have passed on. Whatever is in doubt ends the process:
by SystemExit in its main thread, so that it can put things in order, and however long that takes, before the TTL ends
by the kernel. A process that is stopped meanwhile never goes on.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from holdfast._async.engines.engine import AsyncEngine
from holdfast._async.primitives.grant import AsyncLeaseGrant
from holdfast._async.primitives.lease import AsyncLease
from holdfast._async.primitives.leases import AsyncLeases
from holdfast._wire.clock import now
from holdfast._wire.dead_man import DeadMan
from holdfast._wire.ending import Ending
from holdfast._wire.log import logger
from holdfast.core.errors import EngineError, HoldfastError, LeaseLost, NotAcquired
from holdfast.core.grant import LeaseTerms
from holdfast.core.guard import LOST, REFUSED, UNPROVEN
from holdfast.core.renewal import margin

log = logger("holdfast.guard")

_GOODBYE = 3.0
"""Seconds in which the database must have taken the lease back."""


class AsyncGuard:
    """``async with client.guard(key) as grant``: SystemExit unless it is ours; the process ends when it may not be."""

    def __init__(self, engine: AsyncEngine, terms: LeaseTerms, *, strict: bool, wipe_on_start: bool) -> None:
        self._engine, self._strict, self._wipe = engine, strict, wipe_on_start
        self._terms = terms._replace(on_beat=self._heard)
        self._lock = threading.Lock()
        self._grant: AsyncLeaseGrant | None = None
        self._problem: HoldfastError | None = None
        self._dead_man: DeadMan | None = None
        self._ending = Ending()
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        return self._terms.name

    @property
    def token(self) -> str | None:
        """The secret proof, while it is held."""
        return None if self._grant is None else self._grant.token

    async def __aenter__(self) -> AsyncLeaseGrant:
        if self._grant is not None:
            raise RuntimeError(f"guard {self.name!r} is held already, by this very object")
        self._pid, self._problem = os.getpid(), None
        self._ending.prepare()
        try:
            self._dead_man = DeadMan()
            grant = await AsyncLease(self._engine, self._terms, 0.0).acquire()
        except NotAcquired as refusal:
            raise self._exit(REFUSED, refusal) from refusal
        except Exception as error:  # whatever it is: we do not know that it is ours
            raise self._exit(UNPROVEN, error) from error
        try:
            self._arm(grant)
            if self._wipe:
                count = await AsyncLeases(self._engine).wipe(grant)
                log.warning("guard %r is ours, with fence %d: wiped %d other lease(s)", self.name, grant.fence, count)
            grant.check()
            if self._problem is not None:
                raise self._problem
        except BaseException as error:
            await self._give_back(grant)
            if isinstance(error, Exception):
                raise self._exit(UNPROVEN, error) from error
            raise
        log.info("guard %r is ours, with fence %d", self.name, grant.fence)
        return grant

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        grant = self._grant
        if grant is None or self._pid != os.getpid():  # a fork of it: the lease, the timer and the signals are not ours
            return
        if self._problem is not None or grant.lost:  # the timer stays: hooks that come after us may take their time
            grant.let_expire()
            if kind is None or not issubclass(kind, SystemExit):
                raise self._exit(LOST, self._problem or "it could not be confirmed in time")
            return
        await self._give_back(grant)

    def _arm(self, grant: AsyncLeaseGrant) -> None:
        """Unless we come back here, the kernel ends us."""
        with self._lock:
            self._grant = grant
            if self._problem is None and self._dead_man is not None:
                self._dead_man.ends_at(self._end_of(grant))

    def _end_of(self, grant: AsyncLeaseGrant) -> float:
        """When trust has ended and the hooks had most of the time that is left until the TTL does, too."""
        return grant.trusted_until + 0.9 * margin(self._terms.ttl)

    async def _give_back(self, grant: AsyncLeaseGrant) -> None:
        try:
            await grant.release(timeout=_GOODBYE)
        except EngineError as problem:
            log.warning("guard %r is released later, or expires: %s", self.name, problem)
        finally:
            with self._lock:
                self._grant = None
                if self._dead_man is not None:
                    self._dead_man.close()
                    self._dead_man = None
            self._ending.forget()

    def _heard(self, problem: HoldfastError | None, lost: bool) -> None:
        """In the keeper's thread, after each heartbeat. It is the main thread that ends the process, or the kernel."""
        grant = self._grant
        if problem is None and grant is not None:
            self._arm(grant)
        if problem is None or not (lost or self._strict):
            return
        with self._lock:
            if self._problem is not None:
                return
            self._problem = problem
            if self._grant is None or self._dead_man is None:  # not entered yet, or left already
                return
            self._grant.let_expire()  # whoever closes the client would give it away while hooks and threads still work
            if isinstance(problem, LeaseLost):  # somebody else may be at work already
                self._dead_man.ends_at(min(now() + margin(self._terms.ttl), self._end_of(self._grant)))
        log.critical("guard %r is lost: %s; this process ends with code %d", self.name, problem, LOST)
        self._ending.begin(LOST)

    def _exit(self, code: int, why: object) -> SystemExit:
        if code != LOST:
            self._ending.forget()
        log.critical("guard %r: %s; this process ends with code %d", self.name, why, code)
        return SystemExit(code)
