# Generated from batch_async.py by scripts/unasync.py. Do not edit.
"""Many operations at once: one statement claims what is nobody's yet, one writes down what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.errors import HoldfastError, OperationFailed
from holdfast.operations.chunk import Busy, Chunk
from holdfast.operations.decide import LEASE, NOTHING, Act, Prior
from holdfast.operations.external import External
from holdfast.operations.operation import measure, run
from holdfast.operations.outcome import Outcome
from holdfast.operations.plan import Plan
from holdfast.operations.terms import Function
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import maybe_await
from holdfast.runtime.identity import new_token

Progress = Callable[[int, int], object]


class Batch:
    """``plans``: of each item, in order. All of one dataset and operation, whose lock they share, or all plain keys,
    which have a lock each: then the log alone says who is at which."""

    def __init__(self, plans: Sequence[Plan], items: Sequence[Any], size: int) -> None:
        self._plans, self._items, self._size = plans, items, size
        first = plans[0]
        if len({(plan.key.dataset, plan.key.operation, plan.key.shard) for plan in plans}) > 1:
            raise ValueError(
                "a batch is of one dataset and operation, without shards, or of plain keys: run others in another batch"
            )
        if len(once := {plan.key.digest: at for at, plan in enumerate(plans)}) != len(plans):
            twice = next(plan for at, plan in enumerate(plans) if once[plan.key.digest] != at)
            raise ValueError(f"a batch has every key once, and two of these items have {twice.key.label!r}")
        shared = first.key.dataset is not None
        self._lock = first.key.lock_key if shared else None
        self._all = External(first if shared else first._replace(owner=f"{LEASE}batch-{new_token()}"))
        """As which all of them are claimed."""

    def run(self, function: Function, progress: Progress | None) -> list[Outcome]:
        if any(plan.governed is not None for plan in self._plans):
            return self._one_by_one(function, progress)
        started, asked = now(), 0
        while True:
            try:
                if self._all.acquire(started):
                    return self._under_lease(function, progress)
            except Busy:
                pass  # before anything was done: it is the first question
            finally:
                self._all.drop()
            if self._all.plan.terms.when_locked == "skip":  # all but those that are done; each counts for itself
                return [self._alone(place, function) for place in range(len(self._plans))]
            self._all.locked(NOTHING, asked, started)
            asked += 1

    def _under_lease(self, function: Function, progress: Progress | None) -> list[Outcome]:
        found: list[Outcome] = []
        others: list[int] = []
        for start in range(0, len(self._plans), self._size):
            plans = self._plans[start : start + self._size]
            chunk = Chunk(self._all, plans, self._items[start : start + self._size])
            known = chunk.claim(None if start else self._lock)  # who asks later finds the lease
            outcomes = chunk.run(function)
            for plan in plans:
                if (outcome := outcomes.get(plan.key.digest)) is None:
                    outcome = self._settled(plan, known[plan.key.digest])
                if outcome is None:
                    others.append(len(found))
                found.append(outcome or Outcome("skipped", False, 0))
            if progress is not None:
                maybe_await(progress(len(found), len(self._plans)))
        self._all.let_go()
        for place in others:
            found[place] = self._alone(place, function)
        return found

    def _one_by_one(self, function: Function, progress: Progress | None) -> list[Outcome]:
        """The policy is asked about each, and what it says of one may depend on the one before."""
        found: list[Outcome] = []
        for place in range(len(self._plans)):
            found.append(self._alone(place, function))
            if progress is not None:
                maybe_await(progress(len(found), len(self._plans)))
        return found

    def _settled(self, plan: Plan, prior: Prior) -> Outcome | None:
        """How it ended before; None when it takes more than a batch does."""
        attempt = External(plan)
        act = attempt.decide(prior)
        if act not in (Act.REPLAY, Act.MISMATCH, Act.RUNNING, Act.REFUSE_FAILED):
            return None  # of those that are refused, somebody may have approved that they are tried once more
        attempt.measured = measure(plan) if telemetry.listeners else None
        try:
            outcome = self._told(attempt, act, prior)
        except BaseException as error:
            attempt.over(error)
            raise
        attempt.over(outcome)
        return outcome

    def _told(self, attempt: External, act: Act, prior: Prior) -> Outcome:
        if act is Act.RUNNING:
            attempt.locked_out("skipped")
            return Outcome("skipped", False, 0)
        try:
            outcome = attempt.settled(act, prior)
        except HoldfastError as error:
            if isinstance(error, OperationFailed):
                attempt.refused(error)
            return Outcome("failed", False, prior.attempt, error=error)
        assert outcome is not None
        return outcome

    def _alone(self, place: int, function: Function) -> Outcome:
        """One that failed before, or was left half done, is run as any other."""
        try:
            return run(self._plans[place], None, function, (self._items[place],), {})
        except Exception as error:
            return Outcome("failed", False, 0, error=error)
