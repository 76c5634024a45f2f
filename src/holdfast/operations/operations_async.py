"""``client.operations``: the operations of a database and their log; many at once; recovery, rollback, completion and
reset.

Reading, replaying, verifying and archiving the log never call a function of the user, and never change the outcome of
an operation.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, overload

from holdfast.canonical import digest
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.doctor import operations as doctor_operations
from holdfast.doctor.findings import Examination
from holdfast.errors import HoldfastError, PolicyDenied
from holdfast.governance.policies_async import AsyncPolicies
from holdfast.keys import OperationKey, PlainKey, as_key
from holdfast.names import OPERATION, Unset, check_limit, check_max_bytes, check_name, check_said, check_seconds
from holdfast.operations.archive import archive_line, archived_entry, parse_archive
from holdfast.operations.attempt_async import ALL_OWNERS, fetch_entries, has_lost_owner
from holdfast.operations.batch_async import AsyncBatch
from holdfast.operations.batch_terms import BatchArguments, Progress, check_batch
from holdfast.operations.decide import StoredKey, error_record, format_error, in_progress
from holdfast.operations.lineage_terms import NO_LINEAGE, Lineage
from holdfast.operations.log import (
    LogCursor,
    LogEntry,
    LoggedOperation,
    LogPage,
    LogProblem,
    LogVerifier,
    OperationState,
    Verification,
    check_pointer,
    dump_entries,
    fold,
    hash_in_pointer,
    key_prefix,
    parse_operations,
    parse_page,
    run_id,
    unknown_pointer,
    verify_operation,
)
from holdfast.operations.operation_async import AsyncOperation, SpecBuilder
from holdfast.operations.outcome import OperationRecord, Outcome, RecoveryRecord, policy_fields
from holdfast.operations.recovery_async import AsyncRecovery
from holdfast.operations.review_record import ReviewRecord
from holdfast.operations.spec_async import AsyncOperationSpec, encode_result
from holdfast.operations.terms import (
    NO_CHECKS,
    Checks,
    Function,
    OnPartial,
    OperationOptions,
    OperationTerms,
    Retry,
    WhenLocked,
    check_group,
)
from holdfast.runtime import telemetry
from holdfast.runtime.concurrency_async import AsyncCancelScope, check_callable, maybe_await
from holdfast.runtime.identity import this_process
from holdfast.runtime.log import ERROR, WARNING, logger

if TYPE_CHECKING:
    from holdfast.governance.policy import Moment
    from holdfast.operations.energy import Meter

log = logger("holdfast.operation")

MAX_LIMIT = 10_000
PAGE = 200
"""Operations that are read at a time."""
LATEST = 1000
"""Operations whose chains ``health`` verifies. ``verify`` does it for all."""
COUNT_LIMIT = 100_000
"""Rows that ``health`` counts at most."""
RECOVERY_TERMS = OperationTerms.check(
    when_locked="fail", timeout=0.0, ttl=30.0, keep=None, on_partial="refuse", actor=None, justification=None,
    retry=None, options=None, undoes=False, probes=False,
)  # fmt: skip
_STATUSES = ("success", "failure", "partial", "undone", "running")
_PREFIX = re.compile("[0-9a-f]{4,64}")
_LINEAGE = {"inputs", "outputs", "contract"}
"""The fields of a claim that declares lineage."""

# ``list`` is a method inside of the class.
Rows = list[dict[str, Any]]
Entries = list[LogEntry]
T = TypeVar("T")
Outcomes = list[Outcome[T]]
Records = list[OperationRecord]
States = list[OperationState]
Recoveries = list[RecoveryRecord]


class Handlers(NamedTuple):
    """The registered functions that recover an operation whose owner died."""

    rollback: Function | None
    verify: Function | None


@dataclass(frozen=True, slots=True)
class Archived:
    """The result of ``archive``: how many operations were archived, and why others were not, by key."""

    operations: int
    left: Mapping[str, str]


class AsyncOperations:
    """``client.operations``. A single operation to be run is ``client.operation(key)``."""

    def __init__(self, engine: AsyncEngine, policies: AsyncPolicies | None = None, energy: Meter | None = None) -> None:
        self._engine, self._policies, self._meter = engine, policies or AsyncPolicies(engine), energy
        self._handlers: dict[str, Handlers] = {}

    def register(self, name: str, *, rollback: Function | None = None, verify: Function | None = None) -> None:
        """Name the functions that undo an operation, or say whether it is done: ``client.operation(key,
        rollback=name)`` uses them, and ``recover()`` finds them for an operation whose owner died."""
        check_name(name)
        if rollback is None and verify is None:
            raise ValueError(f"nothing to register as {name!r}: give rollback= or verify=")
        for function, what in ((rollback, "rollback"), (verify, "verify")):
            if function is not None:
                check_callable(function, what)
        self._handlers[name] = Handlers(rollback, verify)

    # Records

    async def get(self, key: OperationKey | str) -> OperationRecord | None:
        """The record of an operation, or None when it was never begun."""
        records = await self._fetch("operation_list", {"key": as_key(key).digest, "limit": 1})
        return records[0] if records else None

    async def list(
        self, *, status: str | None = None, dataset: str | None = None, limit: int = 100, max_bytes: int | None = None
    ) -> Records:
        """The latest first. ``status``: success | failure | running | partial (its owner is dead) | undone.
        ``max_bytes``: the list ends before the record whose texts would make it larger, unless that is its first one.

        If operations are running, this looks for their owners, as ``get`` and ``match`` do, and records when one is
        dead, which takes half a second. A read-only client does not look: to it an operation is running until another
        client has looked, or the lease expires."""
        if status is not None and status not in _STATUSES:
            raise ValueError(f"status must be one of {', '.join(_STATUSES)}, not {status!r}")
        check_limit(limit)
        is_unfinished = status in ("partial", "running")  # one status in the log: whether the owner lives decides
        parameters = {
            "status": "partial" if is_unfinished else status,
            "dataset": None if dataset is None else check_name(dataset, "dataset"),
            "limit": MAX_LIMIT if is_unfinished else limit,
            "max_bytes": check_max_bytes(max_bytes),
        }
        records = await self._fetch("operation_list", parameters)
        return [record for record in records if status in (None, record.status)][:limit]

    async def find(self, key: OperationKey | str) -> OperationRecord:
        """The record by key, or by a WAL pointer (``number:hash``) that the log has or had for it: then the attempt of
        that pointer must be the latest, as a rollback expects. LookupError says why there is none."""
        if (pointer_hash := hash_in_pointer(key)) is None:
            record = await self.get(key)
            if record is None:
                raise LookupError(f"there is no operation {as_key(key).label!r}")
            return record
        rows = await self._engine.call("wal_find", {"hash": pointer_hash})
        record = await self.get(rows[0]["key"]) if rows else None
        if record is None:
            raise unknown_pointer(str(key))
        check_pointer(record.label, await fetch_entries(self._engine, record.key), str(key))
        return record

    async def find_run(self, run: str) -> OperationRecord:
        """The record of the operation that a run in lineage is an attempt of, the last one or one before: ``run`` of an
        event, the runId in OpenLineage. LookupError when there is none."""
        for record in await self.match(key_prefix(run), limit=MAX_LIMIT):
            if any(run_id(record.key, attempt) == run for attempt in range(record.attempt + 1)):
                return record
        raise LookupError(f"no operation has the run {run}: it is of another database")

    async def match(self, prefix: str, *, limit: int = 10) -> Records:
        """The operations whose digest begins with these 4 to 64 hexadecimal digits, in the order of their digests."""
        parameters = {"prefix": _check_prefix(prefix), "limit": check_limit(limit)}
        return await self._fetch("operation_match", parameters)

    async def _fetch(self, statement: str, parameters: dict[str, Any]) -> Records:
        rows = await self._engine.call(statement, parameters)
        running = [row for row in rows if row["alive"]]
        if len(running) == 1:
            names = {"key": running[0]["key"], "lease": running[0]["owner"], "dataset": None}
        else:
            names = ALL_OWNERS
        if running and await has_lost_owner(self._engine, names):
            rows = await self._engine.call(statement, parameters)
        return [OperationRecord._of(row) for row in rows]

    # Many at once

    @overload
    async def run_many(
        self, items: Iterable[Any], function: Callable[..., Awaitable[T]], **arguments: Unpack[BatchArguments]
    ) -> Outcomes[T]: ...

    @overload
    async def run_many(
        self, items: Iterable[Any], function: Callable[..., T], **arguments: Unpack[BatchArguments]
    ) -> Outcomes[T]: ...

    async def run_many(
        self,
        items: Iterable[Any],
        function: Callable[..., Awaitable[T] | T],
        *,
        key: Callable[[Any], OperationKey | str] | None = None,
        payload: Callable[[Any], Any] | None = None,
        rollback: Function | str | None = None,
        verify: Function | None = None,
        on_partial: OnPartial | None = None,
        when_locked: WhenLocked = "wait",
        timeout: float | Unset | None = Unset.UNSET,
        ttl: float = 30.0,
        keep: float | None = None,
        actor: str | None = None,
        justification: str | None = None,
        retry: Retry | None = None,
        checks: Checks | None = None,
        lineage: Lineage | None = None,
        options: OperationOptions | None = None,
        batch: int = 500,
        progress: Progress | None = None,
    ) -> Outcomes[T]:
        """Run ``function(item)`` for each item, like ``client.operation(key(item)).run(function, item)`` with an effect
        outside of the database. Without ``key``, the items are the keys. Returns the outcomes in the order of the
        items; the error of a failed one is in its outcome. Only ``when_locked`` is about all of them: the lock of their
        dataset and operation, if they have one, is held until the last is done, and OperationInProgress is raised when
        it cannot be had.

        One statement claims ``batch`` operations, and one records their ends when all are done. So a process that dies
        leaves a whole batch half done; one that is interrupted, only the operation that was running. Operations that
        another owner is running are waited for after the others, as ``when_locked`` says. ``progress(done, total)`` is
        called after each batch. For effects in a transaction, open one and run each operation with ``tx``. Operations
        under a policy are run one by one. The batch runs under one lease, whose loss is raised before the next function
        is called, and shown by ``op.lost``. Its claim records that its effects may start, and each function is called
        once. So ValueError for ``Checks(before=…)``, ``OperationOptions(marks_effect=True)`` and
        ``Retry(in_this_run=…)``.
        """
        all_items = list(items)
        check_callable(function, "function")
        for callback, what in ((key, "key"), (payload, "payload"), (progress, "progress")):
            if callback is not None:
                check_callable(callback, what)
        if type(batch) is not int or not 1 <= batch <= MAX_LIMIT:
            raise ValueError(f"batch must be a whole number from 1 to {MAX_LIMIT}, not {batch!r:.80}")
        build_spec = self._spec_builder(
            rollback=rollback, verify=verify, checks=checks, lineage=lineage, in_batch=True,
            when_locked=when_locked, timeout=timeout, ttl=ttl, keep=keep, on_partial=on_partial, actor=actor,
            justification=justification, retry=retry, options=options,
        )  # fmt: skip
        payloads = [Unset.UNSET if payload is None else payload(item) for item in all_items]
        specs = [
            build_spec(
                as_key(item if key is None else key(item)),
                None if payload is None else digest(item_payload, "payload"),
                item_payload,
            )
            for item, item_payload in zip(all_items, payloads, strict=True)
        ]
        return await AsyncBatch(specs, all_items, batch).run(function, progress) if specs else []

    # Recovery, rollback, completion, reset

    async def recover(self, *, limit: int = MAX_LIMIT) -> Recoveries:
        """Finish or roll back the operations of dead owners whose functions are registered: for the start of a process.

        Returns what was done to each, and why; one that has the status partial was left and needs a decision. That is
        so when nothing is registered for it, when its function fails, when another process has its lock, and when the
        policy lets only certain actors roll it back, because there is no actor here.
        """
        recoveries: Recoveries = []
        check_limit(limit)
        await self._policies._refresh()
        for record in await self.list(status="partial", limit=limit):
            recovery = await self._recover(record)
            if recovery is None:
                continue
            recoveries.append(recovery)
            if recovery.status == "partial":
                await self._publish("operation.partial", record, fate="left")
            else:
                await self._publish("operation.partial", record, fate="recovered")
                await self._publish("operation.rewritten", record, reason="recovered")
        return recoveries

    async def _recover(self, record: OperationRecord) -> RecoveryRecord | None:
        """None when there is nothing to recover any more."""
        left = partial(RecoveryRecord, record.key, record.label, "partial")
        if record.effect_started and record.rollback is None:
            return left("nothing is registered to undo it: it was run without the name of a rollback")
        if record.effect_started and record.rollback not in self._handlers:
            return left(f"its rollback {record.rollback!r} is not registered here")
        try:
            recovery = await self._recovery(record)
            return await recovery.recover(partial(self._permit, "reset", **policy_fields(record)))
        except Exception as error:
            if isinstance(error, PolicyDenied):
                level, text = WARNING, "operation %(operation)r is not rolled back by itself: %(error)s"
            else:
                level, text = ERROR, "operation %(operation)r cannot be recovered"
            log.event(
                "operation.partial", level, text, exc_info=level == ERROR, operation=record.label, fate="left",
                error=str(error),
            )  # fmt: skip
            return left(str(error) if level == WARNING else f"it failed: {format_error(error_record(error))}")

    async def rollback(self, key: OperationKey | str, *, actor: str, reason: str) -> None:
        """Undo an operation with its registered function, whatever its status; then it may be run anew. ``key`` may be
        a WAL pointer, see ``find``. LookupError when there is nothing to undo any more."""
        check_said(actor, "actor")
        check_said(reason, "reason", 1000)
        record = await self.find(key)
        await self._policies._refresh()
        self._permit("reset", actor=actor, justification=reason, **policy_fields(record))
        expected = None if hash_in_pointer(key) is None else record.pointer
        await (await self._recovery(record)).roll_back(actor, reason, expected)
        await self._publish("operation.rewritten", record, reason="rollback")

    async def complete(self, key: OperationKey | str, result: Any = None, *, actor: str, reason: str) -> None:
        """Record that an operation did happen, with its result, when its owner died or its error said nothing of its
        effect: for an operator who has found out. Later callers get that result, and its reviews are closed.

        OperationInProgress while it is running. LookupError when it was never begun, has succeeded already, or left no
        effect. ValueError when the result cannot be stored."""
        check_said(actor, "actor")
        check_said(reason, "reason", 1000)
        encoded = encode_result(result)
        record = await self.get(key)
        if record is None:
            raise LookupError(f"there is no operation {as_key(key).label!r}")
        await self._policies._refresh()
        self._permit("reset", actor=actor, justification=reason, **policy_fields(record))
        await (await self._recovery(record)).complete(encoded, actor, reason)
        await self._publish("operation.rewritten", record, reason="complete")

    async def reset(self, key: OperationKey | str, *, actor: str, reason: str) -> None:
        """Let an operation be run as if it were new: its attempts, result and payload are forgotten, its reviews are
        closed, and its history stays, with who reset it and why. OperationInProgress while it is running. One that was
        never begun can be reset when it was refused in a review."""
        check_said(actor, "actor")
        check_said(reason, "reason", 1000)
        record = await self.get(key)
        subject: OperationRecord | ReviewRecord | None = record or await self._fetch_review(as_key(key).digest)
        if subject is None:
            raise LookupError(f"there is no operation {as_key(key).label!r}")
        await self._policies._refresh()
        self._permit("reset", actor=actor, justification=reason, **policy_fields(subject))
        if record is not None:
            await (await self._recovery(record)).reset(actor, reason)
            await self._publish("operation.rewritten", record, reason="reset")
            return
        parameters = {"key": subject.key, "label": subject.label, "status": "failure", "actor": actor, "reason": reason}
        [row] = await self._engine.call("operation_correct", parameters)
        if row["state"] != "done":
            raise in_progress(as_key(key))

    # The log

    async def history(self, key: OperationKey | str) -> Entries:
        """Every entry that the log has of an operation, in order."""
        return [entry async for logged in self._fetch_operations(_digest(key), None) for entry in logged.entries]

    async def replay(self, key: OperationKey | str | None = None, *, since: datetime | None = None) -> States:
        """The state of an operation, or of all that were written ``since``, with results, folded from their entries, in
        the order of their keys. Nothing is executed."""
        states = []
        async for logged in self._fetch_operations(_digest(key), _since(since)):
            state = logged.state()
            self._permit("replay", key=logged.operation, label=logged.label, attempt=state.attempt, **logged.labels)
            states.append(state)
        return states

    async def verify(
        self, key: OperationKey | str | None = None, *, since: datetime | None = None, archives: Iterable[str] = ()
    ) -> Verification:
        """Verify the chain of an operation, or of all that were written ``since``: finds changed, missing, added and
        moved entries, and locks that were never released. An operation of which nothing is left cannot be found.
        ``archives``: lines that ``archive`` wrote, to verify archived entries together with those in the log."""
        archived, verifier, only = parse_archive(archives), LogVerifier(), _digest(key)
        missing = {
            operation: entries[-1].number
            for operation, entries in archived.items()
            if since is None and only in (None, operation)
        }
        async for logged in self._fetch_operations(only, _since(since), archived):
            verifier.add(logged)
            missing.pop(logged.operation, None)
        message = "it is in the archive, and the log does not know it"
        return verifier.verification(LogProblem("missing", *each, message) for each in missing.items())

    async def read(self, after: str | None = None, *, limit: int = 500, max_bytes: int | None = None) -> LogPage:
        """Entries of all operations, ``after`` the cursor of the page before or from the beginning, in an order that is
        stable although transactions commit out of order: entries that an open transaction may still precede are held
        back. CursorExpired after a restore that lost the page's last entry: read from the beginning. ``max_bytes``: the
        page ends before the entries that would make it larger, unless they are its first ones."""
        cursor = LogCursor.parse(after)
        parameters = {"limit": check_limit(limit), "max_bytes": check_max_bytes(max_bytes)}
        rows = await self._engine.call("wal_read", {**cursor._asdict(), **parameters})
        return parse_page(cursor, rows)

    async def archive(
        self, before: datetime, write: Callable[[Sequence[str]], object], *, actor: str | None = None,
        reason: str | None = None,
    ) -> Archived:  # fmt: skip
        """Move the chains of operations that ended before then out of the log, except for one entry each, which proves
        the others. ``write(lines)`` must have stored them durably when it returns; it is called before anything is
        deleted. The audit has an entry for each, with ``actor``, by default this process, and ``reason``.

        Unfinished operations stay, and so do those with a broken chain or unpublished lineage: a relay has not come to
        it, or it was declared (``lineage=``, ``op.emit``) and no relay has ever run.
        """
        check_callable(write, "write")
        author = _author(actor, reason, f"archived: it ended before {before}")
        limit, done = int(_timestamp(before, "before") * 1_000_000), 0
        left: dict[str, str] = {}
        [health] = await self._engine.call("operation_health", {"stale": 0.0, "enough": 1})
        async for page in self._fetch_pages(None, None):
            ready = []
            for logged in parse_operations(page):
                reason = _reason_to_stay(logged, limit, relayed=bool(health["relayed"]))
                if reason is None:
                    ready.append(logged)
                elif reason:
                    left[logged.operation] = reason
            if ready:
                await maybe_await(write([archive_line(logged.label, logged.entries) for logged in ready]))
            for logged in ready:
                state = await self._delete_archived(logged, author)
                if state == "archived":
                    done += 1
                else:
                    left[logged.operation] = (
                        "its lineage is not published" if state == "unpublished" else "it has gone on"
                    )
        return Archived(done, left)

    async def expire(self, *, actor: str | None = None, reason: str | None = None) -> int:
        """Delete the results whose time is over, and return how many. Their entries and hashes stay. The audit has an
        entry for it, with ``actor``, by default this process, and ``reason``."""
        author = _author(actor, reason, "their time is over")
        total, deleted = 0, PAGE
        while deleted == PAGE:
            [row] = await self._engine.call("operation_expire", {"limit": PAGE, **author})
            deleted = row["gone"]
            total += deleted
        return total

    async def health(self, *, stale: float = 3600.0) -> Examination:
        """Examine the log: indexes, operations left half done for longer than ``stale`` seconds, growth, unpublished
        lineage, and the chains of the thousand operations that were written last. Takes bounded time."""
        limit = check_seconds(stale, "stale", 0, 10 * 365 * 86400.0)
        [health] = await self._engine.call("operation_health", {"stale": limit, "enough": COUNT_LIMIT})
        indexes = await self._engine.call("operation_indexes", {})
        verifier = LogVerifier()
        for logged in parse_operations(await self._engine.call("wal_latest", {"limit": LATEST})):
            verifier.add(logged)
        verification = verifier.verification()
        chains = {
            "operations": verification.operations,
            "entries": verification.entries,
            "broken": [f"{each.operation[:12]}… entry {each.number}: {each.told}" for each in verification.broken],
            "unpaired": len(verification.problems) - len(verification.broken),
        }
        facts = {
            "operation_health": [{**health, "stale": limit}],
            "operation_indexes": indexes,
            "relays": await self._engine.call("relay_list", {}),
            "chains": [chains],
        }
        database = self._engine.database
        engine = "postgresql" if database.dialect == "postgres" else "sqlite"
        return Examination(str(database), database.schema, engine, doctor_operations.examine(facts))

    # For client.operation

    def _operation(self, key: Any, payload: Any, tx: Any, **arguments: Any) -> AsyncOperation:
        build_spec = self._spec_builder(has_tx=tx is not None, **arguments)
        fingerprint = None if payload is Unset.UNSET else digest(payload, "payload")
        return AsyncOperation(build_spec, key if callable(key) else as_key(key), fingerprint, tx, payload)

    def _spec_builder(
        self, *, rollback: Function | str | None, verify: Function | None, checks: Checks | None,
        lineage: Lineage | None, in_batch: bool = False, **terms: Any,
    ) -> SpecBuilder:  # fmt: skip
        """Check the arguments of an operation. Returns a function that builds its spec, because key and payload are
        known only when it is run. ``terms``: see OperationTerms. TypeError or ValueError when an argument is wrong."""
        policies = self._policies
        undo, probe, name = self._resolve_handlers(rollback, verify)
        conditions = check_group(checks, NO_CHECKS, "checks")
        datasets = check_group(lineage, NO_LINEAGE, "lineage", "holdfast.lineage")
        checked = _check_terms({**terms, "undoes": undo is not None, "probes": probe is not None})
        contract = datasets.contract
        for condition in (*conditions.before, *conditions.after):
            check_callable(condition, "a condition")
        if contract is not None and contract.check is not None:
            check_callable(contract.check, "the check of a contract")
        if checked.on_lost == "cancel" and not AsyncCancelScope.cancels:
            raise ValueError(
                "on_lost='cancel' is for asyncio: a thread cannot be cancelled. Use 'flag', 'exit' or a callable."
            )
        if callable(checked.on_lost):
            check_callable(checked.on_lost, "on_lost")
        if in_batch:
            check_batch(checked, conditions)

        def build_spec(key: OperationKey | PlainKey, fingerprint: str | None, payload: object) -> AsyncOperationSpec:
            spec = AsyncOperationSpec(
                self._engine, key, fingerprint, checked, undo, name, probe, conditions, lineage=datasets,
                meter=self._meter, policies=policies, policy_version=policies._version, payload=payload,
            )  # fmt: skip
            return spec if policies._rules is None and not checked.options.sovereign else spec.govern()

        return build_spec

    def _resolve_handlers(
        self, rollback: Function | str | None, verify: Function | None
    ) -> tuple[Function | None, Function | None, str | None]:
        """Rollback, probe, and the name under which the rollback is registered."""
        if verify is not None:
            check_callable(verify, "verify")
        if rollback is None:
            return None, verify, None
        if isinstance(rollback, str):
            if rollback not in self._handlers:
                names = ", ".join(sorted(self._handlers)) or "none"
                raise ValueError(f"no rollback is registered as {rollback!r}; there are: {names}")
            handlers = self._handlers[rollback]
            return handlers.rollback, verify or handlers.verify, rollback
        check_callable(rollback, "rollback")
        name = next((name for name, handlers in self._handlers.items() if handlers.rollback == rollback), None)
        return rollback, verify, name

    # Internals

    def _permit(self, moment: Moment, **fields: Any) -> None:
        """PolicyDenied unless the policy allows it."""
        if self._policies._rules is not None:
            self._policies._rules.permit(moment, **fields)

    async def _fetch_review(self, key: str) -> ReviewRecord | None:
        rows = await self._engine.call("review_list", {"status": None, "id": None, "key": key, "limit": 1})
        return ReviewRecord._of(rows[0]) if rows else None

    async def _recovery(self, record: OperationRecord) -> AsyncRecovery:
        handlers = self._handlers.get(record.rollback or "", Handlers(None, None))
        key = StoredKey(record.key, record.label, dataset=record.dataset)
        lease = record.owner or f"{OPERATION}{record.key[:32]}"
        return AsyncRecovery(
            AsyncOperationSpec(
                self._engine, key, None, RECOVERY_TERMS, handlers.rollback, record.rollback, handlers.verify,
                lease=lease, sovereign=await self._is_sovereign(record),
            )
        )  # fmt: skip

    async def _is_sovereign(self, record: OperationRecord) -> bool:
        """By the policy as it is now, or by the entries; true also when those cannot be parsed."""
        rules = self._policies._rules
        demands = None if rules is None else rules.demands(record.dataset)
        if demands is not None and demands.sovereign:
            return True
        try:
            states = fold(await fetch_entries(self._engine, record.key))
        except ValueError:
            return True
        return any(state.sovereignty for state in states.values())

    async def _publish(self, event: str, record: OperationRecord, **fields: str) -> None:
        if telemetry.listeners:
            from holdfast.operations.run_telemetry import labels

            sovereign: bool | None = None  # unknown when the database does not answer
            with suppress(HoldfastError):
                sovereign = await self._is_sovereign(record)
            telemetry.emit(event, **labels(record, sovereign=sovereign), **fields)

    async def _delete_archived(self, logged: LoggedOperation, author: Row) -> str:
        """Replace the chain by its ``archived`` entry: "archived", "unpublished" or "changed"."""
        last = logged.entries[-1]
        entry = archived_entry(logged.entries, last.at)
        parameters = {
            "key": logged.operation,
            "expected": last.pointer,
            "pointer": entry.pointer,
            "number": entry.number,
            "entries": dump_entries([entry]),
        }
        [row] = await self._engine.call("wal_archive", {**parameters, **author})
        state: str = row["state"]
        return state

    async def _fetch_operations(
        self, key: str | None, since: float | None, archived: Mapping[str, Sequence[LogEntry]] | None = None
    ) -> AsyncIterator[LoggedOperation]:
        async for page in self._fetch_pages(key, since):
            for logged in parse_operations(page, archived):
                yield logged

    async def _fetch_pages(self, key: str | None, since: float | None) -> AsyncIterator[Rows]:
        after = None
        while True:
            rows = await self._engine.call("wal_chains", {"key": key, "since": since, "after": after, "limit": PAGE})
            if rows:
                yield rows
            if key is not None or len({row["key"] for row in rows}) < PAGE:
                return
            after = rows[-1]["key"]


_LATEST_TERMS: list[tuple[dict[str, Any], OperationTerms]] = []
"""The arguments that were checked last, and the result."""


def _check_terms(arguments: dict[str, Any]) -> OperationTerms:
    """hot: consecutive operations mostly have the same arguments, which then are the same objects (bench operation)."""
    for latest, terms in _LATEST_TERMS:
        if all(map(is_, latest.values(), arguments.values())) and list(latest) == list(arguments):
            return terms
    terms = OperationTerms.check(**arguments)
    _LATEST_TERMS[:] = [(arguments, terms)]
    return terms


def _reason_to_stay(logged: LoggedOperation, limit: int, *, relayed: bool) -> str | None:
    """Why an operation is not archived; empty when that needs no report; None when it can be."""
    problems = [problem.told for problem in verify_operation(logged) if problem.broken]
    if problems:
        return f"its chain is broken: {problems[0]}"
    is_archived = len(logged.entries) == 1 and logged.entries[0].kind == "archived"
    if logged.status == "partial" or is_archived or logged.entries[-1].at >= limit:
        return ""
    if not relayed and any(_LINEAGE & entry.fields.keys() for entry in logged.entries if entry.kind == "claimed"):
        return "its lineage is not published, and no relay has ever run: run one (holdfast relay run)"
    return None


def _digest(key: OperationKey | str | None) -> str | None:
    return None if key is None else as_key(key).digest


def _check_prefix(value: object) -> str:
    if not isinstance(value, str) or not _PREFIX.fullmatch(value):
        raise ValueError(f"prefix must be 4 to 64 hexadecimal digits in lower case, not {value!r:.80}")
    return value


def _since(value: object) -> float | None:
    return None if value is None else _timestamp(value, "since")


def _author(actor: str | None, reason: str | None, default_reason: str) -> Row:
    """Who and why, for the audit. A program that does it from a timer names neither."""
    return {
        "actor": this_process()["label"] if actor is None else check_said(actor, "actor"),
        "reason": default_reason if reason is None else check_said(reason, "reason", limit=1000),
    }


def _timestamp(value: object, what: str) -> float:
    """Seconds since 1970."""
    if not isinstance(value, datetime):
        raise TypeError(f"{what} must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise ValueError(f"{what} must have a time zone, such as datetime.now(UTC), not {value!r}")
    return value.timestamp()
