"""The client: one database, its primitives and recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from holdfast.client_recipes_async import AsyncRecipes
from holdfast.database.open_engine_async import open_engine
from holdfast.database.statements import Migration
from holdfast.database.url import parse
from holdfast.errors import PolicyDenied
from holdfast.lease.handle_async import AsyncLease
from holdfast.names import Failover, LeaseTerms, OnLost, Unset, check_free_name, check_sessions
from holdfast.runtime import forks

if TYPE_CHECKING:
    from holdfast.database.migrate_async import AsyncMigrations
    from holdfast.doctor.findings import Examination
    from holdfast.governance.audit_async import AsyncAudit
    from holdfast.governance.policy import Rule, Rules
    from holdfast.keys import OperationKey
    from holdfast.lease.admin_async import AsyncLeases
    from holdfast.lock.handle_async import AsyncLock, AsyncLockSpace
    from holdfast.lock.monitor_async import AsyncLockMonitor
    from holdfast.lock.tickets import Name
    from holdfast.objects.objects_async import AsyncObjects
    from holdfast.operations.energy import Meter
    from holdfast.operations.lineage_terms import Contract
    from holdfast.operations.operation_async import AsyncOperation
    from holdfast.operations.operations_async import AsyncOperations
    from holdfast.operations.reviews_async import AsyncReviews
    from holdfast.operations.terms import Function, OnPartial, WhenLocked


class AsyncClient(AsyncRecipes):
    """What there is on one database. ``url`` is ``postgresql://…`` or ``sqlite:///file.db``, or in HOLDFAST_URL.

    ``schema`` names where the tables are (on SQLite: their prefix); else HOLDFAST_SCHEMA does, else it is "holdfast".
    ``prepared=False`` is for connection poolers that lose prepared statements; most are noticed without it.
    ``lock_url`` is a direct URL for locks, which live in sessions, where ``url`` leads through a pooler. Locks use up
    to ``lock_sessions`` connections and ``lock_overflow`` more that do not stay open. ``policy`` says what operations
    may do to which datasets: a ``holdfast.Policy``, or a function of a context. ``energy``, a ``holdfast.Energy``, says
    what their execution is estimated to cost. Nothing is opened before it is needed.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        schema: str | None = None,
        prepared: bool = True,
        lock_url: str | None = None,
        lock_sessions: int = 15,
        lock_overflow: int = 10,
        policy: Rules | Rule | None = None,
        energy: Meter | None = None,
    ) -> None:
        self._database = parse(url, schema=schema, prepared=prepared)
        self._engine = open_engine(self._database)
        direct = self._database
        if lock_url is not None:
            direct = parse(lock_url, schema=schema, prepared=prepared)._replace(same_as=self._database)
            if "sqlite" in (direct.dialect, self._database.dialect) and direct.target != self._database.target:
                raise ValueError("lock_url must lead to the same database as url, by a direct way")
        self._lock_options = direct, check_sessions(lock_sessions, lock_overflow)
        self._locks: AsyncLockSpace | None = None
        self._objects: AsyncObjects | None = None
        self._operations: AsyncOperations | None = None
        self._firsts: dict[str, Any] = {}
        """Of what two threads make at the same moment, the one that is used."""
        self._rules: Rules | None = None
        if policy is not None:
            from holdfast.governance.policy import as_rules

            self._rules = as_rules(policy)
        self._energy = energy
        if energy is not None:
            from holdfast.operations.energy import check_meter

            check_meter(energy)

    @property
    def leases(self) -> AsyncLeases:
        """Who holds what, who held it before, and taking one away."""
        from holdfast.lease.admin_async import AsyncLeases

        return AsyncLeases(self._engine)

    @property
    def locks(self) -> AsyncLockMonitor:
        """Who holds which lock, who waits for whom, and ending a session that is stuck."""
        from holdfast.lock.monitor_async import AsyncLockMonitor

        return AsyncLockMonitor(self._engine, self._locks)

    @property
    def objects(self) -> AsyncObjects:
        """Records that are written only if they are still what the writer believes, and the log of their changes."""
        if self._objects is None:
            from holdfast.objects.objects_async import AsyncObjects

            self._objects = AsyncObjects(self._engine)
        return self._objects

    @property
    def operations(self) -> AsyncOperations:
        """What became of operations, and mending those whose owners died."""
        if self._operations is None:
            from holdfast.operations.operations_async import AsyncOperations

            made = AsyncOperations(self._engine, self._rules, self._energy)
            self._operations = cast("AsyncOperations", self._firsts.setdefault("operations", made))
        return self._operations

    @property
    def reviews(self) -> AsyncReviews:
        """Operations that somebody has to look at: what there is, and saying yes or no."""
        from holdfast.operations.reviews_async import AsyncReviews

        return AsyncReviews(self._engine, self._rules)

    @property
    def audit(self) -> AsyncAudit:
        """What operators did, who and why, and how it ended."""
        from holdfast.governance.audit_async import AsyncAudit

        return AsyncAudit(self._engine)

    @property
    def migrations(self) -> AsyncMigrations:
        """The tables: what there is, what is missing."""
        from holdfast.database.migrate_async import AsyncMigrations

        return AsyncMigrations(self._engine)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._database}>"

    def lease(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        timeout: float | None = 0.0,
        holder: str | None = None,
        at_least: float = 0.0,
        auto_renew: bool = True,
        renew_every: float | None = None,
        on_lost: OnLost = "flag",
        failover: Failover = "ttl",
        strict: bool = False,
    ) -> AsyncLease:
        """A lease to be had: durable, renewed in the background, free again ``ttl`` seconds after its holder dies.

        ``timeout``: seconds to wait for it (0: refused at once, None: for ever). ``holder``: a name of your own; the
        same holder re-enters with a new token and a higher fence. ``at_least``: hold it for so long even when released
        earlier. ``auto_renew=False``: you call ``grant.renew()``. ``on_lost``: "flag", "cancel" (asyncio), "exit" or a
        callable. ``failover="session"``: a standby takes over as soon as our database session is gone. ``strict``: lost
        with the first heartbeat that fails, instead of when trust in it ends.
        """
        terms = LeaseTerms.check(
            check_free_name(name), ttl=ttl, holder=holder, at_least=at_least, auto_renew=auto_renew,
            renew_every=renew_every, on_lost=on_lost, failover=failover, strict=strict,
        )  # fmt: skip
        return AsyncLease(self._engine, terms, timeout)

    def lock(self, name: Name, *, timeout: float | None = 15.0, on_lost: OnLost = "flag") -> AsyncLock:
        """A lock to be had: lives with a session of our own, whatever the application commits, and dies with it.

        ``name``: a str, or ``(namespace, number)``. ``timeout``: seconds to wait for it (0: refused at once, None: for
        ever). ``on_lost``: "flag", "cancel" (asyncio), "exit" or a callable.
        """
        space = self._locks or self._open_locks()
        make = space.lock
        return make(space, name, timeout, on_lost)

    def operation(
        self,
        key: OperationKey | str | Callable[..., OperationKey | str],
        *,
        tx: Any = None,
        payload: Any = Unset.UNSET,
        rollback: Function | str | None = None,
        verify: Function | None = None,
        on_partial: OnPartial | None = None,
        when_locked: WhenLocked = "wait",
        timeout: float | None = 15.0,
        ttl: float = 30.0,
        max_attempts: int = 3,
        retries: int = 0,
        remember_errors: Sequence[type[BaseException]] = (),
        preconditions: Sequence[Function] = (),
        postconditions: Sequence[Function] = (),
        keep: float | None = None,
        reuse: bool = True,
        marks_effect: bool = False,
        sovereign: bool = False,
        actor: str | None = None,
        justification: str | None = None,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        contract: Contract | None = None,
    ) -> AsyncOperation:
        """An operation: ``await client.operation(key, tx=conn).run(load)`` calls ``load`` once, whatever the retries.

        ``tx``: a connection; claim, what the function writes on it, and the result are one transaction: exactly once.
        Without it the effect is outside, and there is at most one live attempt, under a lease of ``ttl`` seconds. One
        that died is rolled back (``rollback``: a function, or the name of one that is registered), or ``verify`` says
        whether it is done, or it is refused: ``on_partial``.

        ``payload``: whatever must be the same in every retry, or KeyReused. ``when_locked``: what to do while somebody
        else is at it: "wait" for the result and "backoff" (``timeout`` seconds at most), "skip", "fail", "escalate". A
        failure may be tried again, in all ``max_attempts`` times, of which ``retries`` in this run; an error in
        ``remember_errors`` is for good. Conditions are functions that raise, or return False. ``keep``: seconds after
        which the key may be used anew; with ``reuse=False`` it may not, and the outcome is "expired". ``marks_effect``:
        the function says ``op.effect_started()`` itself.
        ``sovereign``: it concerns a sovereign dataset, which is locked whole and marked in the log, and where a lock
        that somebody else has is up for review. ``actor`` and ``justification``: who and why, for log and policy.
        ``inputs``, ``outputs``: the datasets that it reads and writes (the latter is the key's dataset, unless said
        otherwise), and the ``contract`` they are held to: for lineage.
        """
        terms = {
            "when_locked": when_locked, "timeout": timeout, "ttl": ttl, "max_attempts": max_attempts,
            "retries": retries, "on_partial": on_partial, "remember_errors": remember_errors, "keep": keep,
            "reuse": reuse, "marks_effect": marks_effect, "sovereign": sovereign, "actor": actor,
            "justification": justification,
        }  # fmt: skip
        operations = self._operations or self.operations
        plan = operations.plan(terms, rollback, verify, preconditions, postconditions, inputs, outputs, contract)
        return operations.operation(plan, key, tx, payload)

    async def migrate(self) -> list[Migration]:
        """Create or upgrade the tables; returns what was applied. Safe at every start, from every replica at once."""
        return await self.migrations.up()

    def looking(self) -> Self:
        """A client on the same database that only looks: whatever is asked of it, nothing is written. A context manager
        of its own, to be closed when it is not needed any more."""
        from copy import copy  # here: it is rarely wanted, and costs every start

        other = copy(self)
        other._engine = open_engine(self._database, looks=True)
        other._objects = other._locks = other._operations = None
        other._firsts = {}
        return other

    async def examine(self, *, timeout: float = 10.0) -> Examination:
        """Look the database over, and the way to it: everything that could keep leases from working well, each with its
        remedy. Writes nothing. A database that does not answer in ``timeout`` seconds is a finding, not an error."""
        from holdfast.doctor.examine_async import examine

        return await examine(self._engine, timeout)

    async def close(self) -> None:
        """Release what this client still holds, and close its connections. Harmless a second time.

        An elector's work is stopped first; when it does not stop within its grace, its lease is left to expire.
        RuntimeError inside the block of a guard: it would go on without its lease."""
        if self._engine.closed:
            return
        if self._engine.era == forks.era and self._engine.guards:
            raise RuntimeError(
                f"{self!r} guards this process with {sorted(self._engine.guards)}: leave the guard's block before you "
                "close it"
            )
        from holdfast import client_shutdown_async as closing  # here: a start does without it

        try:
            await closing.end_work(self._engine)
        finally:
            self._engine.closing = True  # from here on its grants are over, whatever the database knows yet
            await closing.end_rest(self._engine, self._locks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open_locks(self) -> AsyncLockSpace:
        from holdfast.lock.handle_async import AsyncLockSpace

        if self._engine.looks:
            raise PolicyDenied("a client that only looks takes no lock")
        database, (kept, extra) = self._lock_options
        space = AsyncLockSpace(self._engine, database, kept=kept, extra=extra)
        self._locks = first = cast("AsyncLockSpace", self._firsts.setdefault("locks", space))
        return first
