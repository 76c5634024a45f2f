# Generated from chunk_async.py by scripts/unasync.py. Do not edit.
"""A part of a batch: claimed by one statement, and what came of it written down by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from holdfast.database import driver_errors as drivers
from holdfast.database.sessions import Row
from holdfast.errors import HoldfastError, Refused
from holdfast.operations.calling import call, costing, place_of
from holdfast.operations.chain import Chain, Phrase, link, named, phrase
from holdfast.operations.decide import NOTHING, Prior, failed, late, told
from holdfast.operations.external import External
from holdfast.operations.notes import claimed
from holdfast.operations.operation import measure
from holdfast.operations.outcome import Outcome
from holdfast.operations.plan import Plan, kept, kept_for
from holdfast.operations.running import Running
from holdfast.operations.terms import Function
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import maybe_await
from holdfast.runtime.log import logger

if TYPE_CHECKING:
    from holdfast.operations.measured import Measured

log = logger("holdfast.operation")

CLAIM = (
    "keys", "pointers", "entries", "labels", "fingerprints", "pipelines", "tasks", "datasets", "operations",
    "checksums", "params_hashes",
)  # fmt: skip
FINISH = (
    "keys", "expected", "pointers", "numbers", "entries", "statuses", "results", "result_hashes", "errors", "failures",
    "effects_started", "outboxes",
)  # fmt: skip
"""What the two statements are told of each."""

Told = Sequence[str | None]


class Busy(Exception):
    """A transaction has the lock of the batch."""


class Chunk:
    """``attempt`` has the lease."""

    def __init__(self, attempt: External, plans: Sequence[Plan], items: Sequence[Any]) -> None:
        self._all, self._grant = attempt, attempt.held
        self._plans = {plan.key.digest: plan for plan in plans}
        self._items = dict(zip(self._plans, items, strict=True))
        self._ours: dict[str, str] = {}
        """The end of the chain of each that was claimed."""
        self._chains: dict[str, Chain] = {}
        self._ends: dict[str, Told] = {}
        self._runs: dict[str, Measured] = {}
        self._outcomes: dict[str, Outcome] = {}

    def claim(self, lock: int | None) -> dict[str, Prior]:
        """Make those ours that are nobody's; of the others, what is known."""
        self._asked_at = now()
        [clock] = self._all.plan.engine.call("operation_get", {"key": ""})
        self._prior = Prior.nothing(clock["now"])
        fence = self._grant.fence

        locked = self._all.plan.locked(self._grant.name)

        @cache
        def opening(fingerprint: str | None, version: str | None, bucket: str | None) -> list[Phrase]:
            said = claimed(self._all.plan, fingerprint, version, bucket)
            notes = [("lock_acquired", locked), *said, ("effect_started", None)]
            return [phrase(at, kind, 1, fence, self._prior.now, detail) for at, (kind, detail) in enumerate(notes, 1)]

        claims = []
        for digest, plan in self._plans.items():
            key = plan.key
            began = opening(plan.fingerprint, key.version, key.bucket)
            found, entries = link(named(digest), "", began)
            self._ours[digest] = pointer = f"{len(began)}:{found}"
            claims.append((
                digest, pointer, entries, key.label, plan.fingerprint, key.pipeline, key.task, key.dataset,
                key.operation, key.checksum, key.params_hash,
            ))  # fmt: skip
        asked = {"rollback": self._all.plan.handler, "lock": lock, "fence": fence}
        claims.sort()  # or two batches would wait for each other; how they ended stays in the order of that
        rows = self._call("operation_claim_many", asked, CLAIM, claims)
        if rows and rows[0]["state"] == "busy":
            raise Busy
        others = {row["key"]: Prior.of(row) for row in rows}
        for digest in others:
            del self._ours[digest]
        return others

    def run(self, function: Function) -> dict[str, Outcome]:
        """Call it for those that are ours. What ended has ended, and what was not called may be tried again."""
        alone = place_of(function) is None and self._all.plan.energy is None
        try:
            self._all.enter()
            for digest in self._ours:
                self._grant.check()  # or somebody else may be calling it, too
                self._outcomes[digest] = self._execute(digest, function, alone)
                if digest in self._runs:
                    self._runs[digest].left()
        except BaseException as error:
            self._all.leave()
            self._finish_interrupted()
            for digest, each in self._runs.items():
                each.over(self._outcomes.get(digest, error))
            raise
        self._all.leave()
        try:
            self._finish()
        except BaseException as error:
            for each in self._runs.values():
                each.over(error)
            raise
        for digest, each in self._runs.items():
            each.over(self._outcomes[digest])
        return self._outcomes

    def _execute(self, digest: str, function: Function, alone: bool) -> Outcome:
        """``alone``: it does not look at ``op``, and nobody looks at what it costs."""
        op, item, plan = self._op(digest), self._items[digest], self._all.plan
        if telemetry.listeners:
            self._runs[digest] = measure(self._plans[digest])
            self._runs[digest].begun(op, NOTHING, plan.terms.on_partial)
        try:
            if alone:
                value = maybe_await(function(item))
            elif plan.energy is None:
                value = call(function, op, item)
            else:
                value = costing(plan.energy, function, op, item)
            if plan.lineage.contract is not None:
                self._all.check_after(op)
            if not alone:
                op.over()
        except Exception as error:
            op.over()
            said = told(error, remembered=self._all.remembers(error))
            op.note("failure", failed(said))
            self._ends[digest] = ("failure", None, None, json.dumps(said), "1", "1", None)
            return Outcome("failed", False, 1, error=error)
        try:
            result = kept(value)
        except ValueError as error:  # the effect is there: it must not be had again because of that
            said = {**told(error), "where": "result"}
            self._ends[digest] = ("partial", None, None, json.dumps(said), "0", "1", None)
            return Outcome("failed", False, 1, error=error)
        op.note("success", kept_for(plan.terms.keep), payload_hash=result["result_hash"])
        self._ends[digest] = ("success", *result.values(), None, "0", "1", op.told())
        return Outcome("success", False, 1, value=value)

    def _op(self, digest: str) -> Running:
        chain = self._chains[digest] = Chain(digest, self._ours[digest])
        op = Running(
            self._plans[digest].key, self._prior, self._asked_at, attempt=1, fence=self._grant.fence, chain=chain,
            save=self._save,
        )  # fmt: skip
        op.began = True
        return op

    def _finish_interrupted(self) -> None:
        said = json.dumps({"type": "Interrupted", "message": "it was never called"})
        for digest in [each for each in self._ours if each not in self._chains]:
            op = self._op(digest)
            op.note("rollback", {"attempt": op.attempt, "why": "it was never called"})
            self._ends[digest] = ("failure", None, None, said, "0", "0", None)
        try:
            self._finish()
        except HoldfastError as problem:
            log.warning(
                "how %d operations of a batch ended could not be recorded: %s",
                len(self._ends),
                problem,
                extra={"event": "operation.unrecorded", "count": len(self._ends), "error": str(problem)},
            )

    def _finish(self) -> None:
        held = now() - self._asked_at  # they are written down together, and so they end together

        @cache
        def released(number: int) -> Phrase:
            detail = f'{{"held":{held:.6f}}}'
            return phrase(number, "lock_released", 1, self._grant.fence, self._prior.now + held, detail)

        ends = []
        for digest, end in self._ends.items():
            chain = self._chains[digest]
            chain.put(released(chain.next))
            expected, pointer, number, entries = chain.waiting()
            ends.append((digest, expected, pointer, str(number), entries, *end))
        if ends and self._call("operation_finish_many", {"keep": self._all.plan.terms.keep}, FINISH, ends):
            raise late(f"a batch of {len(self._plans)} operations")

    def _save(self, op: Running) -> None:
        """What one of them notes while it runs is written at once."""
        External.part(self._plans[op.key.digest], self._grant).save(op)

    def _call(self, statement: str, asked: Row, names: Sequence[str], rows: list[Any]) -> list[Row]:
        """SQLite takes JSON apart, PostgreSQL a text for each column."""
        engine, grant = self._all.plan.engine, self._grant
        if engine.database.dialect == "sqlite":
            told: Row = {"rows": json.dumps(rows)}
        else:
            told = dict(zip(names, map(_column, zip(*rows, strict=True)), strict=True))
        try:
            found = engine.call(statement, {**asked, **told, "owner": grant.name, "token": grant.token})
        except Refused as error:
            if error.sqlstate != drivers.SQLSTATE:
                raise
            raise late(f"a batch of {len(self._plans)} operations") from error
        if found and found[0]["state"] == "fenced":
            raise late(f"a batch of {len(self._plans)} operations")
        return found


def _column(values: Sequence[Any]) -> str:
    """As one text, in which an empty part is None. None of them has a control character in it, or is empty: names may
    not, and the rest is JSON or hexadecimal."""
    if None not in values:
        return "\x1f".join(values)
    return "\x1f".join([value or "" for value in values]) if any(values) else ""
