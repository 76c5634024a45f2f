"""The grant: proof of holding a lease, the trust that is left in it, and what happens when it is lost."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self

from holdfast.database.engine_async import CALL_TIMEOUT, LOCKED, AsyncEngine, Repeated
from holdfast.errors import EngineError, FencedOut, HoldfastError, LeaseLost, OwnershipUnknown, Refused
from holdfast.lease.keepers import Holding, Keeper, Pulse
from holdfast.lease.trust import Trust
from holdfast.names import LeaseTerms
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.log import logger
from holdfast.runtime.waiting_async import AsyncScope

log = logger("holdfast.lease")

EXIT_STATUS = 70
"""How a process ends with ``on_lost="exit"``."""
_RELEASE_PATIENCE = 5.0


class AsyncLeaseGrant:
    """A lease we hold. ``token`` is the secret proof, ``fence`` rises with every acquisition of any lease."""

    kind = "lease"

    def __init__(
        self, engine: AsyncEngine, terms: LeaseTerms, holder: str, token: str, fence: int, trust: Trust,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self.holder, self.token, self.fence = name or terms.name, holder, token, fence
        self._engine, self._terms, self._trust = engine, terms, trust
        self._pulse: Pulse | None = None
        self._over: HoldfastError | None = None
        self._released = self._releasing = self._expires = False
        self._since: float | None = now()
        self._scope = AsyncScope()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<LeaseGrant {self.name!r} fence={self.fence} {'lost' if self.lost else 'held'}>"

    @property
    def lost(self) -> bool:
        """True once we may no longer act as the holder, and for ever after."""
        return self._problem() is not None

    @property
    def trusted_until(self) -> float:
        """The end of that trust, on the clock of the lease (CLOCK_BOOTTIME where there is one)."""
        return self._current.until

    def remaining(self) -> float:
        """Seconds for which this grant can be trusted if nothing renews it; 0 once it is lost."""
        return 0.0 if self.lost else self._current.left(now())

    def check(self) -> None:
        """Raise LeaseLost when it is certainly gone, OwnershipUnknown when the database has not answered in time."""
        if (problem := self._problem()) is not None:
            raise type(problem)(*problem.args) from problem.__cause__  # a fresh one: tracebacks grow

    async def renew(self) -> Literal[True]:
        """Ask for another TTL now. Needed only with ``auto_renew=False``; LeaseLost when it is gone."""
        if self._over is not None or self._engine.closed or self._pid != os.getpid():
            self.check()
        asked_at, limit = now(), self.limit()
        [row] = await self._engine.call("lease_renew", {"name": self.name, "token": self.token}, timeout=limit)
        if not row["done"]:
            self._end(LeaseLost("it expired or was taken over before it was renewed"))
        elif self._pulse is not None:
            self._keeper.extend(self._pulse, asked_at)
        elif self._over is None:  # nobody has looked and seen it lost, so it need not stay so
            self._trust = self._trust.renewed(asked_at)
        self.check()
        return True

    async def release(self, *, timeout: float = CALL_TIMEOUT) -> bool:
        """Give it back; True if it was still ours. A second release is harmless, and so is one in a forked child.

        When the database does not take it in ``timeout`` seconds that is an EngineError, and it is asked for later.
        """
        if self._released or self._engine.closed or self._pid != os.getpid():
            return False
        self._releasing = True
        try:
            done = await self._release(timeout)
        except Refused:
            self._releasing = False
            raise
        except BaseException:
            self.abandon()
            raise
        self._finish()
        return done

    async def protect(self, connection: Any, *, at: Literal["start", "commit"] = "start") -> int:
        """Protect the transaction open on ``connection``: it cannot commit once the lease has passed on.

        ``at="start"`` makes a successor wait for it, ``at="commit"`` (for long ones) asks again inside its COMMIT.
        Returns the fence.
        """
        from holdfast.lease import protect_async as protect

        try:
            return await protect.protect(self._engine.database, self.name, self.token, connection, at)
        except FencedOut as refusal:
            if await self._still_ours():
                raise EngineError(
                    f"cannot protect the transaction with lease {self.name!r}, which is held, but not seen in it: it "
                    "began before the lease was acquired, or is in another database. Roll back and begin a new one."
                ) from refusal
            raise

    @asynccontextmanager
    async def transaction(self, connection: Any, *, at: Literal["start", "commit"] = "start") -> AsyncIterator[Any]:
        """Open a transaction on ``connection`` and protect it: FencedOut when it begins, or when it commits."""
        from holdfast.lease import protect_async as protect

        try:
            async with protect.transaction(self._engine.database, self.name, self.token, connection, at):
                yield connection
        except FencedOut:
            await self._still_ours()
            raise

    async def __aenter__(self) -> Self:
        """LeaseLost, or OwnershipUnknown, when it is gone by now: then nothing of the block runs."""
        if self.lost:
            self.abandon()
            self.check()
        if self._terms.on_lost == "cancel":
            self._scope.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._scope.exit(kind, error, trace)
        finally:
            try:
                if self.lost:  # maybe because nobody answers: then nobody would now
                    self.abandon()
                else:
                    await self.release(timeout=self.limit())
            except EngineError as problem:
                log.warning(
                    "lease %r is released later, the database did not take it now: %s",
                    self.name,
                    problem,
                    extra={"event": "lease.released_late", "lease": self.name, "error": str(problem)},
                )
                self.abandon()
            except BaseException:  # Ctrl-C on the way to the release
                self.abandon()
                raise

    def abandon(self) -> None:
        """Let the keeper release it, however long that takes; for us it is over. What was left to expire has outlived
        its client, and may go now."""
        if self._released or (self._engine.closed and not self._expires) or self._pid != os.getpid():
            return
        self._keeper.release_later(self.name, self.token)
        self._finish()

    def detach(self) -> str:
        """Leave it to whoever has its token, which is returned: closing the client does not release it. For a lease
        that this process does not renew (``auto_renew=False``)."""
        if self._terms.auto_renew:
            raise ValueError(
                f"{self.kind} {self.name!r} lives with this process: only auto_renew=False can be detached"
            )
        self._engine.unkept.pop(self.token, None)
        return self.token

    def keep(self, beat: str, session_key: int | None) -> None:
        """From now on the heartbeat renews it."""
        heard = self._heard if self._terms.apart else None
        holding = Holding(self.name, self.token, self._engine.owner, self._lose, heard, self._terms.on_recall)
        self._pulse = self._keeper.keep(beat, self._trust, self._terms.renew_every, holding, session_key=session_key)

    def let_expire(self) -> None:
        """Renew it no more, without releasing it: for work that cannot be stopped."""
        if self._pulse is not None:
            self._expires = True
            self._keeper.let_expire(self._pulse)

    def age(self) -> float:
        """Seconds since the database last confirmed it, at the most."""
        return self._current.age(now())

    def limit(self) -> float:
        """Seconds that an answer is worth waiting for: beyond what it can be trusted nobody believes in it."""
        return min(CALL_TIMEOUT, max(1.0, self._current.left(now())))

    @property
    def _keeper(self) -> Keeper:
        return self._engine.keeper_for(self._terms)

    @property
    def _current(self) -> Trust:
        return self._trust if self._pulse is None else self._pulse.trust

    def _problem(self) -> HoldfastError | None:
        if self._over is None:
            if self._pid != os.getpid():
                return LeaseLost(
                    f"lease {self.name!r} belongs to the parent process {self._pid}, not to this fork of it"
                )
            if self._engine.closing:
                self._over = LeaseLost(f"lease {self.name!r} was released when its client was closed")
            elif self._current.left(now()) <= 0:
                self._over = OwnershipUnknown(
                    f"lease {self.name!r} could not be confirmed in time: it may have passed on"
                )
        return self._over

    async def _release(self, timeout: float) -> bool:
        parameters = {"name": self.name, "token": self.token, "tell": self._pulse is None}
        # A transaction that it protects may idle for a TTL, and then the server ends it: the user must hear before.
        patience, ours = min(_RELEASE_PATIENCE, self._trust.ttl / 3, timeout), not self.lost
        try:
            rows = await self._engine.call_when_free("lease_release", parameters, patience=patience, timeout=timeout)
        except Refused as error:
            if error.sqlstate != LOCKED:
                raise
            raise Refused(
                f"lease {self.name!r} cannot be released while a transaction that it protects is open: "
                "commit or roll back first",
                LOCKED,
            ) from error
        # Where the answer was lost and it was asked again, it is gone because the first time it was released.
        return bool(rows[0]["done"]) or (ours and isinstance(rows, Repeated))

    def _finish(self) -> None:
        self._released = True
        self._tell_end()
        self._over = self._over or LeaseLost(f"lease {self.name!r} was released")
        self._engine.unkept.pop(self.token, None)
        if self._pulse is not None:
            self._keeper.drop(self._pulse, self.token)
        self._engine.wake(self._terms.name)

    def _end(self, error: LeaseLost) -> None:
        """It is gone, and we are the first to know."""
        self._engine.unkept.pop(self.token, None)
        if self._pulse is None:
            self._tell_end(error)
            self._over = self._over or LeaseLost(f"lease {self.name!r}: {error}")
        elif self._keeper.drop(self._pulse, self.token):
            self._lose(error)

    async def _still_ours(self) -> bool:
        """A transaction was refused, which need not be this lease's fault: it may be under two, or have a snapshot in
        which there is none yet. Unless the database says so, it is over."""
        asked = {"name": self.name, "token": self.token}
        try:
            if await self._engine.call("lease_status", asked, timeout=self.limit()):
                return True
        except EngineError as problem:
            log.debug("lease %r: a transaction was refused, and nobody says whether it is held: %s", self.name, problem)
        self._end(LeaseLost("the database refused a transaction under it, because it has passed on"))
        return False

    def _tell_end(self, error: HoldfastError | None = None) -> None:
        """To whoever measures, once: what was lost is given back later, too."""
        since, self._since = self._since, None
        if since is None or not telemetry.listeners:
            return
        if error is not None:
            telemetry.tell("lease.lost", kind=self.kind, reason=type(error).__name__)
        telemetry.tell("lease.ended", kind=self.kind, held=now() - since)

    def _heard(self, problem: HoldfastError | None) -> None:
        """In the keeper's thread."""
        if self._released:
            return
        if problem is not None and self._terms.strict:
            self.let_expire()
            self._lose(problem)
        elif self._terms.on_beat is not None:
            self._terms.on_beat(problem, False)

    def _lose(self, error: HoldfastError) -> None:
        """In the keeper's thread, or where it was learned first."""
        if self._released:
            return
        self._tell_end(error)
        self._over = problem = type(error)(f"lease {self.name!r}: {error}")
        problem.__cause__ = error.__cause__
        if self._terms.on_beat is not None:
            self._terms.on_beat(problem, True)
        if self._releasing:  # whoever works under it has said that it is over: there is nothing to stop
            return
        on_lost = self._terms.on_lost
        if on_lost == "exit":
            log.critical(
                "%s; on_lost='exit': this process ends now",
                problem,
                extra={"event": "lease.exits", "lease": self.name, "error": str(problem)},
            )
            os._exit(EXIT_STATUS)
        if on_lost == "cancel":
            self._scope.cancel(problem)
        elif callable(on_lost):
            self._engine.owner.tell(on_lost, self)
