# Generated from _async/primitives/operations/batch.py by scripts/unasync.py. Do not edit.
"""Many operations at once: one statement claims what is nobody's yet, one writes down what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from holdfast._sync.primitives.grant import LeaseGrant
from holdfast._sync.primitives.lease import Lease
from holdfast._sync.primitives.operations.attempt import Plan, call, kept
from holdfast._sync.primitives.operations.external import External
from holdfast._sync.primitives.operations.operation import run
from holdfast._sync.primitives.operations.running import Running
from holdfast._sync.primitives.operations.within import claim_noted
from holdfast._sync.primitives.protect import fenced_out
from holdfast._wire import Row, drivers
from holdfast._wire.clock import now
from holdfast._wire.identity import new_token
from holdfast.core.errors import HoldfastError, Refused
from holdfast.core.grant import LeaseTerms
from holdfast.core.keys import OperationKey
from holdfast.core.operation import LEASE, NOTHING, Act, Prior, in_progress, told
from holdfast.core.operation_terms import Function
from holdfast.core.outcome import Outcome

Progress = Callable[[int, int], object]


class Batch:
    """``plans``: of each item, in order. All of one dataset and operation, whose lock they share, or all plain keys,
    which have a lock each: then the log alone says who is at which."""

    def __init__(self, plans: Sequence[Plan], items: Sequence[Any], size: int) -> None:
        self._plans, self._items, self._size = plans, items, size
        self._engine, self._terms = plans[0].engine, plans[0].terms
        locks = {plan.key.lock_key for plan in plans if isinstance(plan.key, OperationKey)}
        plain = sum(not isinstance(plan.key, OperationKey) for plan in plans)
        if len(locks) > 1 or (locks and plain):
            raise ValueError(
                "a batch is of one dataset and operation, without shards, or of plain keys: run others in another batch"
            )
        if len({plan.key.digest for plan in plans}) != len(plans):
            raise ValueError("a batch has every key once: two of these items have the same")
        self._owner = plans[0].lease if locks else f"{LEASE}batch-{new_token()}"

    def run(self, function: Function, progress: Progress | None) -> list[Outcome]:
        if any(plan.governed is not None for plan in self._plans):
            return self._one_by_one(function, progress)
        terms = LeaseTerms.check(
            self._owner, ttl=self._terms.ttl, holder=None, at_least=0.0, auto_renew=True, renew_every=None,
            on_lost="flag", failover="ttl",
        )  # fmt: skip
        patient = self._terms.when_locked == "wait"
        grant = Lease(self._engine, terms, self._terms.timeout if patient else 0.0).try_acquire()
        if grant is None and patient:
            grant = Lease(self._engine, terms, self._terms.timeout).acquire()
        if grant is None:
            raise in_progress(self._plans[0].key)
        found: list[Outcome] = []
        others: list[int] = []
        with grant:
            for start in range(0, len(self._plans), self._size):
                places = range(start, min(start + self._size, len(self._plans)))
                found += self._chunk(grant, list(places), function, others)
                if progress is not None:
                    progress(len(found), len(self._plans))
        for place in others:
            found[place] = self._alone(place, function)
        return found

    def _one_by_one(self, function: Function, progress: Progress | None) -> list[Outcome]:
        """The policy is asked about each, and what it says of one may depend on the one before."""
        found: list[Outcome] = []
        for place in range(len(self._plans)):
            found.append(self._alone(place, function))
            if progress is not None:
                progress(len(found), len(self._plans))
        return found

    def _chunk(self, grant: LeaseGrant, places: list[int], function: Function, others: list[int]) -> list[Outcome]:
        ours, known = self._claim(grant, places)
        found, ended = {}, []
        for place in places:
            plan = self._plans[place]
            if place in ours:
                found[place] = self._execute(plan, ours[place], self._items[place], function)
                ended.append(ours[place])
            else:
                outcome = self._settled(plan, known[plan.key.digest])
                if outcome is None:
                    others.append(place)
                found[place] = outcome or Outcome("skipped", False, 0)
        self._finish(grant, ended)
        return [found[place] for place in places]

    def _claim(self, grant: LeaseGrant, places: list[int]) -> tuple[dict[int, Running], dict[str, Prior]]:
        """Which of them are ours now; of the others, what is known."""
        asked_at = now()
        [clock] = self._engine.call("operation_get", {"key": ""})
        prior = NOTHING._replace(now=clock["now"])
        made: dict[str, tuple[int, Running]] = {}
        claims = []
        for place in places:
            plan = self._plans[place]
            op = Running(plan.key, prior, asked_at, attempt=1, fence=grant.fence)
            claim_noted(op, plan)
            op.began = True
            op.note("effect_started")
            made[plan.key.digest] = place, op
            written, key = op.chain.waiting(), plan.key
            claims.append([
                key.digest, written.pointer, written.entries, key.label, plan.fingerprint, key.pipeline, key.task,
                key.dataset, key.operation, key.checksum, key.params_hash,
            ])  # fmt: skip
        claims.sort()
        rows = self._call(grant, "operation_claim_many", {
            "claims": json.dumps(claims), "fence": grant.fence, "rollback": self._plans[places[0]].handler,
        })  # fmt: skip
        ours = dict(made[row["key"]] for row in rows if row["mine"])
        for op in ours.values():
            op.chain.written()
        return ours, {row["key"]: Prior.of(row) for row in rows if not row["mine"]}

    def _settled(self, plan: Plan, prior: Prior) -> Outcome | None:
        """How it ended before; None when it takes more than a batch does."""
        attempt = External(plan)
        act = attempt.decide(prior)
        if act is Act.RUNNING:
            return Outcome("skipped", False, 0)
        try:
            return attempt.settled(act, prior)
        except HoldfastError as error:
            return Outcome("failed", False, prior.attempt, error=error)

    def _execute(self, plan: Plan, op: Running, item: Any, function: Function) -> Outcome:
        try:
            value = call(function, op, item)
            op.end = {"status": "success", **kept(value)}
            return Outcome("success", False, op.attempt, value=value)
        except Exception as error:
            remembered = isinstance(error, self._terms.remember_errors)
            op.end = {"status": "failure", "error": json.dumps(told(error, remembered=remembered))}
            return Outcome("failed", False, op.attempt, error=error)

    def _finish(self, grant: LeaseGrant, ended: list[Running]) -> None:
        ends = []
        for op in ended:
            end = op.end
            if end["status"] == "success":
                op.note("success", payload_hash=end["result_hash"])
            else:
                said = json.loads(end["error"])
                op.note("failure", {"error": f"{said['type']}: {said['message']}"})
            written = op.chain.waiting()
            ends.append([op.key.digest, *written, end["status"], *map(end.get, ("result", "result_hash", "error"))])
        if not ends:
            return
        ends.sort(key=lambda end: end[0])
        said = self._call(grant, "operation_finish_many", {"ends": json.dumps(ends), "keep": self._terms.keep})
        if len(said) < len(ends):
            raise fenced_out(grant.name)

    def _call(self, grant: LeaseGrant, statement: str, parameters: Row) -> list[Row]:
        try:
            rows = self._engine.call(statement, {**parameters, "owner": grant.name, "token": grant.token})
        except Refused as error:
            if error.sqlstate != drivers.SQLSTATE:
                raise
            raise fenced_out(grant.name) from error
        if rows and rows[0]["state"] == "fenced":
            raise fenced_out(grant.name)
        return rows

    def _alone(self, place: int, function: Function) -> Outcome:
        """One that failed before, or was left half done, is run as any other."""
        try:
            return run(self._plans[place], None, function, (self._items[place],), {})
        except Exception as error:
            return Outcome("failed", False, 0, error=error)
