"""Many operations at once: one statement claims what is nobody's yet, one writes down what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from holdfast._async.primitives.grant import AsyncLeaseGrant
from holdfast._async.primitives.operations.attempt import AsyncPlan, call, costing, kept, line
from holdfast._async.primitives.operations.external import AsyncExternal
from holdfast._async.primitives.operations.operation import measure, run
from holdfast._async.primitives.operations.running import AsyncRunning
from holdfast._async.primitives.operations.within import claimed
from holdfast._async.primitives.protect import fenced_out
from holdfast._wire import Row, drivers, telemetry
from holdfast._wire.clock import now
from holdfast._wire.identity import new_token
from holdfast._wire.log import logger
from holdfast.core.chain import Opening
from holdfast.core.errors import HoldfastError, OperationFailed, Refused
from holdfast.core.keys import OperationKey
from holdfast.core.operation import LEASE, NOTHING, Act, Prior, told
from holdfast.core.operation_terms import Function
from holdfast.core.outcome import Outcome

if TYPE_CHECKING:
    from holdfast._wire.measured import Measured

log = logger("holdfast.operation")

Progress = Callable[[int, int], object]


class _Busy(Exception):
    """A transaction has the lock of the batch."""


class AsyncBatch:
    """``plans``: of each item, in order. All of one dataset and operation, whose lock they share, or all plain keys,
    which have a lock each: then the log alone says who is at which."""

    def __init__(self, plans: Sequence[AsyncPlan], items: Sequence[Any], size: int) -> None:
        self._plans, self._items, self._size = plans, items, size
        first = plans[0]
        self._engine, self._terms = first.engine, first.terms
        locks = {plan.key.lock_key for plan in plans if isinstance(plan.key, OperationKey)}
        plain = sum(not isinstance(plan.key, OperationKey) for plan in plans)
        if len(locks) > 1 or (locks and plain):
            raise ValueError(
                "a batch is of one dataset and operation, without shards, or of plain keys: run others in another batch"
            )
        if len({plan.key.digest for plan in plans}) != len(plans):
            raise ValueError("a batch has every key once: two of these items have the same")
        self._lock = first.key.lock_key if locks else None
        self._all = AsyncExternal(first if locks else first._replace(owner=f"{LEASE}batch-{new_token()}"))
        """As which all of them are claimed."""

    async def run(self, function: Function, progress: Progress | None) -> list[Outcome]:
        if any(plan.governed is not None for plan in self._plans):
            return await self._one_by_one(function, progress)
        started, asked = now(), 0
        while True:
            if await self._all.acquire(started):
                try:
                    return await self._under_lease(function, progress)
                except _Busy:
                    pass  # before anything was done: it is the first question
                finally:
                    await self._all.let_go()
            if self._terms.when_locked == "skip":  # all but those that are done; each counts for itself
                return [await self._alone(place, function) for place in range(len(self._plans))]
            await self._all.locked(NOTHING, asked, started)
            asked += 1

    async def _under_lease(self, function: Function, progress: Progress | None) -> list[Outcome]:
        grant, others = self._all.held, list[int]()
        found: list[Outcome] = []
        for start in range(0, len(self._plans), self._size):
            places = range(start, min(start + self._size, len(self._plans)))
            found += await self._chunk(grant, places, function, others)
            if progress is not None:
                progress(len(found), len(self._plans))
        await self._all.let_go()
        for place in others:
            found[place] = await self._alone(place, function)
        return found

    async def _one_by_one(self, function: Function, progress: Progress | None) -> list[Outcome]:
        """The policy is asked about each, and what it says of one may depend on the one before."""
        found: list[Outcome] = []
        for place in range(len(self._plans)):
            found.append(await self._alone(place, function))
            if progress is not None:
                progress(len(found), len(self._plans))
        return found

    async def _chunk(
        self, grant: AsyncLeaseGrant, places: Sequence[int], function: Function, others: list[int]
    ) -> list[Outcome]:
        ours, known = await self._claim(grant, places)
        found: dict[int, Outcome] = {}
        runs: dict[int, Measured] = {}
        try:
            self._all.enter()
            for place in places:
                if place in ours:
                    if telemetry.listeners:
                        runs[place] = measure(self._plans[place])
                        runs[place].begun(ours[place], NOTHING, self._terms.on_partial)
                    found[place] = await self._execute(place, ours[place], function)
                    if place in runs:
                        runs[place].left()
            self._all.leave()
        except BaseException as error:  # what ended has ended, and what was not called may be tried again
            self._all.leave()
            await self._finish_interrupted(grant, ours, found)
            for place, run in runs.items():
                run.over(found.get(place, error))
            raise
        try:
            await self._finish(grant, list(ours.values()))
        except BaseException as error:
            for run in runs.values():
                run.over(error)
            raise
        for place, run in runs.items():
            run.over(found[place])
        for place in places:
            if place not in ours:
                outcome = await self._settled(self._plans[place], known[self._plans[place].key.digest])
                if outcome is None:
                    others.append(place)
                found[place] = outcome or Outcome("skipped", False, 0)
        return [found[place] for place in places]

    async def _claim(
        self, grant: AsyncLeaseGrant, places: Sequence[int]
    ) -> tuple[dict[int, AsyncRunning], dict[str, Prior]]:
        """Which of them are ours now; of the others, what is known."""
        asked_at = now()
        [clock] = await self._engine.call("operation_get", {"key": ""})
        prior, fence = Prior.nothing(clock["now"]), grant.fence
        opening: dict[str | None, Opening] = {}
        made, claims = {}, []
        for place in places:
            plan = self._plans[place]
            key = plan.key
            if plan.fingerprint not in opening:
                notes = [("lock_acquired", None), *claimed(plan), ("effect_started", None)]
                opening[plan.fingerprint] = Opening(notes, fence, prior.now)
            chain, entries = opening[plan.fingerprint].chain(key.digest)
            made[place] = op = AsyncRunning(key, prior, asked_at, attempt=1, fence=fence, chain=chain)
            op._save = partial(self._save, grant, plan, op)
            op.began = True
            claims.append([
                key.digest, chain.pointer, entries, key.label, plan.fingerprint, key.pipeline, key.task, key.dataset,
                key.operation, key.checksum, key.params_hash,
            ])  # fmt: skip
        asked = {"claims": self._packed(claims), "rollback": self._plans[0].handler, "lock": self._lock}
        rows = await self._call(grant, "operation_claim_many", {**asked, "fence": fence})
        if rows and rows[0]["state"] == "busy":
            raise _Busy
        others = {row["key"]: Prior.of(row) for row in rows}
        return {place: op for place, op in made.items() if op.key.digest not in others}, others

    async def _settled(self, plan: AsyncPlan, prior: Prior) -> Outcome | None:
        """How it ended before; None when it takes more than a batch does."""
        attempt = AsyncExternal(plan)
        act = attempt.decide(prior)
        if act not in (Act.REPLAY, Act.MISMATCH, Act.RUNNING, Act.REFUSE_FAILED):
            return None  # of those that are refused, somebody may have approved that they are tried once more
        attempt.measured = measure(plan) if telemetry.listeners else None
        try:
            outcome = await self._told(attempt, act, prior)
        except BaseException as error:
            attempt.over(error)
            raise
        attempt.over(outcome)
        return outcome

    async def _told(self, attempt: AsyncExternal, act: Act, prior: Prior) -> Outcome:
        if act is Act.RUNNING:
            attempt.locked_out("skipped")
            return Outcome("skipped", False, 0)
        try:
            outcome = attempt.settled(act, prior)
        except HoldfastError as error:
            if isinstance(error, OperationFailed):
                await attempt.refused(error)
            return Outcome("failed", False, prior.attempt, error=error)
        assert outcome is not None
        return outcome

    async def _execute(self, place: int, op: AsyncRunning, function: Function) -> Outcome:
        try:
            if (meter := self._all.plan.energy) is None:
                value = await call(function, op, self._items[place])
            else:
                value = await costing(meter, function, op, self._items[place])
            if self._all.plan.lineage.contract is not None:
                await self._all.check_after(op)
        except Exception as error:
            said = told(error, remembered=self._all.remembers(error))
            op.note("failure", {"error": f"{said['type']}: {said['message']}"})
            op.end = ["failure", None, None, json.dumps(said), 1, True, None]
            return Outcome("failed", False, op.attempt, error=error)
        try:
            result = kept(value)
        except ValueError as error:  # the effect is there: it must not be had again because of that
            op.end = ["partial", None, None, json.dumps({**told(error), "where": "result"}), 0, True, None]
            return Outcome("failed", False, op.attempt, error=error)
        op.note("success", payload_hash=result["result_hash"])
        op.end = ["success", result["result"], result["result_hash"], None, 0, True, op.told()]
        return Outcome("success", False, op.attempt, value=value)

    async def _finish_interrupted(
        self, grant: AsyncLeaseGrant, ours: dict[int, AsyncRunning], found: dict[int, Outcome]
    ) -> None:
        ended = [ours[place] for place in found]
        said = json.dumps({"type": "Interrupted", "message": "it was never called"})
        for op in list(ours.values())[len(ended) + 1 :]:  # the one in between is what was interrupted
            op.note("rollback", {"attempt": op.attempt, "why": "it was never called"})
            op.end = ["failure", None, None, said, 0, False, None]
            ended.append(op)
        try:
            await self._finish(grant, ended)
        except HoldfastError as problem:
            log.warning(
                "how %d operations of a batch ended could not be recorded: %s",
                len(ended),
                problem,
                extra={"event": "operation.unrecorded", "count": len(ended), "error": str(problem)},
            )

    async def _finish(self, grant: AsyncLeaseGrant, ended: Sequence[AsyncRunning]) -> None:
        ends = []
        for op in ended:
            op.released()
            ends.append([op.key.digest, *op.chain.waiting(), *op.end])
        if not ends:
            return
        asked = {"ends": self._packed(ends), "keep": self._terms.keep}
        if await self._call(grant, "operation_finish_many", asked):
            raise fenced_out(grant.name)

    async def _save(self, grant: AsyncLeaseGrant, plan: AsyncPlan, op: AsyncRunning) -> None:
        """What one of them notes while it runs is written at once."""
        await AsyncExternal.part(plan, grant).save(op)

    def _packed(self, rows: list[list[Any]]) -> str:
        """In the order of the keys. SQLite takes JSON apart, PostgreSQL lines: of those nothing has to be quoted."""
        rows.sort(key=itemgetter(0))
        return json.dumps(rows) if self._engine.database.dialect == "sqlite" else "\n".join(map(line, rows))

    async def _call(self, grant: AsyncLeaseGrant, statement: str, parameters: Row) -> list[Row]:
        try:
            rows = await self._engine.call(statement, {**parameters, "owner": grant.name, "token": grant.token})
        except Refused as error:
            if error.sqlstate != drivers.SQLSTATE:
                raise
            raise fenced_out(grant.name) from error
        if rows and rows[0]["state"] == "fenced":
            raise fenced_out(grant.name)
        return rows

    async def _alone(self, place: int, function: Function) -> Outcome:
        """One that failed before, or was left half done, is run as any other."""
        try:
            return await run(self._plans[place], None, function, (self._items[place],), {})
        except Exception as error:
            return Outcome("failed", False, 0, error=error)
