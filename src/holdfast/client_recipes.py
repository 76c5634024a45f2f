# Generated from client_recipes_async.py by scripts/unasync.py. Do not edit.
"""What a client has above its primitives: each recipe is made here, and imported when it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.database.engine import Engine
from holdfast.names import Failover, check_free_name, check_name

if TYPE_CHECKING:
    from holdfast.lineage.passing import Sink
    from holdfast.lineage.relay import Relay
    from holdfast.lineage.relays import Relays
    from holdfast.recipes.driver import Driver
    from holdfast.recipes.election import Overrun
    from holdfast.recipes.elector import Elector, OnNewLeader
    from holdfast.recipes.gate import Gates, GateWindow
    from holdfast.recipes.guard import Guard
    from holdfast.recipes.mend import SessionPresent
    from holdfast.recipes.reconciler import OnEvent, Reconciler
    from holdfast.recipes.shards import Shards
    from holdfast.recipes.slots import Slots


class Recipes:
    _engine: Engine

    def guard(
        self, key: str, *, ttl: float = 15.0, heartbeat: float = 5.0, strict: bool = False, wipe_on_start: bool = False
    ) -> Guard:
        """One running instance, which fails closed: ``with client.guard(key):`` around all that the process does.

        SystemExit before the block unless the lease ``key`` is ours: 75 when somebody else has it, 69 when that cannot
        be proven. In it, when the lease is stolen or cannot be confirmed in time (``strict``: at the first heartbeat
        that fails), the process ends with 70, and before the TTL does whatever its hooks do. ``wipe_on_start`` takes
        all other leases away first.
        """
        from holdfast.recipes.guard import Guard
        from holdfast.recipes.guard_terms import check_guard

        terms = check_guard(key, ttl=ttl, heartbeat=heartbeat, strict=strict)
        return Guard(self._engine, terms, wipe_on_start=wipe_on_start)

    def gate(self, name: str, *, actor: str, reason: str, ttl: float = 30.0, timeout: float | None = 0.0) -> GateWindow:
        """A window: ``with client.gate("dot_config", actor="jane", reason="…") as grant:`` opens the gate, and it
        closes with the block or, should this process die, ``ttl`` seconds after its last heartbeat.

        While it is open nobody else opens it (NotAcquired; ``timeout``: seconds to wait), and ``gates.require`` lets
        through. Recorded in the audit, whatever comes of it.
        """
        from holdfast.recipes.gate import GateWindow
        from holdfast.recipes.gate_terms import gate_terms

        return GateWindow(self._engine, name, gate_terms(name, actor=actor, ttl=ttl), timeout, reason)

    @property
    def gates(self) -> Gates:
        """Which gates are open; ``require`` one, open or close one for a time."""
        from holdfast.recipes.gate import Gates

        return Gates(self._engine)

    def slots(self, pool: str, capacity: int, *, ttl: float = 30.0, auto_renew: bool = True) -> Slots:
        """A counting semaphore: ``client.slots("tuner", 4).claim(owner="session-1")`` is a grant with ``slot``.

        A slot is a lease, free again ``ttl`` seconds after its holder dies. The capacity may be another one each time.
        ``auto_renew=False``: whoever it is claimed for calls ``grant.renew()``; in another process, after
        ``grant.detach()`` here and ``adopt(slot, token)`` there.
        """
        from holdfast.recipes.slots import Slots

        return Slots(self._engine, pool, capacity, ttl, auto_renew)

    def elector(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        renew_every: float = 10.0,
        retry_every: float = 5.0,
        grace: float | None = None,
        holder: str | None = None,
        failover: Failover = "ttl",
        overrun: Overrun = "wait",
        on_new_leader: OnNewLeader | None = None,
    ) -> Elector:
        """One replica at a time runs the work: ``elector.run(work)``. Released, it is another's at once; after a crash
        within ``ttl + retry_every``, or in milliseconds with ``failover="session"``.

        ``grace``: seconds that the work has to stop (a sixth of the TTL). ``overrun``: what happens when it does not:
        "wait" lets its lease expire and waits for it, "exit" ends the process. ``holder``: instead of
        HOLDFAST_REPLICA_ID or HOSTNAME. ``on_new_leader(holder)`` is told of every change that we see.

        On SQLite the kernel knows who lives: no heartbeat, and a standby takes over at once.
        """
        from holdfast.recipes.election import ElectorTerms
        from holdfast.recipes.elector import Elector

        terms = ElectorTerms.check(
            check_free_name(name), ttl=ttl, renew_every=renew_every, retry_every=retry_every, grace=grace,
            holder=holder, failover=failover, overrun=overrun,
        )  # fmt: skip
        return Elector(self._engine, terms, on_new_leader)

    def reconciler(
        self,
        type: str,
        driver: Driver,
        *,
        sweep_every: float = 60.0,
        grace: float = 300.0,
        concurrency: int = 32,
        session_present: SessionPresent | None = None,
        on_event: OnEvent | None = None,
    ) -> Reconciler:
        """Keeps the objects of a type true to what ``driver`` runs: ``elector.run(reconciler.run)``.

        Events are followed as they come, and every ``sweep_every`` seconds all records are compared. One whose backend
        is missing is Deleted when it still is after ``grace``. ``session_present(id)``: what else must be so before a
        record is Ready. ``on_event(event)`` is told of what the platform says.
        """
        from holdfast.recipes.reconciler import Reconciler
        from holdfast.recipes.reconciling import ReconcilerTerms

        terms = ReconcilerTerms.check(
            check_name(type, "type"), sweep_every=sweep_every, grace=grace, concurrency=concurrency
        )
        return Reconciler(self._engine, terms, driver, session_present, on_event)

    def shards(self, name: str, count: int, *, ttl: float = 30.0, holder: str | None = None) -> Shards:
        """``count`` leases, spread evenly over the replicas that are in the block: ``with client.shards(…)``.

        A dead replica's shards are taken when its ``ttl`` is over. ``holder``: instead of HOLDFAST_REPLICA_ID or
        HOSTNAME.
        """
        from holdfast.recipes.sharding import ShardTerms
        from holdfast.recipes.shards import Shards

        return Shards(self._engine, ShardTerms.check(check_free_name(name), count, ttl=ttl, holder=holder))

    def relay(
        self, name: str, sink: Sink, *, batch: int = 200, poll: float = 1.0, tries: int = 5, ttl: float = 30.0
    ) -> Relay:
        """Tells a sink what became of operations: ``client.relay("catalogue", sink).run()`` in every replica, of
        which one does it. ``sink.publish(events)`` gets up to ``batch`` events at a time, in the order of the log, each
        at least once.

        It looks for more every ``poll`` seconds. What the sink refuses ``tries`` times although it takes others is
        parked, and the rest goes on; while the sink is down (SinkDown, no connection, a timeout) everything waits.
        """
        from holdfast.lineage.relay import Relay
        from holdfast.lineage.relay_terms import RelayTerms

        return Relay(self._engine, RelayTerms.check(name, batch=batch, poll=poll, tries=tries, ttl=ttl), sink)

    @property
    def relays(self) -> Relays:
        """How far each relay has come, and what its sink refused."""
        from holdfast.lineage.relays import Relays

        return Relays(self._engine)
