"""The grant: proof of holding a lease, the trust that is left in it, and what follows from its loss."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self

from holdfast.database.engine_async import CALL_TIMEOUT, LOCKED, AsyncEngine, AsyncResource, Repeated
from holdfast.database.sessions import Statement
from holdfast.errors import EngineError, FencedOut, HoldfastError, LeaseLost, OwnershipUnknown, Refused, SchemaMismatch
from holdfast.lease.keeper import PURGE_EVERY, Beat, Keeper, KeptLease, keeper_of, keepers_of
from holdfast.lease.loss import loss_by_others
from holdfast.lease.terms import LeaseTerms
from holdfast.lease.trust import Trust
from holdfast.runtime import forks, telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import AsyncCancelScope
from holdfast.runtime.exit import LOST_STATUS
from holdfast.runtime.log import CRITICAL, WARNING, logger

log = logger("holdfast.lease")

_RELEASE_PATIENCE = 5.0
CLOSE_TIMEOUT = 5.0
"""Seconds for each call that gives a lease back when its client closes."""

_reporting = threading.RLock()
"""Held while a loss is logged: a process that ends because of the loss waits until the WARNING is written."""


@forks.in_child
def _unlock_reports() -> None:
    """The thread that held it was not forked."""
    global _reporting
    _reporting = threading.RLock()


class AsyncLeaseGrant:
    """A lease we hold. ``token`` is the secret proof, ``fence`` rises with every acquisition of any lease."""

    _kind = "lease"
    _ends_with_block = False
    """Whether only the end of its block releases it."""

    def __init__(
        self, engine: AsyncEngine, terms: LeaseTerms, holder: str, token: str, fence: int, trust: Trust,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self.name, self.holder, self.token, self.fence = name or terms.name, holder, token, fence
        self._engine, self._terms, self._trust = engine, terms, trust
        self._beat: Beat | None = None
        self._over: HoldfastError | None = None
        self._released = self._releasing = self._expires = False
        self._unreported = [now()]
        """Since when it is held, until its end is reported."""
        self._scope = AsyncCancelScope()
        self._pid, self._exit_signals = os.getpid(), engine.exit_signals

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} fence={self.fence} {'lost' if self.lost else 'held'}>"

    @property
    def lost(self) -> bool:
        """True once we may no longer act as the holder, and for ever after."""
        return self._problem() is not None

    @property
    def _trusted_until(self) -> float:
        """Until when it can be trusted, on the clock of the lease (CLOCK_BOOTTIME where there is one)."""
        return self._current.until

    def remaining(self) -> float:
        """Seconds for which this grant can be trusted if nothing renews it; 0 once it is lost."""
        return 0.0 if self.lost else self._current.left(now())

    def check(self) -> None:
        """Raise LeaseLost when it is certainly gone, OwnershipUnknown when the database has not answered in time."""
        if (problem := self._problem()) is not None:
            raise type(problem)(*problem.args) from problem.__cause__  # a new one: a traceback grows with each raise

    async def renew(self) -> Literal[True]:
        """Ask for another TTL now. Needed only with ``auto_renew=False``; LeaseLost when it is gone."""
        if self._over is not None or self._engine.closed or self._pid != os.getpid():
            self.check()
        asked_at, limit = now(), self._limit()
        [row] = await self._engine.call("lease_renew", {"name": self.name, "token": self.token}, timeout=limit)
        if not row["done"]:
            self._on_lost_first(await self._loss("it expired before it was renewed"))
        elif self._beat is not None:
            self._keeper.extend(self._beat, asked_at)
        elif self._over is None:  # not yet reported as lost to the user, so it need not stay lost
            self._trust = self._trust.renewed(asked_at)
        self.check()
        return True

    async def release(self, *, timeout: float = CALL_TIMEOUT) -> bool:
        """Release it; True if it was still held. A second release returns False, and so does one in a forked child.

        EngineError if the database does not answer within ``timeout`` seconds; then the release is retried in the
        background.
        """
        if self._released or self._engine.closed or self._pid != os.getpid() or self._is_given_up():
            return False
        self._releasing = True
        try:
            done = await self._release(timeout)
            loss = None if done or not self._unreported else await self._loss("it expired before it was released")
        except Refused:
            self._releasing = False
            if self._over is not None:
                self._report_end(self._over)
            raise
        except BaseException:
            self._abandon()
            raise
        self._finish(loss)
        return done

    async def protect(self, connection: Any, *, at: Literal["start", "commit"] = "start") -> int:
        """Protect the transaction open on ``connection``: it cannot commit once the lease has passed on.

        ``at="start"`` makes a successor wait for its end; ``at="commit"``, for long ones, checks inside its COMMIT.
        Returns the fence. LeaseLost in a forked child.
        """
        from holdfast.lease import protect_async as protect

        self._check_process()
        try:
            return await protect.protect(self._engine.database, self.name, self.token, connection, at)
        except FencedOut as refusal:
            if await self._still_ours():
                raise EngineError(
                    f"cannot protect the transaction with lease {self.name!r}, which is held but not visible in it: it "
                    "began before the lease was acquired, or is in another database. Roll back and begin a new one."
                ) from refusal
            raise

    @asynccontextmanager
    async def transaction(self, connection: Any, *, at: Literal["start", "commit"] = "start") -> AsyncIterator[Any]:
        """Open a transaction on ``connection`` and protect it: FencedOut when it begins, or when it commits. LeaseLost
        in a forked child."""
        from holdfast.lease import protect_async as protect

        self._check_process()
        try:
            async with protect.transaction(self._engine.database, self.name, self.token, connection, at):
                yield connection
        except FencedOut:
            await self._still_ours()
            raise

    async def __aenter__(self) -> Self:
        """LeaseLost or OwnershipUnknown if it is lost already: then the block does not run."""
        if self.lost:
            self._abandon()
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
                if self.lost:  # a database that did not answer would not answer now
                    self._abandon()
                else:
                    await self.release(timeout=self._limit())
            except EngineError as problem:
                log.event(
                    "lease.released_late", WARNING,
                    "lease %(lease)r is released later: the database did not take it now: %(error)s",
                    lease=self.name, error=str(problem),
                )  # fmt: skip
                self._abandon()
            except BaseException:  # e.g. Ctrl-C before the release
                self._abandon()
                raise

    def _abandon(self) -> None:
        """Release it in the background, however long that takes. Also one that was left to expire and has outlived its
        client."""
        if self._released or (self._engine.closed and not self._expires) or self._pid != os.getpid():
            return
        if self._is_given_up():
            return
        self._keeper.release_later(self.name, self.token)
        self._finish()

    def detach(self) -> str:
        """Hand it over by its token, which is returned: closing the client does not release it any more. Only for a
        lease that this process does not renew (``auto_renew=False``)."""
        if self._terms.auto_renew:
            raise ValueError(
                f"{self._kind} {self.name!r} is renewed by this process: only one with auto_renew=False can be detached"
            )
        self._forget()
        return self.token

    def _keep(self, beat: str, session_key: int | None) -> None:
        """Have the heartbeat renew it from now on."""
        on_beat = self._on_beat if self._terms.has_own_beat else None
        owner, on_recall = self._engine.owner, self._terms.on_recall
        lease = KeptLease(
            self.name, self.token, self.fence, owner, self._lose, on_beat, on_recall, self._ends_with_block,
            self._terms.may_renew,
        )  # fmt: skip
        self._beat = self._keeper.keep(beat, self._trust, self._terms.renew_every, lease, session_key=session_key)

    def _let_expire(self) -> None:
        """Stop renewing it without releasing it: for work that cannot be stopped."""
        if self._beat is not None:
            self._expires = True
            self._keeper.let_expire(self._beat)

    def _age(self) -> float:
        """Seconds since the database last confirmed it, at most."""
        return self._current.age(now())

    def _limit(self) -> float:
        """How long a call about it may take: beyond its trust the answer is worth nothing."""
        return min(CALL_TIMEOUT, max(1.0, self._current.left(now())))

    @property
    def _keeper(self) -> Keeper:
        return keeper_of(self._engine.database, brittle=self._terms.brittle)

    @property
    def _current(self) -> Trust:
        return self._trust if self._beat is None else self._beat.trust

    def _check_process(self) -> None:
        """LeaseLost in a forked child. The database cannot tell: the child has the token, too."""
        if self._pid != os.getpid():
            self.check()

    def _problem(self) -> HoldfastError | None:
        """Why the grant must not be used any more; None while it may be. A reason stays, in ``_over``."""
        if self._over is None:
            if self._pid != os.getpid():  # not stored: it will be so at every call
                return LeaseLost(
                    f"lease {self.name!r} belongs to the parent process {self._pid}, not to this fork of it"
                )
            if self._engine.closing:
                self._over = LeaseLost(f"lease {self.name!r} ended when its client was closed")
            elif self._is_given_up():
                self._over = LeaseLost(f"lease {self.name!r} was released because a signal ends this process")
            elif self._current.left(now()) <= 0:
                self._over = self._unconfirmed()
                self._report_end(self._over)
        return self._over

    def _is_given_up(self) -> bool:
        """Whether it was released in a handler of a signal."""
        return self._exit_signals != self._engine.exit_signals and not self._ends_with_block

    def _unconfirmed(self) -> HoldfastError:
        if self._beat is not None:
            return self._named(self._keeper.loss_of(self._beat))
        return OwnershipUnknown(f"lease {self.name!r} could not be confirmed in time: it may have passed on")

    def _named(self, error: HoldfastError) -> HoldfastError:
        named = type(error)(f"lease {self.name!r} is lost: {error}")
        named.__cause__ = error.__cause__
        return named

    async def _loss(self, otherwise: str) -> HoldfastError:
        """Why the database does not have it any more. ``otherwise``: what is said if the database does not say it."""
        try:
            asked = {"name": self.name, "limit": 100}
            history = await self._engine.call("lease_history", asked, timeout=self._limit())
        except EngineError as problem:
            log.debug("lease %r is lost, and its history is unknown: %s", self.name, problem)
            return LeaseLost(otherwise)
        return loss_by_others(history, self.name, self.fence, otherwise)

    async def _release(self, timeout: float) -> bool:
        parameters = {"name": self.name, "token": self.token, "tell": self._beat is None}
        # A protected transaction that is idle for a TTL is ended by the server: report the refusal before that.
        patience, was_held = min(_RELEASE_PATIENCE, self._trust.ttl / 3, timeout), not self.lost
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
        # A repeated call finds nothing, because the first one has released it.
        return bool(rows[0]["done"]) or (was_held and isinstance(rows, Repeated))

    def _finish(self, loss: HoldfastError | None = None) -> None:
        self._released = True
        self._report_end(None if loss is None else self._named(loss))
        self._over = self._over or LeaseLost(f"lease {self.name!r} was released")
        self._forget()
        if self._beat is not None:
            self._keeper.remove(self._beat, self.token)
        for keeper in keepers_of(self._engine.database):  # waiters of this process need no notification
            keeper.background.listener.wake(self._terms.name)

    def _forget(self) -> None:
        """Closing the client does not release it any more."""
        if not self._terms.auto_renew:
            self._engine.state(AsyncHeldLeases).unrenewed.pop(self.token, None)

    def _on_lost_first(self, error: HoldfastError) -> None:
        """A call has shown that it is lost, before a heartbeat did. ``on_lost`` follows only for a lease with a
        heartbeat: one with ``auto_renew=False`` has its loss raised by the call itself. The keeper removes a lease only
        once, so a loss is reported once."""
        self._forget()
        if self._beat is None:
            self._over = self._over or self._named(error)
            self._report_end(self._over)
        elif self._keeper.remove(self._beat, self.token):
            self._lose(error)

    async def _still_ours(self) -> bool:
        """After a refused transaction: whether the lease is held all the same. The transaction may be protected by two
        leases, or have an older snapshot. Without an answer the lease counts as lost."""
        parameters = {"name": self.name, "token": self.token}
        try:
            if await self._engine.call("lease_status", parameters, timeout=self._limit()):
                return True
        except EngineError as problem:
            log.debug("lease %r: a transaction was refused, and its status is unknown: %s", self.name, problem)
        self._on_lost_first(await self._loss("the database refused a transaction under it, because it has passed on"))
        return False

    def _report_end(self, error: HoldfastError | None = None) -> None:
        """Report its end, once: a loss to the log, and every end to telemetry. A lost lease may be released later, too,
        and two threads may notice the loss."""
        with _reporting:
            try:
                since = self._unreported.pop()
            except IndexError:
                return
            if error is not None:
                what = str(error) if error.__cause__ is None else f"{error} ({error.__cause__})"
                log.event(
                    "lease.lost", WARNING, "%(error)s",
                    kind=self._kind, lease=self.name, fence=self.fence, reason=type(error).__name__, error=what,
                )  # fmt: skip
        if not telemetry.listeners:
            return
        if error is not None:
            telemetry.emit("lease.lost", kind=self._kind, reason=type(error).__name__)
        telemetry.emit("lease.ended", kind=self._kind, held=now() - since)

    def _on_beat(self, problem: HoldfastError | None) -> None:
        """In the background thread, after a heartbeat."""
        if self._released:
            return
        if problem is not None and self._terms.strict:
            self._let_expire()
            self._lose(problem)
        elif self._terms.on_beat is not None:
            self._terms.on_beat(problem, False)

    def _lose(self, error: HoldfastError) -> None:
        """In the background thread, or in the caller's if a call has shown it first."""
        if self._released:
            return
        self._over = problem = self._named(error)
        if not self._releasing:  # else the release reports it, unless it has succeeded
            self._report_end(problem)
        if self._terms.on_beat is not None:
            self._terms.on_beat(problem, True)
        if self._releasing:  # the work under it has ended: there is nothing to stop
            return
        on_lost = self._terms.on_lost
        if on_lost == "exit":
            log.event(
                "lease.exits", CRITICAL, "on_lost='exit' of lease %(lease)r: this process ends now", lease=self.name
            )  # fmt: skip
            os._exit(LOST_STATUS)
        if on_lost == "cancel":
            self._scope.cancel(problem)
        elif callable(on_lost):
            self._engine.owner.notify(on_lost, self)


class AsyncHeldLeases:
    """The leases that a client holds, and their release when it closes. What the database does not take back in time is
    retried in the background; if that fails too, it expires."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.unrenewed: dict[str, str] = {}
        """Names by token of leases that no heartbeat renews (``auto_renew=False``). The keeper knows the others."""
        engine.register(AsyncResource(release=self._release_all, give_up=self._give_up))

    async def _release_all(self) -> None:
        """End the beats that are this client's alone, and release its leases on beats shared with other clients."""
        engine = self._engine
        removed = [keeper.remove_owner(engine.owner) for keeper in keepers_of(engine.database)]
        beats = [beat for own, _ in removed for beat in own]
        leases = [lease for _, shared in removed for lease in shared]
        last = self._statements(beats, leases)
        try:
            while last:
                [row] = await engine.call(*last[-1], timeout=CLOSE_TIMEOUT)
                if not row.get("ended"):  # a beat with very many leases takes several calls
                    last.pop()
            if beats or leases or self.unrenewed:
                await engine.call("purge", {}, timeout=CLOSE_TIMEOUT)
        except SchemaMismatch:
            last = []  # the tables are gone, and the leases with them
        except HoldfastError as error:
            log.event(
                "client.released_late", WARNING,
                "a client of %(database)s was closed, and its leases are released later, in the background: %(error)s",
                database=str(engine.database), error=str(error),
            )  # fmt: skip
        finally:
            for statement, parameters in last:
                engine.background.retry(statement, parameters, patience=PURGE_EVERY, until=False)

    def _give_up(self, dies: bool) -> list[Statement]:
        engine = self._engine
        removed = [keeper.give_up(engine.owner, dies=dies) for keeper in keepers_of(engine.database)]
        statements = self._statements(
            [beat for own, _ in removed for beat in own], [lease for _, shared in removed for lease in shared]
        )
        self.unrenewed.clear()
        return statements

    def _statements(self, beats: list[str], leases: list[KeptLease]) -> list[Statement]:
        """What ends the beats and releases the leases, and those that no heartbeat renews."""
        released = self.unrenewed | {lease.token: lease.name for lease in leases}
        return [
            *(("beat_end", {"beat": beat}) for beat in beats),
            *(("lease_release", {"name": name, "token": token}) for token, name in released.items()),
        ]
