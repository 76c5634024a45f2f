"""Many operations at once, for ``run_many``: one statement claims a part of them, and one records their ends.

    operation_acquire → for each part: operation_claim_many → the functions → operation_finish_many → lease_release
                  → the operations that failed before or were left half done, one by one

A process that dies leaves its whole part ``partial``; one that is interrupted, only the operation that was running.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from holdfast.database import driver_errors
from holdfast.database.sessions import Row
from holdfast.errors import HoldfastError, OperationFailed, Refused
from holdfast.names import OPERATION
from holdfast.operations.attempt_async import ALL_OWNERS, has_lost_owner
from holdfast.operations.batch_terms import Progress
from holdfast.operations.decide import (
    NO_PRIOR,
    Decision,
    Prior,
    error_record,
    failure_detail,
    fenced_out,
)
from holdfast.operations.leased_attempt_async import AsyncLeasedAttempt
from holdfast.operations.log import Chain, EncodedEntry, encode_entry, hash_prefix, link_entries
from holdfast.operations.op_async import AsyncOp, call_metered, call_with_op, op_parameter
from holdfast.operations.operation_async import new_run_telemetry, run
from holdfast.operations.outcome import Outcome
from holdfast.operations.policy_checks_async import PolicyChanged
from holdfast.operations.spec_async import AsyncOperationSpec, encode_result
from holdfast.operations.terms import Function
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import maybe_await
from holdfast.runtime.identity import new_token
from holdfast.runtime.log import WARNING, logger

if TYPE_CHECKING:
    from holdfast.operations.run_telemetry import RunTelemetry

log = logger("holdfast.operation")

CLAIM_COLUMNS = (
    "keys", "pointers", "entries", "labels", "fingerprints", "pipelines", "tasks", "datasets", "operations",
    "checksums", "params_hashes",
)  # fmt: skip
FINISH_COLUMNS = (
    "keys", "expected", "pointers", "numbers", "entries", "statuses", "results", "result_hashes", "errors", "failures",
    "effects_started", "outboxes",
)  # fmt: skip
"""The parameters of ``operation_claim_many`` and ``operation_finish_many``, one list for all operations."""

_SETTLED = (Decision.REPLAY, Decision.FOREIGN, Decision.MISMATCH, Decision.RUNNING, Decision.REFUSE_FAILED)
"""For these the log has the outcome."""
EndColumns = Sequence[str | None]
"""The last seven of FINISH_COLUMNS, of one operation."""


class BatchBusy(Exception):
    """A transaction has the lock of the batch."""


class AsyncBatch:
    """``specs``: one for each item, in their order. All of one dataset and operation, whose lock they share; or all
    with plain keys, which have a lock each: then the batch has a lease of its own, and the log alone decides whose an
    operation is."""

    def __init__(self, specs: Sequence[AsyncOperationSpec], items: Sequence[Any], size: int) -> None:
        self._specs, self._items, self._size = specs, items, size
        first = specs[0]
        if len({(spec.key.dataset, spec.key.operation, spec.key.shard) for spec in specs}) > 1:
            raise ValueError(
                "a batch is of one dataset and operation, without shards, or of plain keys: run others in another batch"
            )
        last_index = {spec.key.digest: index for index, spec in enumerate(specs)}
        if len(last_index) != len(specs):
            double = next(spec for index, spec in enumerate(specs) if last_index[spec.key.digest] != index)
            raise ValueError(f"a batch has every key once, and two of these items have {double.key.label!r}")
        is_shared = first.key.dataset is not None
        self._lock = first.key.lock_key if is_shared else None
        lease = None if is_shared else f"{OPERATION}batch-{new_token()}"
        self._attempt = AsyncLeasedAttempt(first._replace(lease=lease) if lease else first)
        """Holds the lease under which all of them are claimed."""
        self._lost_owner: bool | None = None

    async def run(self, function: Function, progress: Progress | None) -> list[Outcome[Any]]:
        """The outcomes in the order of the items. OperationInProgress when the lock of all cannot be had."""
        if any(spec.governed is not None for spec in self._specs):
            return await self._run_singly(function, progress)
        try:
            return await self._run_in_parts(function, progress)
        except PolicyChanged:
            await self._attempt.release()
            policies = self._specs[0].policies
            assert policies is not None
            await policies._refresh()
            self._specs = [spec.govern() for spec in self._specs]
            return await self._run_singly(function, progress)
        finally:
            await self._attempt.drop()

    async def _run_in_parts(self, function: Function, progress: Progress | None) -> list[Outcome[Any]]:
        started, tries = now(), 0
        while True:
            try:
                if await self._attempt.acquire(started):
                    return await self._run_under_lease(function, progress)
            except BatchBusy:
                pass  # only the claim of the first part raises it, before any effect
            finally:
                await self._attempt.release()
            if self._attempt.spec.terms.when_locked == "skip":  # those that are done are replayed, not skipped
                return [await self._run_single(index, function) for index in range(len(self._specs))]
            await self._attempt.wait_for_lock(NO_PRIOR, tries, started)
            tries += 1

    async def _run_under_lease(self, function: Function, progress: Progress | None) -> list[Outcome[Any]]:
        outcomes: list[Outcome[Any]] = []
        singles: list[int] = []
        for start in range(0, len(self._specs), self._size):
            specs = self._specs[start : start + self._size]
            part = AsyncBatchPart(self._attempt, specs, self._items[start : start + self._size])
            priors = await part.claim(None if start else self._lock)  # from then on, others find the lease
            ended = await part.run(function)
            for spec in specs:
                if (outcome := ended.get(spec.key.digest)) is None:
                    outcome = await self._settle(spec, priors[spec.key.digest])
                if outcome is None:
                    singles.append(len(outcomes))
                outcomes.append(outcome or Outcome("skipped", False, 0))
            if progress is not None:
                await maybe_await(progress(len(outcomes), len(self._specs)))
        await self._attempt.release()
        for index in singles:
            outcomes[index] = await self._run_single(index, function)
        return outcomes

    async def _run_singly(self, function: Function, progress: Progress | None) -> list[Outcome[Any]]:
        """The policy decides about each, and may take the one before into account."""
        outcomes: list[Outcome[Any]] = []
        for index in range(len(self._specs)):
            outcomes.append(await self._run_single(index, function))
            if progress is not None:
                await maybe_await(progress(len(outcomes), len(self._specs)))
        return outcomes

    async def _run_single(self, index: int, function: Function) -> Outcome[Any]:
        """Run one outside of the batch, as ``client.operation`` does."""
        try:
            return await run(self._specs[index], None, function, (self._items[index],), {})
        except Exception as error:
            return Outcome("failed", False, 0, error=error)

    async def _settle(self, spec: AsyncOperationSpec, prior: Prior) -> Outcome[Any] | None:
        """The outcome of an operation that is in the log already; None when it has to be run singly."""
        attempt = AsyncLeasedAttempt(spec)
        decision = attempt.decide(prior)
        if decision is Decision.RUNNING and (spec.terms.when_locked != "skip" or await self._has_lost_owner()):
            return None
        if decision not in _SETTLED:
            return None  # also for the other refusals, because a review may have approved another attempt
        attempt.telemetry = new_run_telemetry(spec) if telemetry.listeners else None
        try:
            outcome = await self._settled_outcome(attempt, decision, prior)
        except BaseException as error:
            if attempt.telemetry is not None:
                attempt.telemetry.ended(error)
            raise
        if attempt.telemetry is not None:
            attempt.telemetry.ended(outcome)
        return outcome

    async def _has_lost_owner(self) -> bool:
        """Looks once for the owners of all: a batch of which many are running asks for each."""
        if self._lost_owner is None:
            self._lost_owner = await has_lost_owner(self._attempt.spec.engine, ALL_OWNERS)
        return self._lost_owner

    async def _settled_outcome(self, attempt: AsyncLeasedAttempt, decision: Decision, prior: Prior) -> Outcome[Any]:
        if decision is Decision.RUNNING:
            attempt.report_locked_out("skipped")
            return Outcome("skipped", False, 0)
        try:
            outcome = attempt.settle(decision, prior)
        except HoldfastError as error:
            if isinstance(error, OperationFailed):
                await attempt.policy.review_refusal(error)
            return Outcome("failed", False, prior.attempt, error=error)
        assert outcome is not None
        return outcome


class AsyncBatchPart:
    """A part of a batch: claimed by one statement, ended by one. ``attempt`` holds the lease."""

    def __init__(self, attempt: AsyncLeasedAttempt, specs: Sequence[AsyncOperationSpec], items: Sequence[Any]) -> None:
        self._attempt, self._grant = attempt, attempt.held_grant
        self._specs = {spec.key.digest: spec for spec in specs}
        self._items = dict(zip(self._specs, items, strict=True))
        self._claimed: dict[str, str] = {}
        """The pointers of those that were claimed."""
        self._chains: dict[str, Chain] = {}
        self._ends: dict[str, EndColumns] = {}
        self._telemetry: dict[str, RunTelemetry] = {}
        self._outcomes: dict[str, Outcome[Any]] = {}

    async def claim(self, lock: int | None) -> dict[str, Prior]:
        """Claim those that have no row yet. Returns the rows of the others, by key. BatchBusy when a transaction has
        ``lock``."""
        batch_spec, fence = self._attempt.spec, self._grant.fence
        [clock] = await batch_spec.engine.call("operation_get", {"key": ""})
        self._answered_at = now()
        self._prior = Prior.none(clock["now"])
        lock_detail = batch_spec.lock_detail(self._grant.name)

        @cache  # most operations of a batch begin with the same entries
        def first_entries(
            fingerprint: str | None, version: str | None, bucket: str | None, parts: str | None
        ) -> list[EncodedEntry]:
            claim = batch_spec.claim_entries(fingerprint, version, bucket, parts)
            entries = [("lock_acquired", lock_detail), *claim, ("effect_started", None)]
            return [
                encode_entry(number, kind, 1, fence, self._prior.now, detail)
                for number, (kind, detail) in enumerate(entries, 1)
            ]

        claims = []
        for digest, spec in self._specs.items():
            key = spec.key
            entries = first_entries(spec.fingerprint, key.version, key.bucket, key._parts_digest)
            last_hash, text = link_entries(hash_prefix(digest), "", entries)
            self._claimed[digest] = pointer = f"{len(entries)}:{last_hash}"
            claims.append((
                digest, pointer, text, key.label, spec.fingerprint, key.pipeline, key.task, key.dataset,
                key.operation, key.checksum, key.params_hash,
            ))  # fmt: skip
        parameters = {"rollback": batch_spec.rollback_name, "lock": lock, "fence": fence}
        claims.sort()  # in the order of keys: two batches would deadlock otherwise
        rows = await self._call("operation_claim_many", parameters, CLAIM_COLUMNS, claims)
        if rows and rows[0]["state"] == "busy":
            raise BatchBusy
        others = {row["key"]: Prior.from_row(row) for row in rows}
        for digest in others:
            del self._claimed[digest]
        return others

    async def run(self, function: Function) -> dict[str, Outcome[Any]]:
        """Call the function for those that were claimed, and record their ends, also when it is interrupted."""
        is_plain = op_parameter(function) is None and self._attempt.spec.meter is None
        try:
            self._attempt.enter()
            for digest in self._claimed:
                self._grant.check()  # LeaseLost: another process may be calling it
                self._outcomes[digest] = await self._execute(digest, function, is_plain)
                if digest in self._telemetry:
                    self._telemetry[digest].attempt_left()
        except BaseException as error:
            self._attempt.leave()
            await self._finish_interrupted()
            for digest, run_telemetry in self._telemetry.items():
                run_telemetry.ended(self._outcomes.get(digest, error))
            raise
        self._attempt.leave()
        try:
            await self._finish()
        except BaseException as error:
            for run_telemetry in self._telemetry.values():
                run_telemetry.ended(error)
            raise
        for digest, run_telemetry in self._telemetry.items():
            run_telemetry.ended(self._outcomes[digest])
        return self._outcomes

    async def _execute(self, digest: str, function: Function, is_plain: bool) -> Outcome[Any]:
        """``is_plain``: the function does not take ``op``, and its energy is not measured."""
        op, item, spec = self._op(digest), self._items[digest], self._attempt.spec
        if telemetry.listeners:
            self._telemetry[digest] = new_run_telemetry(self._specs[digest])
            self._telemetry[digest].attempt_begun(op, NO_PRIOR, spec.terms.on_partial)
        try:
            if is_plain:
                value = await maybe_await(function(item))
            elif spec.meter is None:
                value = await call_with_op(function, op, item)
            else:
                value = await call_metered(spec.meter, function, op, item)
            if spec.lineage.contract is not None or spec.checks.after:
                await self._attempt.check_postconditions(op)
            if not is_plain:
                await op._close()
        except Exception as error:
            await op._close()
            record = error_record(error, remembered=self._attempt.is_remembered(error))
            op._add_entry("failure", failure_detail(record))
            self._ends[digest] = ("failure", None, None, json.dumps(record), "1", "1", None)
            return Outcome("failed", False, 1, error=error)
        try:
            result = encode_result(value)
        except ValueError as error:  # the effect is there, and must not be repeated because of its result
            record = error_record(error, where="result")
            self._ends[digest] = ("partial", None, None, json.dumps(record), "0", "1", None)
            return Outcome("failed", False, 1, error=error)
        keep = spec.terms.keep
        op._add_entry("success", None if keep is None else {"keep": keep}, payload_hash=result["result_hash"])
        self._ends[digest] = ("success", *result.values(), None, "0", "1", op._outbox_json())
        return Outcome("success", False, 1, value=value)

    def _op(self, digest: str) -> AsyncOp:
        chain = self._chains[digest] = Chain(digest, self._claimed[digest])
        op = AsyncOp(
            self._specs[digest].key, self._prior, self._answered_at, attempt=1, fence=self._grant.fence, chain=chain,
            save=self._save, grants=(self._grant,),
        )  # fmt: skip
        op._has_begun = True
        return op

    async def _finish_interrupted(self) -> None:
        """Record the ends of those that were called, and free those that were not."""
        why = "it was never called"
        error = json.dumps({"type": "Interrupted", "message": why})
        for digest in [digest for digest in self._claimed if digest not in self._chains]:
            op = self._op(digest)
            op._add_entry("rollback", {"attempt": op.attempt, "why": why})
            self._ends[digest] = ("undone", None, None, error, "0", "0", None)
        try:
            await self._finish()
        except HoldfastError as problem:
            log.event(
                "operation.unrecorded", WARNING,
                "the ends of %(count)d operations of a batch could not be recorded: %(error)s",
                count=len(self._ends), error=str(problem),
            )  # fmt: skip

    async def _finish(self) -> None:
        held = now() - self._answered_at  # the same for all: they are recorded together

        @cache
        def release_entry(number: int) -> EncodedEntry:
            detail = f'{{"held":{held:.6f}}}'
            return encode_entry(number, "lock_released", 1, self._grant.fence, self._prior.now + held, detail)

        rows = []
        for digest, end in self._ends.items():
            chain = self._chains[digest]
            expected, pointer, number, entries = chain.pending(release_entry(chain.next_number))
            rows.append((digest, expected, pointer, str(number), entries, *end))
        keep = self._attempt.spec.terms.keep
        if rows and await self._call("operation_finish_many", {"keep": keep}, FINISH_COLUMNS, rows):
            raise self._fenced_out()

    async def _save(self, op: AsyncOp) -> None:
        """Write the checkpoint of one operation at once."""
        await AsyncLeasedAttempt.under(self._specs[op.key.digest], self._grant).save(op)

    async def _call(self, statement: str, parameters: Row, columns: Sequence[str], rows: list[Any]) -> list[Row]:
        """FencedOut when the lease is lost. The rows are JSON for SQLite, and one text a column for PostgreSQL."""
        engine, grant = self._attempt.spec.engine, self._grant
        if engine.database.dialect == "sqlite":
            data: Row = {"rows": json.dumps(rows)}
        else:
            data = dict(zip(columns, map(_join_column, zip(*rows, strict=True)), strict=True))
        try:
            answer = await engine.call(statement, {**parameters, **data, "owner": grant.name, "token": grant.token})
        except Refused as error:
            if (denied := self._attempt.refusal_of(error)) is not None:
                raise denied from error
            if error.sqlstate != driver_errors.SQLSTATE:
                raise
            raise self._fenced_out() from error
        if answer and answer[0]["state"] == "fenced":
            raise self._fenced_out()
        return answer

    def _fenced_out(self) -> HoldfastError:
        return fenced_out(f"a batch of {len(self._specs)} operations")


def _join_column(values: Sequence[Any]) -> str:
    """The values in one text, where an empty part is None. No value is empty or contains a control character: names
    cannot, and the rest is JSON or hexadecimal."""
    if None not in values:
        return "\x1f".join(values)
    return "\x1f".join([value or "" for value in values]) if any(values) else ""
