"""The client: one database, its primitives and recipes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast

from holdfast.database.engine_async import AsyncEngine
from holdfast.database.statements import Migration
from holdfast.database.url import Database, parse
from holdfast.errors import PolicyDenied
from holdfast.lease.handle_async import AsyncLease
from holdfast.lease.reentry import ReentrySecrets, check_secret
from holdfast.lease.terms import Failover, LeaseTerms
from holdfast.lock.terms import Name, reserved
from holdfast.names import (
    OnLost,
    Unset,
    check_count,
    check_free_name,
    check_lock_sessions,
    check_name,
    check_timeout,
)
from holdfast.runtime import forks

if TYPE_CHECKING:
    from datetime import timedelta

    from holdfast.database.migrate_async import AsyncMigrations
    from holdfast.doctor.findings import Examination
    from holdfast.governance.audit_async import AsyncAudit
    from holdfast.governance.policies_async import AsyncPolicies
    from holdfast.governance.policy import Policy, Rule
    from holdfast.keys import OperationKey
    from holdfast.lease.admin_async import AsyncLeases
    from holdfast.lease.grant_async import AsyncLeaseGrant
    from holdfast.lineage.relay_async import AsyncRelay, AsyncSink
    from holdfast.lineage.relays_async import AsyncRelays
    from holdfast.lock.handle_async import AsyncLock, AsyncLockGrant, AsyncLockSpace
    from holdfast.lock.monitor_async import AsyncLockMonitor
    from holdfast.objects.objects_async import AsyncObjects
    from holdfast.operations.energy import Meter
    from holdfast.operations.lineage_terms import Lineage
    from holdfast.operations.op_async import AsyncOp
    from holdfast.operations.operation_async import AsyncOperation
    from holdfast.operations.operations_async import AsyncOperations
    from holdfast.operations.reviews_async import AsyncReviews
    from holdfast.operations.terms import Checks, Function, OnPartial, OperationOptions, Retry, WhenLocked
    from holdfast.recipes.elector_async import AsyncElector, OnNewLeader
    from holdfast.recipes.elector_terms import Overrun
    from holdfast.recipes.gate_async import AsyncGates, AsyncGateWindow
    from holdfast.recipes.guard_async import AsyncGuard
    from holdfast.recipes.protocols_async import AsyncDriver
    from holdfast.recipes.reconciler_async import AsyncReconciler, OnEvent, SessionPresent
    from holdfast.recipes.reconciler_rules import Codec, ReconcilerRules
    from holdfast.recipes.shards_async import AsyncShards
    from holdfast.recipes.slots_async import AsyncSlots
    from holdfast.schedules.schedule_async import AsyncSchedule, Work
    from holdfast.schedules.schedules_async import AsyncSchedules
    from holdfast.schedules.terms import Misfire, OnCrash, ScheduleArguments


class AsyncClient:
    """The leases, locks, objects, operations and recipes of one database.

    ``url`` is ``postgresql://…`` or ``sqlite:///file.db``; without it, the variable HOLDFAST_URL is read.

    ``schema`` names where the tables are (on SQLite: their prefix); else HOLDFAST_SCHEMA does, else it is "holdfast".
    ``prepared=False``: use no prepared statements, for a connection pooler that loses them; most poolers are detected.
    Calls use one connection, and up to ``sessions`` where one is not enough; the last of three or more only reads, so
    reads do not wait for writes. Idle ones are closed.
    ``lock_url`` is a direct URL for locks, which live in sessions, where ``url`` leads through a pooler. Locks use up
    to ``lock_sessions`` connections and ``lock_overflow`` more that do not stay open. ``policy`` says what operations
    may do to which datasets: a ``holdfast.governance.Policy``, or a function of a context. ``energy``, a
    ``holdfast.lineage.Energy``, says what their execution is estimated to cost. Nothing is opened before it is needed.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        schema: str | None = None,
        prepared: bool = True,
        sessions: int = 3,
        lock_url: str | None = None,
        lock_sessions: int = 15,
        lock_overflow: int = 10,
        policy: Policy | Rule | None = None,
        energy: Meter | None = None,
    ) -> None:
        self._database = parse(url, schema=schema, prepared=prepared)
        self._engine = _open_engine(self._database, sessions=check_count(sessions, 1, "sessions"))
        direct = self._database
        if lock_url is not None:
            direct = parse(lock_url, schema=schema, prepared=prepared)._replace(same_as=self._database)
            if "sqlite" in (direct.dialect, self._database.dialect) and direct.target != self._database.target:
                raise ValueError("lock_url must be a direct (unpooled) URL of the same database")
        self._lock_options = direct, check_lock_sessions(lock_sessions, lock_overflow)
        self._locks: AsyncLockSpace | None = None
        self._objects: AsyncObjects | None = None
        self._operations: AsyncOperations | None = None
        self._policies: AsyncPolicies | None = None
        self._firsts: dict[str, Any] = {}
        """By name: the first lock space, say, that was made. All threads use it, even if two made one at once."""
        self._rules: Policy | None = None
        if policy is not None:
            from holdfast.governance.policy import as_policy

            self._rules = as_policy(policy)
        self._energy = energy
        if energy is not None:
            from holdfast.operations.energy import check_meter

            check_meter(energy)

    @property
    def leases(self) -> AsyncLeases:
        """List leases and their history, or take one away."""
        from holdfast.lease.admin_async import AsyncLeases

        return AsyncLeases(self._engine)

    @property
    def locks(self) -> AsyncLockMonitor:
        """List locks and their waiters, or end a session that is stuck."""
        from holdfast.lock.monitor_async import AsyncLockMonitor

        return AsyncLockMonitor(self._engine, self._locks)

    @property
    def objects(self) -> AsyncObjects:
        """Records that are written only at the expected version, and the log of their changes."""
        if self._objects is None:
            from holdfast.objects.objects_async import AsyncObjects

            self._objects = AsyncObjects(self._engine)
        return self._objects

    @property
    def operations(self) -> AsyncOperations:
        """The outcomes of operations, and the recovery of those whose owners died."""
        if self._operations is None:
            from holdfast.operations.operations_async import AsyncOperations

            operations = AsyncOperations(self._engine, self.policies, self._energy)
            self._operations = cast("AsyncOperations", self._firsts.setdefault("operations", operations))
        return self._operations

    @property
    def reviews(self) -> AsyncReviews:
        """Operations that need a decision: list them, approve or reject them."""
        from holdfast.operations.reviews_async import AsyncReviews

        return AsyncReviews(self._engine, self.policies)

    @property
    def policies(self) -> AsyncPolicies:
        """The policy that is stored in the database, and its versions."""
        if self._policies is None:
            from holdfast.governance.policies_async import AsyncPolicies

            policies = AsyncPolicies(self._engine, self._rules)
            self._policies = cast("AsyncPolicies", self._firsts.setdefault("policies", policies))
        return self._policies

    @property
    def audit(self) -> AsyncAudit:
        """What operators did, with actor, reason and outcome."""
        from holdfast.governance.audit_async import AsyncAudit

        return AsyncAudit(self._engine)

    @property
    def migrations(self) -> AsyncMigrations:
        """The migrations of the tables: which are applied, which are missing."""
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
        on_lost: OnLost[AsyncLeaseGrant] = "flag",
        failover: Failover = "ttl",
        strict: bool = False,
        reenter: str | None = None,
    ) -> AsyncLease:
        """A handle of a lease: durable, renewed in the background, free again ``ttl`` seconds after its holder dies.

        ``timeout``: seconds to wait for it (None: for ever). By default it is refused at once, because a lease may be
        held for days. ``holder``: a name of your own. While this client
        holds the lease under it, a second acquire re-enters: it gets a new token and a higher fence. So does another
        client of the same database role that has the same secret in ``reenter``.
        ``at_least``: seconds that it stays held even if it is released earlier. ``auto_renew=False``: you call
        ``grant.renew()``. ``on_lost``: "flag", "cancel" (asyncio), "exit" or a callable. ``failover="session"``: a
        standby takes over as soon as our database session is gone. ``strict``: lost with the first heartbeat that
        fails, instead of when trust in it ends.
        """
        terms = LeaseTerms.check(
            check_free_name(name), ttl=ttl, holder=holder, at_least=at_least, auto_renew=auto_renew,
            renew_every=renew_every, on_lost=on_lost, failover=failover, strict=strict,
            reenter=self._reentry_secret(holder, reenter),
        )  # fmt: skip
        return AsyncLease(self._engine, terms, timeout)

    def _guard_lease(self, name: str, **options: Any) -> AsyncLease:
        """The lease of a guard that ends another process than this one: of ``holdfast run --guard``."""
        lease = self.lease(name, **options)
        lease._terms = lease._terms._replace(kind="guard")
        return lease

    def _reentry_secret(self, holder: str | None, given: str | None) -> str | None:
        if given is not None:
            check_secret(given)
            if holder is None:
                raise ValueError("reenter needs holder=, the name under which the lease is re-entered")
        if holder is None:
            return None
        return self._engine.state(ReentrySecrets).remember(check_name(holder, "holder"), given)

    def lock(
        self,
        name: Name,
        *,
        timeout: float | None = 15.0,
        shared: bool = False,
        on_lost: OnLost[AsyncLockGrant] = "flag",
    ) -> AsyncLock:
        """A handle of a lock, which lives with a session of holdfast's own, independent of the application's commits.

        ``name``: a str, or ``(namespace, number)``. ``timeout``: seconds to wait for it (0: refused at once, None: for
        ever); it waits by default, because a lock is held for a moment. ``shared``: beside other shared holders, and
        never beside an exclusive one. ``on_lost``: "flag", "cancel" (asyncio), "exit" or a callable.
        """
        space = self._locks or self._open_locks()
        return space.lock(space, name, timeout, shared, on_lost)

    def _reserved_lock(self, namespace: str, number: int, *, timeout: float) -> AsyncLock:
        """A lock of holdfast's own, in a namespace that ``lock`` refuses."""
        space = self._locks or self._open_locks()
        return space.lock(space, reserved(namespace, number), timeout, False, "flag")

    async def _announce_peer(self, grant: AsyncLeaseGrant, address: str, key: str) -> bool:
        """Store where the holder of a lease listens, for this database role alone. False when the lease is lost. On
        PostgreSQL only: a file has one gateway."""
        fields = {"name": grant.name, "token": grant.token, "address": address, "key": key}
        [row] = await self._engine.call("peer_announce", fields)
        return bool(row["done"])

    async def _find_peer(self, name: str) -> tuple[str, str] | None:
        """Address and key that were stored with a lease, if it is held and this database role has stored them."""
        rows = await self._engine.call("peer_find", {"name": name})
        return (rows[0]["address"], rows[0]["key"]) if rows else None

    async def _activity(
        self, of: Literal["lease", "operation", "schedule"], step: float, buckets: int, **bounds: int
    ) -> Sequence[Mapping[str, Any]]:
        """What the charts of the dashboard show: ``kind`` and ``value`` by ``bucket``, of so many buckets of ``step``
        seconds up to now. Rows without a bucket: the ``start`` of the first one, and ``complete``, since when all of
        it is known."""
        return await self._engine.call(f"{of}_activity", {"step": float(step), "buckets": buckets, **bounds})

    def operation(
        self,
        key: OperationKey | str | Callable[..., OperationKey | str],
        *,
        tx: Any = None,
        join: bool | None = None,
        payload: Any = Unset.UNSET,
        rollback: Function | str | None = None,
        verify: Function | None = None,
        on_partial: OnPartial | None = None,
        when_locked: WhenLocked = "wait",
        timeout: float | Unset | None = Unset.UNSET,
        ttl: float = 30.0,
        keep: float | None = None,
        on_lost: OnLost[AsyncOp] = "flag",
        actor: str | None = None,
        justification: str | None = None,
        retry: Retry | None = None,
        checks: Checks | None = None,
        lineage: Lineage | None = None,
        options: OperationOptions | None = None,
    ) -> AsyncOperation:
        """An operation: ``await client.operation(key, tx=conn).run(load)`` takes effect once, despite retries.

        ``tx``: a connection. The claim, what the function writes and the result are one transaction: exactly once.
        Without it the effect is elsewhere: at most one live attempt, under a lease of ``ttl`` seconds; one that was
        paused past it, or cut off from the database, may run on until it calls ``op.check()``. After a crash
        ``on_partial`` decides: ``rollback`` (a function, or the name of a registered one) undoes the attempt,
        ``verify`` says whether it is done, or it is refused. ``join``: whether the operation has to become a part of
        the caller's transaction on ``tx``: True, or False, ValueError otherwise; None: it does unless ``tx`` is in
        autocommit mode with no transaction open. ``on_lost``: what happens when the lease is lost: "flag"
        (``op.lost``), "cancel" (asyncio: the function is cancelled, and the loss raised), "exit" (this process ends),
        or a callable, which is called with ``op``.

        ``payload``: must be the same in every retry, otherwise KeyReused. ``when_locked``: what to do while another
        attempt runs: "wait" or "backoff" for its result, "skip", "fail", "escalate". ``timeout``: seconds to wait at
        most (None: for ever); by default 15 with ``tx``, else ``ttl`` + 5, which outlasts the lease of a dead owner.
        ``keep``: seconds after which the key may be used again. ``actor`` and ``justification``: for log and policy.

        Further arguments are in groups: ``retry`` (a ``holdfast.Retry``: how often, how soon, which errors are final),
        ``checks`` (``holdfast.Checks``: conditions before and after), ``lineage`` (a ``holdfast.lineage.Lineage``: the
        datasets that it reads and writes, and their contract) and ``options`` (``holdfast.OperationOptions``).
        TypeError or ValueError when an argument is wrong.
        """
        operations = self._operations or self.operations
        return operations._operation(
            key, payload, tx, rollback=rollback, verify=verify, on_partial=on_partial, when_locked=when_locked,
            timeout=timeout, ttl=ttl, keep=keep, join=join, on_lost=on_lost, actor=actor, justification=justification,
            retry=retry, checks=checks, lineage=lineage, options=options,
        )  # fmt: skip

    def guard(
        self,
        name: str,
        *,
        ttl: float = 15.0,
        renew_every: float | None = None,
        timeout: float | None = 0.0,
        strict: bool = False,
        wipe_on_start: bool = False,
    ) -> AsyncGuard:
        """One running instance, which fails closed: ``async with client.guard(name):`` around the whole work.

        SystemExit before the block unless the lease ``name`` is acquired: 75 if it is held, 69 if that is unknown. When
        the lease is taken away or cannot be confirmed in time (``strict``: with the first heartbeat that fails), the
        process ends with 70, and in any case before the TTL does. It is renewed every ``renew_every`` seconds (a third
        of the TTL; half of it at most). ``timeout``: seconds to wait for a predecessor that has crashed (None: for
        ever). ``wipe_on_start`` takes all leases away first, but no guards, electors or gates.
        """
        from holdfast.recipes.guard_async import AsyncGuard
        from holdfast.recipes.guard_terms import check_guard

        terms = check_guard(name, ttl=ttl, renew_every=renew_every, strict=strict)
        return AsyncGuard(self._engine, terms, check_timeout(timeout), wipe_on_start=wipe_on_start)

    def gate(
        self, name: str, *, actor: str, reason: str, ttl: float = 30.0, timeout: float | None = 0.0
    ) -> AsyncGateWindow:
        """A window: ``async with client.gate("dot_config", actor="jane", reason="…") as grant:`` opens the gate, and it
        closes with the block or, if this process dies, ``ttl`` seconds after its last heartbeat.

        While it is open, ``gates.require`` passes, and a second window is refused (NotAcquired; ``timeout``: seconds to
        wait). Recorded in the audit in any case.
        """
        from holdfast.recipes.gate_async import AsyncGateWindow
        from holdfast.recipes.gate_terms import gate_terms

        return AsyncGateWindow(self._engine, name, gate_terms(name, actor=actor, ttl=ttl), timeout, reason)

    @property
    def gates(self) -> AsyncGates:
        """List open gates, ``require`` one, open or close one for a time."""
        from holdfast.recipes.gate_async import AsyncGates

        return AsyncGates(self._engine)

    def slots(self, pool: str, capacity: int, *, ttl: float = 30.0, auto_renew: bool = True) -> AsyncSlots:
        """A counting semaphore: ``await client.slots("tuner", 4).claim(owner="session-1")`` is a grant with ``slot``.

        A slot is a lease, free again ``ttl`` seconds after its holder dies. The capacity may differ from call to call.
        ``auto_renew=False``: its owner calls ``grant.renew()``; in another process after ``grant.detach()`` here and
        ``adopt(slot, token)`` there.
        """
        from holdfast.recipes.slots_async import AsyncSlots

        return AsyncSlots(self._engine, pool, capacity, ttl, auto_renew)

    def elector(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        renew_every: float | None = None,
        retry_every: float | None = None,
        grace: float | None = None,
        holder: str | None = None,
        failover: Failover = "ttl",
        overrun: Overrun = "wait",
        watchdog: bool = False,
        on_new_leader: OnNewLeader | None = None,
    ) -> AsyncElector:
        """One replica at a time runs the work: ``elector.run(work)``. A standby takes over at once after a release, and
        after a crash within ``ttl + retry_every``, or in milliseconds with ``failover="session"``.

        Times default from the TTL. ``renew_every``: seconds between two heartbeats (a third of it). ``retry_every``:
        between two attempts of a standby (a sixth). ``grace``: seconds that the work has to stop (a sixth).
        ``overrun``: what happens if it does not: "wait" lets its lease expire and waits for it, "exit" ends the
        process. ``holder`` replaces ``host:pid`` in the holder ``host:pid:nonce``. ``on_new_leader(holder)`` is called
        for every change that is seen. ``watchdog=True``, on asyncio: the lease is renewed only while the event loop
        turns, so that a leader whose loop is blocked for good has a successor after the TTL.

        On SQLite there is no heartbeat: the kernel frees the lease of a dead process, and a standby takes over at once.
        """
        from holdfast.recipes.elector_async import AsyncElector
        from holdfast.recipes.elector_terms import ElectorTerms

        terms = ElectorTerms.check(
            check_free_name(name), ttl=ttl, renew_every=renew_every, retry_every=retry_every, grace=grace,
            holder=holder, failover=failover, overrun=overrun, watchdog=watchdog,
        )  # fmt: skip
        return AsyncElector(self._engine, terms, on_new_leader)

    def reconciler(
        self,
        type: str,
        driver: AsyncDriver,
        *,
        sweep_every: float = 60.0,
        grace: float = 300.0,
        concurrency: int = 32,
        session_present: SessionPresent | None = None,
        on_event: OnEvent | None = None,
        codec: Codec | None = None,
        rules: ReconcilerRules | None = None,
    ) -> AsyncReconciler:
        """Keeps the status in the objects of a type true to what ``driver`` runs: ``elector.run(reconciler.run)``.

        Events are followed as they come, and every ``sweep_every`` seconds all records are compared. One whose backend
        is missing is Deleted when it still is after ``grace``. ``session_present(id)``: a record is Ready only if
        this returns true, too. ``on_event(event)`` is called with each event of the driver. ``codec`` decodes and
        encodes payloads that are no dict; ``rules`` replaces what a record becomes.
        """
        from holdfast.recipes.reconciler_async import AsyncReconciler
        from holdfast.recipes.reconciler_terms import ReconcilerTerms

        terms = ReconcilerTerms.check(
            check_name(type, "type"), sweep_every=sweep_every, grace=grace, concurrency=concurrency, codec=codec,
            rules=rules,
        )  # fmt: skip
        return AsyncReconciler(self._engine, terms, driver, session_present, on_event)

    def shards(self, name: str, count: int, *, ttl: float = 30.0, holder: str | None = None) -> AsyncShards:
        """``count`` leases, spread evenly over the replicas that are in the block: ``async with client.shards(…)``.

        A dead replica's shards are taken when its ``ttl`` is over. ``holder`` replaces ``host:pid`` in the holder
        ``host:pid:nonce``.
        """
        from holdfast.recipes.shards_async import AsyncShards
        from holdfast.recipes.shards_terms import ShardTerms

        return AsyncShards(self._engine, ShardTerms.check(check_free_name(name), count, ttl=ttl, holder=holder))

    def schedule(
        self,
        name: str,
        every: str | float | timedelta | None,
        *,
        zone: str = "UTC",
        misfire: Misfire = "skip",
        max_late: float | None = None,
        jitter: float = 0.0,
        tx: Any = None,
        on_crash: OnCrash = "retry",
        overlap: int = 1,
    ) -> AsyncSchedule:
        """A job that runs once a slot, however many replicas call ``await client.schedule(…).run(work)``.

        ``every``: seconds, a timedelta, or a cron expression with five fields (``pip install 'holdfast[cron]'``), whose
        times are those of ``zone``. Slots are computed by the clock of the database. ``misfire``: what happens to slots
        that no replica could begin in time: "skip" them, run the last of them "once", or run "all". ``max_late``:
        seconds after which a slot is skipped (60 with "skip", else any time). ``jitter``: each slot begins up to so
        many seconds later, the same in all replicas. ``overlap``: how many runs there may be at once.

        ``tx``: a connection, or a function that returns one for each run. Claim, what the work writes and its end are
        one transaction: exactly one effect for each slot. Without it there is at most one live run, under a lease; when
        its process dies, ``on_crash`` is to "retry" or to "skip" the slot. ``every=None``: once ever, for ``run_due``.
        Whatever is skipped is on record, with its reason. TypeError or ValueError when an argument is wrong.
        """
        return self.schedules._schedule(
            name, every, zone=zone, misfire=misfire, max_late=max_late, jitter=jitter, tx=tx, on_crash=on_crash,
            overlap=overlap,
        )  # fmt: skip

    def every(
        self, every: str | float | timedelta, *, name: str | None = None, **options: Unpack[ScheduleArguments]
    ) -> Callable[[Work], AsyncSchedule]:
        """Decorator: ``@client.every("*/5 * * * *")`` makes the schedule that runs the function, for ``run()`` or
        ``client.schedules.run([…])``. It is called like the function unless ``name`` is given. ``options``: those of
        ``schedule``."""

        def decorate(work: Work) -> AsyncSchedule:
            title = name or f"{work.__module__}.{work.__qualname__}"
            return self.schedule(title, every, **options)._with(work)

        return decorate

    @property
    def schedules(self) -> AsyncSchedules:
        """Run many schedules at once; list them and their runs; pause, resume, order or skip runs."""
        from holdfast.schedules.schedules_async import AsyncSchedules

        return AsyncSchedules(self._engine, self.operations)

    def relay(
        self, name: str, sink: AsyncSink, *, batch: int = 200, poll: float = 1.0, tries: int = 5, ttl: float = 30.0
    ) -> AsyncRelay:
        """Publishes the outcomes of operations to a sink: ``await client.relay("catalogue", sink).run()`` in every
        replica, of which one publishes. ``sink.publish(events)`` gets up to ``batch`` events at a time, in the order
        of the log, each at least once.

        It looks for more every ``poll`` seconds. What the sink refuses ``tries`` times although it takes others is
        parked, and the rest goes on; while the sink is down (SinkDown, no connection, a timeout) everything waits.
        """
        from holdfast.lineage.relay_async import AsyncRelay
        from holdfast.lineage.relay_terms import RelayTerms

        return AsyncRelay(self._engine, RelayTerms.check(name, batch=batch, poll=poll, tries=tries, ttl=ttl), sink)

    @property
    def relays(self) -> AsyncRelays:
        """How far each relay has come, and what its sink refused."""
        from holdfast.lineage.relays_async import AsyncRelays

        return AsyncRelays(self._engine)

    async def migrate(self) -> list[Migration]:
        """Create or upgrade the tables; returns what was applied. Safe at every start, from every replica at once."""
        return await self.migrations.up()

    def read_only(self) -> Self:
        """A client of the same database that writes nothing: a call that would write raises Refused, and one for a
        lock PolicyDenied. It has its own connections: close it, or use it as a context manager."""
        from copy import copy  # here: it is rarely wanted, and costs every start

        other = copy(self)
        other._engine = _open_engine(self._database, read_only=True)
        other._objects = other._locks = other._operations = None
        other._firsts = {}
        return other

    async def doctor(self, *, timeout: float = 10.0) -> Examination:
        """Examine the database and the connection to it: everything that could keep leases from working well, each
        with its remedy. Writes nothing. A database that does not answer within ``timeout`` seconds is a finding, not an
        error."""
        from holdfast.doctor.examine_async import examine

        return await examine(self._engine, timeout)

    def release_on_exit(self, signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT)) -> None:
        """When one of ``signals`` arrives, release the leases of this client first, within two seconds, and then let
        the signal do what it would have done: its previous handler, or the end of the process.

        Without it a process that SIGTERM ends leaves its leases to expire. Guards keep their leases until their blocks
        end. A signal that is ignored stays ignored. ValueError outside the main thread, or for another signal than
        SIGTERM, SIGINT, SIGHUP and SIGQUIT."""
        from holdfast.database import exit_release
        from holdfast.lease.grant_async import AsyncHeldLeases

        self._engine.check_usable()
        exit_release.register(self._engine, signals)
        self._engine.state(AsyncHeldLeases)  # now, for a signal that interrupts the first acquire

    async def close(self) -> None:
        """Release what this client still holds, and close its connections. Harmless a second time.

        An elector's work is stopped first; when it does not stop within its grace, its lease is left to expire.
        RuntimeError inside the block of a guard: it would go on without its lease."""
        engine = self._engine
        if engine.closed:
            return
        was_forked = engine.era != forks.era
        engine.notice_fork()
        # The steps are described in AsyncResource. Copies of the list: other threads may register meanwhile.
        for resource in list(engine.resources):
            resource.check()
        try:
            for resource in list(engine.resources):
                resource.stop()
            for resource in list(engine.resources):
                await resource.wait()
        finally:
            try:
                for resource in list(engine.resources):
                    resource.leave()
            finally:
                engine.closing = True  # its grants are lost from here on, whatever the database knows yet
                try:
                    if self._locks is not None and not was_forked:  # those of a parent are not ours to release
                        await self._locks.close()
                    for resource in list(engine.resources):
                        await resource.release()
                finally:
                    if "holdfast.database.exit_release" in sys.modules:
                        from holdfast.database import exit_release

                        exit_release.forget(engine)
                    await engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open_locks(self) -> AsyncLockSpace:
        from holdfast.lock.handle_async import AsyncLockSpace

        if self._engine.read_only:
            raise PolicyDenied("a read-only client takes no lock")
        database, (kept, extra) = self._lock_options
        space = AsyncLockSpace(self._engine, database, kept=kept, extra=extra)
        self._locks = first = cast("AsyncLockSpace", self._firsts.setdefault("locks", space))
        return first


def _open_engine(database: Database, *, read_only: bool = False, sessions: int = 1) -> AsyncEngine:
    if database.dialect == "sqlite":
        from holdfast.database.sqlite_engine_async import AsyncSqliteEngine

        return AsyncSqliteEngine(database, read_only=read_only, sessions=sessions)
    from holdfast.database.postgres_engine_async import AsyncPostgresEngine

    return AsyncPostgresEngine(database, read_only=read_only, sessions=sessions)
