# Generated from shards_async.py by scripts/unasync.py. Do not edit.
"""Shards: many leases of one kind, spread evenly over the replicas that live.

Each replica holds one lease that says it is there, looks at the list of them now and then, and releases what is more
than its share or takes what is free. All hang on the one heartbeat of their process, so a thousand cost what one does.
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
from holdfast.recipes.election import replica
from holdfast.recipes.sharding import Plan, ShardTerms, plan, shard_of
from holdfast.runtime import forks
from holdfast.runtime.clock import jitter
from holdfast.runtime.concurrency import StopEvent, Wakeup, Worker
from holdfast.runtime.identity import new_token
from holdfast.runtime.log import logger

log = logger("holdfast.shards")


class Shards:
    """``with client.shards("sweep", 64) as shards``: a fair share of them is ours inside the block."""

    def __init__(self, engine: Engine, terms: ShardTerms) -> None:
        self._engine, self._terms = engine, terms
        self.name = terms.name
        self._name_instance()
        self.stopping = StopEvent()
        """Set when the block ends, or by ``stop()``."""
        self.members: frozenset[str] = frozenset()
        """The replicas that were there at the last look, ourselves among them."""
        self.gained = 0
        """How many shards we have ever taken."""
        self._bell, self._over = Wakeup(), Wakeup()
        self._grants: dict[int, LeaseGrant] = {}
        self._member: LeaseGrant | None = None
        self._job: Worker | None = None
        self._resource: Resource | None = None
        self._left: Wakeup | None = None
        self._entered = False
        self._answers = True
        """Whether the database did when it was last asked."""

    def _name_instance(self) -> None:
        """A fork of this process is another one, and must not be taken for it."""
        self._era = forks.era
        self._nonce = new_token()[:16]
        self.holder = f"{self._terms.holder or replica(os.environ, self._nonce)}/{self._nonce[:8]}"

    def __repr__(self) -> str:
        return f"<Shards {self._terms.name!r} {len(self.held)} of {self._terms.count}>"

    @property
    def held(self) -> frozenset[int]:
        """The shards that are ours now."""
        return frozenset(number for number, grant in list(self._grants.items()) if not grant.lost)

    def shard_of(self, key: str) -> int:
        """The number of the shard that ``key`` falls into, the same in every replica."""
        return shard_of(key, self._terms.count)

    def grant_for(self, key: str) -> LeaseGrant | None:
        """The grant of the shard that ``key`` falls into; None when it is another replica's."""
        grant = self._grants.get(self.shard_of(key))
        return None if grant is None or grant.lost else grant

    def stop(self) -> None:
        """Take no more: whoever works on the shards has to end. They are released when the block ends."""
        self.stopping.set()
        self._bell.set()

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError(f"{self!r} was entered before, which is once: make another one with client.shards(…)")
        self._entered = True
        if self._era != forks.era:
            self._name_instance()
        self._resource = self._engine.register(Resource(stop=self.stop, wait=self.leave))
        try:
            self._balance()
            self._job = Worker(self._run, self, self._over.set)
            self._job.start()
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
            while self._job is not None and not self._job.ended:
                self._over.wait(1.0)
            while self._answers and (grant := self._next()) is not None:
                self._give_back(grant)
        finally:
            self._abandon()
            if self._left is not None:
                self._left.set()

    def leave(self) -> None:
        """The client closes: wait for the end of the block, for as long as an elector waits for its work.

        The leases are released after that in any case: they share a heartbeat with others."""
        self._left = Wakeup()
        if self._resource is not None:
            self._left.wait(self._terms.ttl / 6)

    def _run(self, _: object) -> None:
        try:
            self._go_on()
        finally:
            if self._resource is None:  # whoever left the block was interrupted, and did not wait for us
                self._abandon()

    def _go_on(self) -> None:
        pause = 0.0
        while not self.stopping.is_set():
            self._bell.wait(pause)
            try:
                pause = 0.0 if self.stopping.is_set() else self._balance()
            except Exception as error:
                if self._engine.closed:
                    return
                self._answers = False
                log.warning(
                    "%r: no answer, looks again: %s",
                    self,
                    error,
                    extra={"event": "shards.unanswered", "shards": repr(self), "error": str(error)},
                )
                pause = self._terms.ttl / 6

    def _balance(self) -> float:
        """Look, release, take; how long until the next look."""
        self._be_there()
        self._forget_lost()
        patience = min(CALL_TIMEOUT, max(1.0, self._terms.ttl))  # nothing is ours beyond that
        leases = self._engine.call("shard_list", {"shards": self._terms.name}, timeout=patience)
        self._answers = True
        members, owners = self._terms.listed([(each["name"], each["holder"]) for each in leases])
        self.members = frozenset(members)
        # What was given back, and not taken yet because a transaction is open under it, is neither ours nor free.
        leaving = {each: "" for each in owners if owners[each] == self.holder and each not in self._grants}
        todo = plan(self.holder, self._terms.count, members, owners | leaving)
        for number in todo.release:
            self._release(number)
        for number in todo.take:
            if self.stopping.is_set():
                break
            self._take(number)
        if todo.release or todo.take:
            log.info(
                "%r: %d replicas, released %d, took %d",
                self,
                len(members),
                len(todo.release),
                len(todo.take),
                extra={
                    "event": "shards.changed",
                    "shards": repr(self),
                    "released": len(todo.release),
                    "took": len(todo.take),
                },
            )
        # Whoever does not renew is gone at the end of its TTL, and what it had is to be taken then.
        return self._until_next(
            todo, min((each["remaining"] for each in leases if each["holder"] in members), default=1.0)
        )

    def _until_next(self, todo: Plan, expiry: float) -> float:
        every = self._terms.ttl / 6 * jitter(0.75, 1.0)
        return min(every / 10 if todo.wanting or todo.take else every, max(0.01, expiry + jitter(0.001, 0.02)))

    def _be_there(self) -> None:
        if self._member is None or self._member.lost:
            self._member = self._ask(self._terms.member(self._nonce))

    def _take(self, number: int) -> None:
        grant = self._ask(self._terms.shard(number))
        if grant is not None:
            self._grants[number] = grant
            self.gained += 1

    def _ask(self, name: str) -> LeaseGrant | None:
        ttl = self._terms.ttl
        lease = LeaseTerms(name, ttl, self.holder, 0.0, True, ttl / 3, self._lost, "ttl", False)
        return Lease(self._engine, lease, 0.0).try_acquire()

    def _lost(self, grant: LeaseGrant) -> None:
        """In the keeper's thread."""
        self._bell.set()

    def _forget_lost(self) -> None:
        for number, grant in list(self._grants.items()):
            if grant.lost:
                del self._grants[number]
                log.info(
                    "%r: lost shard %d",
                    self,
                    number,
                    extra={"event": "shards.lost", "shards": repr(self), "shard": number},
                )

    def _release(self, number: int) -> None:
        """Nothing is written under it from here on, and the database sees to that: what is under way is refused."""
        self._give_back(self._grants.pop(number))

    def _give_back(self, grant: LeaseGrant) -> None:
        try:
            grant.release(timeout=grant.limit())
        except EngineError as error:
            self._answers = False
            grant.abandon()
            log.info(
                "%r: %s is released later: %s",
                self,
                grant.name,
                error,
                extra={"event": "lease.released_late", "lease": grant.name, "error": str(error)},
            )

    def _next(self) -> LeaseGrant | None:
        """One of our leases, which is ours no more; that which says that we are there comes last."""
        with suppress(KeyError):
            return self._grants.popitem()[1]
        last, self._member = self._member, None
        return last

    def _abandon(self) -> None:
        """The keeper gives back whatever we still have: nobody answers, where each would be waited for as long as the
        first one was; or nobody waits."""
        self._engine.unregister(self._resource)
        self._resource = None
        while (grant := self._next()) is not None:
            grant.abandon()
