"""The operations of a database: what became of them, and mending what dead owners left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.canonical import digest
from holdfast.database.engine_async import AsyncEngine
from holdfast.errors import HoldfastError, PolicyDenied
from holdfast.keys import OperationKey, as_key
from holdfast.names import Unset, check_limit, check_name, check_said
from holdfast.operations import pointer
from holdfast.operations.attempt_async import read_entries
from holdfast.operations.batch_async import AsyncBatch, Progress
from holdfast.operations.decide import LEASE, StoredKey
from holdfast.operations.lineage_terms import Contract, Lineage
from holdfast.operations.mending_async import AsyncMending
from holdfast.operations.operation_async import AsyncOperation, Planned
from holdfast.operations.operation_log_async import AsyncOperationLog
from holdfast.operations.outcome import OperationRecord, Outcome, known
from holdfast.operations.plan_async import AsyncPlan
from holdfast.operations.replay import fold
from holdfast.operations.review_record import ReviewRecord
from holdfast.operations.terms import Function, OnPartial, OperationTerms, WhenLocked
from holdfast.runtime import telemetry
from holdfast.runtime.concurrency_async import check_callable
from holdfast.runtime.log import logger

if TYPE_CHECKING:
    from holdfast.governance.policy import Policy
    from holdfast.operations.energy import Meter

log = logger("holdfast.operation")

MOST = 10_000
MENDING = OperationTerms.check(
    when_locked="fail", timeout=0.0, ttl=30.0, max_attempts=1, retries=0, on_partial="refuse", remember_errors=(),
    keep=None, reuse=True, marks_effect=False, sovereign=False, actor=None, justification=None, undoes=False,
    probes=False,
)  # fmt: skip
_STATUSES = ("success", "failure", "partial", "running")

Records = list[OperationRecord]
Outcomes = list[Outcome]


class Handlers(NamedTuple):
    """What can be done about an operation whose owner died."""

    rollback: Function | None
    verify: Function | None


class AsyncOperations(AsyncOperationLog):
    """``client.operations``: what became of operations, many at once, and what is done about those that were left
    half done. One to be run is ``client.operation(key)``."""

    def __init__(self, engine: AsyncEngine, rules: Policy | None = None, energy: Meter | None = None) -> None:
        super().__init__(engine, rules)
        self._energy = energy
        self._handlers: dict[str, Handlers] = {}

    def register(self, name: str, *, rollback: Function | None = None, verify: Function | None = None) -> None:
        """Name what undoes an operation, or says whether it is done: ``client.operation(key, rollback=name)`` uses it,
        and ``recover()`` finds it for one whose owner died."""
        check_name(name)
        if rollback is None and verify is None:
            raise ValueError(f"nothing to register as {name!r}: give rollback= or verify=")
        for function, what in ((rollback, "rollback"), (verify, "verify")):
            if function is not None:
                check_callable(function, what)
        self._handlers[name] = Handlers(rollback, verify)

    async def get(self, key: OperationKey | str) -> OperationRecord | None:
        """What became of it, or None when nobody has begun it."""
        rows = await self._engine.call("operation_list", {"key": as_key(key).digest, "most": 1})
        return OperationRecord.of(rows[0]) if rows else None

    async def list(self, *, status: str | None = None, dataset: str | None = None, most: int = 100) -> Records:
        """The latest first. ``status``: success | failure | running | partial (its owner is dead)."""
        if status is not None and status not in _STATUSES:
            raise ValueError(f"status must be one of {', '.join(_STATUSES)}, not {status!r}")
        check_limit(most)
        unfinished = status in ("partial", "running")
        asked = {
            "status": "partial" if unfinished else status,
            "dataset": None if dataset is None else check_name(dataset, "dataset"),
            "most": MOST if unfinished else most,
        }
        found = [OperationRecord.of(row) for row in await self._engine.call("operation_list", asked)]
        return [each for each in found if status in (None, each.status)][:most]

    async def run_many(
        self,
        items: Iterable[Any],
        function: Function,
        *,
        key: Callable[[Any], OperationKey | str] | None = None,
        payload: Callable[[Any], Any] | None = None,
        rollback: Function | str | None = None,
        verify: Function | None = None,
        on_partial: OnPartial | None = None,
        when_locked: WhenLocked = "wait",
        timeout: float | None = 15.0,
        ttl: float = 30.0,
        max_attempts: int = 3,
        remember_errors: Sequence[type[BaseException]] = (),
        keep: float | None = None,
        sovereign: bool = False,
        actor: str | None = None,
        justification: str | None = None,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        contract: Contract | None = None,
        batch: int = 500,
        progress: Progress | None = None,
    ) -> Outcomes:
        """Run ``function(item)`` for each, as ``client.operation(key(item)).run(function, item)`` would, the effect
        being outside; without ``key``, the items are the keys. What came of each, in their order: what one of them
        raises is in its outcome. Only ``when_locked`` is about all: the lock of their dataset and operation, if they
        have one, is held until the last is done, and when that cannot be had, OperationInProgress is raised.

        A statement claims ``batch`` of them, and tells those apart that are done, under way, or another's; a statement
        writes down what came of them when all are done. So a process that dies leaves a whole batch half done; one that
        is interrupted, only the one it was at. Those that somebody else is at are skipped. ``progress(done, total)`` is
        called after each batch. For what has its effect in a transaction, open one and run each with ``tx``. Where a
        policy has to be asked, they are run one by one.
        """
        found = list(items)
        check_callable(function, "function")
        for each, what in ((key, "key"), (payload, "payload"), (progress, "progress")):
            if each is not None:
                check_callable(each, what)
        if type(batch) is not int or not 1 <= batch <= MOST:
            raise ValueError(f"batch must be a whole number from 1 to {MOST}, not {batch!r:.80}")
        terms = {
            "when_locked": when_locked, "timeout": timeout, "ttl": ttl, "max_attempts": max_attempts, "retries": 0,
            "on_partial": on_partial, "remember_errors": remember_errors, "keep": keep, "reuse": True,
            "marks_effect": False, "sovereign": sovereign, "actor": actor, "justification": justification,
        }  # fmt: skip
        plan = self.plan(terms, rollback, verify, (), (), inputs, outputs, contract)
        sent = [Unset.UNSET if payload is None else payload(item) for item in found]
        plans = [
            plan(item if key is None else key(item), None if payload is None else digest(each, "payload"), each)
            for item, each in zip(found, sent, strict=True)
        ]
        return await AsyncBatch(plans, found, batch).run(function, progress) if plans else []

    async def recover(self, *, most: int = MOST) -> dict[str, str]:
        """Finish or roll back what dead owners left, as far as what does it is registered: for the start of a process.

        By key, what was done. One that cannot be mended is logged, and stays; the others are gone on with. So does one
        that the policy lets only some roll back: nobody in particular is at it here.
        """
        done: dict[str, str] = {}
        for record in await self.list(status="partial", most=most):
            if record.effect_started and (record.rollback is None or record.rollback not in self._handlers):
                await self._tell("operation.partial", record, fate="left")
                continue
            try:
                mending = await self._mending(record)
                outcome = await mending.recover(partial(self._permit, "reset", **known(record)))
            except PolicyDenied as error:
                log.warning(
                    "operation %r is not rolled back by itself: %s",
                    record.label,
                    error,
                    extra={"event": "operation.partial", "operation": record.label, "fate": "left"},
                )
                await self._tell("operation.partial", record, fate="left")
                continue
            except Exception:
                log.exception(
                    "operation %r cannot be recovered",
                    record.label,
                    extra={"event": "operation.partial", "operation": record.label, "fate": "left"},
                )
                await self._tell("operation.partial", record, fate="left")
                continue
            if outcome is not None:
                done[record.key] = outcome
                await self._tell("operation.partial", record, fate="recovered")
                await self._tell("operation.rewritten", record, reason="recovered")
        return done

    async def find(self, key: OperationKey | str) -> OperationRecord:
        """By its key, or by a WAL pointer (``number:hash``) that the log has or had for it: then the attempt which that
        is of must stand, as whoever rolls it back expects. LookupError says why there is none."""
        if (hashed := pointer.hash_in(key)) is None:
            record = await self.get(key)
            if record is None:
                raise LookupError(f"there is no operation {as_key(key).label!r}")
            return record
        rows = await self._engine.call("wal_find", {"hash": hashed})
        record = await self.get(rows[0]["key"]) if rows else None
        if record is None:
            raise pointer.unknown(str(key))
        pointer.check_standing(record.label, await read_entries(self._engine, record.key), str(key))
        return record

    async def rollback(self, key: OperationKey | str, *, actor: str, reason: str) -> None:
        """Undo it with the function that is registered for it, whatever became of it; it may be run anew then. ``key``
        may be a WAL pointer, as ``find`` takes it. LookupError when there is nothing to undo, or that was done."""
        check_said(actor, "actor")
        check_said(reason, "reason", 1000)
        record = await self.find(key)
        self._permit_reset(record, actor, reason)
        expected = None if pointer.hash_in(key) is None else record.pointer
        await (await self._mending(record)).roll_back(actor, reason, expected)
        await self._tell("operation.rewritten", record, reason="rollback")

    async def reset(self, key: OperationKey | str, *, actor: str, reason: str) -> None:
        """Let it be run as if it were new: its attempts, its result and its payload are forgotten, what was said in
        reviews is lifted, and its history is kept, with who reset it and why. OperationInProgress while somebody is at
        it. One that nobody has begun can be reset when it was refused in a review."""
        check_said(actor, "actor")
        check_said(reason, "reason", 1000)
        record = await self.get(key)
        subject: OperationRecord | ReviewRecord | None = record or await self._reviewed(as_key(key).digest)
        if subject is None:
            raise LookupError(f"there is no operation {as_key(key).label!r}")
        self._permit_reset(subject, actor, reason)
        if record is not None:
            await (await self._mending(record)).reset(actor, reason)
            await self._tell("operation.rewritten", record, reason="reset")
        await self._engine.call("review_close", {"key": subject.key, "actor": actor, "answer": reason})

    def _permit_reset(self, subject: OperationRecord | ReviewRecord, actor: str, reason: str) -> None:
        self._permit("reset", actor=actor, justification=reason, **known(subject))

    async def _reviewed(self, key: str) -> ReviewRecord | None:
        rows = await self._engine.call("review_list", {"status": None, "id": None, "key": key, "most": 1})
        return ReviewRecord.of(rows[0]) if rows else None

    async def _mending(self, record: OperationRecord) -> AsyncMending:
        handlers = self._handlers.get(record.rollback or "", Handlers(None, None))
        stored = StoredKey(record.key, record.label, dataset=record.dataset)
        terms = MENDING._replace(sovereign=await self._sovereign(record))
        owner = record.owner or f"{LEASE}{record.key[:32]}"
        plan = AsyncPlan(
            self._engine, stored, None, terms, handlers.rollback, record.rollback, handlers.verify, owner=owner
        )
        return AsyncMending(plan)

    def operation(self, plan: Planned, key: Any, tx: Any, payload: Any) -> AsyncOperation:
        """For ``client.operation``, which says what all of it means."""
        fingerprint = None if payload is Unset.UNSET else digest(payload, "payload")
        return AsyncOperation(plan, key if callable(key) else as_key(key), fingerprint, tx, payload)

    def plan(
        self, terms: Mapping[str, Any], rollback: Function | str | None, verify: Function | None,
        preconditions: Sequence[Function], postconditions: Sequence[Function], inputs: Sequence[str],
        outputs: Sequence[str], contract: Contract | None,
    ) -> Planned:  # fmt: skip
        """What was said about an operation, checked; its key and its payload come when it is run."""
        undo, probe, name = self._found(rollback, verify)
        lineage = Lineage.check(inputs, outputs, contract)
        checks = () if contract is None or contract.check is None else (contract.check,)
        for function in (*preconditions, *postconditions, *checks):
            check_callable(function, "a condition")
        checked = OperationTerms.check(**terms, undoes=undo is not None, probes=probe is not None)
        before, after = tuple(preconditions), tuple(postconditions)

        def made(key: object, fingerprint: str | None, payload: object) -> AsyncPlan:
            found = as_key(key)
            plan = AsyncPlan(
                self._engine, found, fingerprint, checked, undo, name, probe, before, after, None, lineage, None,
                self._energy,
            )  # fmt: skip
            if self._rules is None and not checked.sovereign:
                return plan
            from holdfast.governance.policy import govern

            governing = govern(
                self._rules, found, sovereign=checked.sovereign, payload=payload, outputs=lineage.outputs
            )
            sovereign = governing is not None and governing.demands.sovereign
            return plan._replace(governed=governing, terms=checked._replace(sovereign=sovereign))

        return made

    def _found(
        self, rollback: Function | str | None, verify: Function | None
    ) -> tuple[Function | None, Function | None, str | None]:
        if verify is not None:
            check_callable(verify, "verify")
        if rollback is None:
            return None, verify, None
        if isinstance(rollback, str):
            if rollback not in self._handlers:
                known = ", ".join(sorted(self._handlers)) or "none"
                raise ValueError(f"no rollback is registered as {rollback!r}; there are: {known}")
            handlers = self._handlers[rollback]
            return handlers.rollback, verify or handlers.verify, rollback
        check_callable(rollback, "rollback")
        return (
            rollback,
            verify,
            next((name for name, each in self._handlers.items() if each.rollback == rollback), None),
        )

    async def _tell(self, event: str, record: OperationRecord, **more: str) -> None:
        if telemetry.listeners:
            from holdfast.operations.measured import labels

            sovereign: bool | None = None  # when the log does not answer, which harms nobody here
            with suppress(HoldfastError):
                sovereign = await self._sovereign(record)
            telemetry.tell(event, **labels(record, sovereign=sovereign), **more)

    async def _sovereign(self, record: OperationRecord) -> bool:
        """As the policy says now, or as whoever ran it has said; what cannot be read any more may have said so."""
        demands = None if self._rules is None else self._rules.demands(record.dataset)
        if demands is not None and demands.sovereign:
            return True
        try:
            states = fold(await read_entries(self._engine, record.key))
        except ValueError:
            return True
        return any(each.sovereignty for each in states.values())
