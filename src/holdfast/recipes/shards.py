# Generated from shards_async.py by scripts/unasync.py. Do not edit.
"""Shards: many leases of one kind, spread evenly over the live replicas.

Each replica holds one lease as a member, lists the leases now and then, releases what exceeds its share and takes what
is free: ``shards_terms`` plans this. All leases share the one heartbeat of their process, so a thousand shards cost
what one costs.

    enter: _balance ─→ a worker calls _balance again and again ─→ exit: stop the worker, release the shards, then the
                                                                  membership
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Self

from holdfast.database.engine import CALL_TIMEOUT, Engine, Resource
from holdfast.errors import EngineError
from holdfast.lease.grant import LeaseGrant
from holdfast.lease.handle import Lease
from holdfast.lease.terms import LeaseTerms
from holdfast.recipes.elector_terms import replica_holder
from holdfast.recipes.shards_terms import ShardPlan, ShardTerms, plan, shard_of
from holdfast.runtime import forks
from holdfast.runtime.clock import jitter
from holdfast.runtime.concurrency import StopEvent, Wakeup, Worker
from holdfast.runtime.identity import new_token, this_process
from holdfast.runtime.log import INFO, WARNING, logger

log = logger("holdfast.shards")


class Shards:
    """``with client.shards("sweep", 64) as shards``: an even share of them is ours inside the block."""

    def __init__(self, engine: Engine, terms: ShardTerms) -> None:
        self._engine, self._terms = engine, terms
        self.name = terms.name
        self._name_instance()
        self.stopping = StopEvent()
        """Set when the block ends, or by ``stop()``."""
        self.members: frozenset[str] = frozenset()
        """The replicas that were listed last, this one among them."""
        self.gained = 0
        """How many shards we have ever taken."""
        self._wakeup, self._worker_ended = Wakeup(), Wakeup()
        self._grants: dict[int, LeaseGrant] = {}
        self._membership: LeaseGrant | None = None
        self._worker: Worker | None = None
        self._resource: Resource | None = None
        self._exited: Wakeup | None = None
        """Set at the end of the block, for a client that closes."""
        self._entered = False
        self._database_answers = True
        """Whether the database answered the last call."""

    def _name_instance(self) -> None:
        """Give this replica a name of its own. A fork of this process is another replica."""
        self._era = forks.era
        self._nonce = new_token()[:16]
        process = this_process()
        self.holder = replica_holder(self._terms.holder, os.environ, process["host"], process["pid"], self._nonce)

    def __repr__(self) -> str:
        return f"<Shards {self._terms.name!r} {len(self.held)} of {self._terms.count}>"

    @property
    def held(self) -> frozenset[int]:
        """The shards that are ours now."""
        return frozenset(number for number, grant in list(self._grants.items()) if not grant.lost)

    def shard_of(self, key: str) -> int:
        """The number of the key's shard, the same in every replica."""
        return shard_of(key, self._terms.count)

    def grant_for(self, key: str) -> LeaseGrant | None:
        """The grant of the key's shard; None when it is not ours."""
        grant = self._grants.get(self.shard_of(key))
        return None if grant is None or grant.lost else grant

    def stop(self) -> None:
        """Take no more shards and set ``stopping``. The shards are released when the block ends."""
        self.stopping.set()
        self._wakeup.set()

    def __enter__(self) -> Self:
        """RuntimeError when it was entered before; EngineError when the database does not answer."""
        if self._entered:
            raise RuntimeError(f"{self!r} can be entered only once: create another one with client.shards(…)")
        self._entered = True
        if self._era != forks.era:
            self._name_instance()
        self._resource = self._engine.register(Resource(stop=self.stop, wait=self._leave))
        try:
            self._balance()
            self._worker = Worker(self._run, self, self._worker_ended.set)
            self._worker.start()
            return self
        except BaseException:
            self.stop()
            self._abandon()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
            while self._worker is not None and not self._worker.ended:
                self._worker_ended.wait(1.0)
            while self._database_answers and (grant := self._pop_grant()) is not None:
                self._release(grant)
        finally:
            self._abandon()
            if self._exited is not None:
                self._exited.set()

    def _leave(self) -> None:
        """The client closes: wait for the end of the block, as long as an elector waits for its work by default.

        The leases are released after that in any case: they share a heartbeat with others, so they cannot be left to
        expire."""
        self._exited = Wakeup()
        if self._resource is not None:
            self._exited.wait(self._terms.ttl / 6)

    def _run(self, _: object) -> None:
        """The worker."""
        try:
            self._keep_balance()
        finally:
            if self._resource is None:  # the end of the block was interrupted, and did not wait for this
                self._abandon()

    def _keep_balance(self) -> None:
        delay = 0.0
        while not self.stopping.is_set():
            self._wakeup.wait(delay)
            try:
                delay = 0.0 if self.stopping.is_set() else self._balance()
            except Exception as error:
                if self._engine.closed:
                    return
                self._database_answers = False
                log.event(
                    "shards.unanswered", WARNING, "%(shards)s: no answer, asks again: %(error)s",
                    shards=repr(self), error=str(error),
                )  # fmt: skip
                delay = self._terms.ttl / 6

    def _balance(self) -> float:
        """List the leases, release and take shards as planned. Returns the seconds until the next time."""
        self._join()
        self._forget_lost()
        timeout = min(CALL_TIMEOUT, max(1.0, self._terms.ttl))  # after a TTL without an answer nothing is ours
        leases = self._engine.call("shard_list", {"shards": self._terms.name}, timeout=timeout)
        self._database_answers = True
        members, owners = self._terms.parse_leases([(lease["name"], lease["holder"]) for lease in leases])
        self.members = frozenset(members)
        # Abandoned, but not released yet because a transaction under it is open: neither ours nor free.
        releasing = {shard: "" for shard in owners if owners[shard] == self.holder and shard not in self._grants}
        todo = plan(self.holder, self._terms.count, members, owners | releasing)
        for number in todo.release:
            # From here on the database refuses every write under it, also one that has begun.
            self._release(self._grants.pop(number))
        for number in todo.take:
            if self.stopping.is_set():
                break
            self._take(number)
        if todo.release or todo.take:
            log.event(
                "shards.changed", INFO,
                "%(shards)s: %(replicas)d replicas, released %(released)d, took %(took)d",
                shards=repr(self), replicas=len(members), released=len(todo.release), took=len(todo.take),
            )  # fmt: skip
        # A member that does not renew is gone when its lease expires: its shards are free then.
        return self._next_delay(
            todo, min((lease["remaining"] for lease in leases if lease["holder"] in members), default=1.0)
        )

    def _next_delay(self, todo: ShardPlan, expiry: float) -> float:
        every = self._terms.ttl / 6 * jitter(0.75, 1.0)
        return min(every / 10 if todo.is_short or todo.take else every, max(0.01, expiry + jitter(0.001, 0.02)))

    def _join(self) -> None:
        """Acquire the lease of a member, unless we hold it."""
        if self._membership is None or self._membership.lost:
            self._membership = self._acquire(self._terms.member_lease(self._nonce))

    def _take(self, number: int) -> None:
        grant = self._acquire(self._terms.shard_lease(number))
        if grant is not None:
            self._grants[number] = grant
            self.gained += 1

    def _acquire(self, name: str) -> LeaseGrant | None:
        """None when another replica holds it, or we still do: a shard that is being released is not re-entered."""
        terms = LeaseTerms(
            name, self._terms.ttl, self.holder, at_least=0.0, auto_renew=True, renew_every=self._terms.ttl / 3,
            on_lost=self._on_lost, failover="ttl",
        )  # fmt: skip
        return Lease(self._engine, terms, 0.0).try_acquire()

    def _on_lost(self, grant: LeaseGrant) -> None:
        self._wakeup.set()

    def _forget_lost(self) -> None:
        for number, grant in list(self._grants.items()):
            if grant.lost:
                del self._grants[number]
                log.event("shards.lost", INFO, "%(shards)s: lost shard %(shard)d", shards=repr(self), shard=number)

    def _release(self, grant: LeaseGrant) -> None:
        try:
            grant.release(timeout=grant._limit())
        except EngineError as error:
            self._database_answers = False
            grant._abandon()
            log.event(
                "lease.released_late", INFO, "%(shards)s: %(lease)s is released later: %(error)s",
                shards=repr(self), lease=grant.name, error=str(error),
            )  # fmt: skip

    def _pop_grant(self) -> LeaseGrant | None:
        """Remove and return one of our grants; the membership last, None when there are no more."""
        with suppress(KeyError):
            return self._grants.popitem()[1]
        last, self._membership = self._membership, None
        return last

    def _abandon(self) -> None:
        """Let the keeper release what is left. After a release that was not answered each further one would take as
        long, and after an interrupt nothing waits for the answers."""
        self._engine.unregister(self._resource)
        self._resource = None
        while (grant := self._pop_grant()) is not None:
            grant._abandon()
