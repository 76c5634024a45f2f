"""One attempt at an operation: begin, then succeed or fail. What the three strategies have in common.

    AsyncAttempt
    ├ AsyncLeasedAttempt            effect outside of the database, under a lease      leased_attempt_async.py
    └ AsyncTransactionAttempt       effect in the user's database                      own_transaction_async.py
        ├ AsyncOwnTransaction       it begins and commits the transaction              own_transaction_async.py
        └ AsyncCallersTransaction   it joins one that the caller commits               callers_transaction_async.py

``operation_async.py`` drives it: ``begin`` claims the operation or returns its outcome, ``enter`` and ``leave`` are
called around the function, ``succeed`` or ``fail`` records the end, ``drop`` gives back what is still held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from holdfast.database import driver_errors
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.errors import EngineError, KeyReused, OperationFailed, OperationInProgress, PolicyDenied
from holdfast.operations.decide import (
    KEY_REUSED,
    OVERRUN,
    POLICY_CHANGED,
    POLICY_DENIES,
    Decision,
    Prior,
    backoff_delay,
    decide,
    error_record,
    format_error,
    in_progress,
    is_transient,
    is_unanswered,
    key_reused,
    refusal,
)
from holdfast.operations.log import LogEntry, fold, parse_entries
from holdfast.operations.op_async import AsyncOp, Done, call_with_op
from holdfast.operations.outcome import Outcome
from holdfast.operations.policy_checks_async import AsyncPolicyChecks, NeedsReview, PolicyChanged
from holdfast.operations.spec_async import AsyncOperationSpec
from holdfast.operations.terms import Function
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency_async import sleep
from holdfast.runtime.log import WARNING, logger

if TYPE_CHECKING:
    from holdfast.lease.grant_async import AsyncLeaseGrant
    from holdfast.operations.run_telemetry import RunTelemetry

log = logger("holdfast.operation")

PAGE = 1000
LOOK_EVERY = 0.1
"""Seconds between two looks for the owner of an operation that is waited for."""
LOOK_LIMIT = 2.0
"""Seconds to look for an owner that has vanished: longer than the two looks of ``beat_look`` take."""
ALL_OWNERS: Row = {"key": None, "lease": None, "dataset": None}
"""Parameters of ``operation_look``: look for the owners of all operations."""
_entered: ContextVar[tuple[AsyncAttempt, ...]] = ContextVar("holdfast_operations", default=())


def entered_attempts() -> tuple[AsyncAttempt, ...]:
    """The attempts whose function or block the caller is inside of, outermost first."""
    return _entered.get()


async def fetch_entries(engine: AsyncEngine, key: str) -> list[LogEntry]:
    """The chain of one operation."""
    entries: list[LogEntry] = []
    after = 0
    while True:
        rows = await engine.call("operation_entries", {"key": key, "after_number": after, "limit": PAGE})
        for row in rows:
            entries += parse_entries(key, row["entries"])
        if len(rows) < PAGE:
            return entries
        after = rows[-1]["number"]


async def has_lost_owner(engine: AsyncEngine, names: Row) -> bool:
    """Whether an owner has vanished, by its key: now it is declared dead, or has come back. So what was read before may
    have changed. False at once if all live, or only their TTL decides, or the client is read-only."""
    until, has_vanished = now() + LOOK_LIMIT, False
    while not engine.read_only and now() < until:
        [look] = await engine.call("operation_look", names)
        if look["seconds"] is None:
            break
        has_vanished = True
        await sleep(look["seconds"])
    return has_vanished


class AsyncAttempt(ABC):
    prior: Prior
    """The row of the operation when it was claimed."""
    fence = 0
    """Of the lease; 0 in a transaction."""
    has_begun = False
    """Whether the function was called. An error before that is not retried."""
    telemetry: RunTelemetry | None = None
    """Of the run that this attempt is part of, if anything listens."""
    tries = 0
    """How often this run has tried before."""
    _look_at = 0.0
    """When to look for the owner again, while it is waited for."""
    _looks_for_owner = True
    """Whether to look once if the operation is not waited for."""
    _policy: AsyncPolicyChecks | None = None
    _is_entered = False

    def __init__(self, spec: AsyncOperationSpec) -> None:
        self.spec = spec

    @property
    def policy(self) -> AsyncPolicyChecks:
        """Made on first use: most operations have neither a policy nor a review."""
        if self._policy is None:
            self._policy = AsyncPolicyChecks(self.spec, self.tries)
        return self._policy

    # The strategy

    @abstractmethod
    async def _claim(self) -> AsyncOp | Outcome[Any]:
        """Claim the operation and recover a dead attempt, or return the outcome that it had."""

    @abstractmethod
    async def succeed(self, op: AsyncOp, value: Any) -> Outcome[Any]:
        """Record the success with its result."""

    @abstractmethod
    async def fail(self, op: AsyncOp, error: BaseException) -> bool:
        """Undo and record the failure. True when the attempt collided with others and can begin again at once."""

    def grants(self) -> tuple[AsyncLeaseGrant, ...]:
        """Of the leases under which it runs. A transaction has none."""
        return ()

    async def drop(self) -> None:
        """Give back what is still held, wherever the attempt ended or was interrupted."""
        self.leave()

    # Begin

    async def begin(self) -> AsyncOp | Outcome[Any]:
        """Claim the operation, waiting for its lock as the terms say; or the outcome that it had.

        An operation that must not be tried again is put up for review, and goes on if that was approved."""
        while True:
            try:
                if self.spec.governed is not None or self.spec.terms.when_locked == "escalate":
                    await self._check_claim()
                claimed = await self._claim()
                if isinstance(claimed, Outcome) and claimed.status == "skipped":
                    await self._return_approval()
                return claimed
            except PolicyChanged as changed:
                await self._return_approval()
                await self._adopt_policy(changed)
            except (OperationInProgress, PolicyDenied):
                await self._return_approval()
                raise
            except OperationFailed as error:
                if not await self.policy.review_refusal(error):
                    raise
            except NeedsReview as need:
                await self.policy.review_need(need)
            except BaseException:
                with suppress(Exception):  # the first error is the one to raise
                    await self._return_approval()
                raise

    async def _adopt_policy(self, changed: PolicyChanged) -> None:
        """Read the stored policy, and continue under it. PolicyDenied when it is the one that was known."""
        policies = self.spec.policies
        if policies is not None:
            await policies._refresh()
        if policies is None or policies._version == self.spec.policy_version:
            raise PolicyDenied(str(changed)) from changed
        self.spec, self._policy = self.spec.govern(), None

    def check_policy_version(self, stored: int | None) -> None:
        """PolicyChanged when this is not the version of the stored policy that the attempt respects."""
        if stored != self.spec.policy_version:
            raise PolicyChanged(
                f"operation {self.spec.key.label!r} was not checked under version {stored} of the stored policy"
            )

    async def _check_claim(self) -> None:
        """Check the policy before the claim, without any lock."""
        [row] = await self.spec.engine.call("operation_get", {"key": self.spec.key.digest})
        self.check_policy_version(row["policy"])
        prior = Prior.from_row(row)
        await self.policy.check_claim(self.decide(prior), prior)

    async def _return_approval(self) -> None:
        if self._policy is not None:
            await self._policy.return_approval()

    def decide(self, prior: Prior) -> Decision:
        """What to do, given the row of the operation."""
        spec, terms = self.spec, self.spec.terms
        if not prior.belongs_to(spec.key):
            return Decision.FOREIGN
        return decide(
            prior, spec.fingerprint, attempts=terms.retry.attempts, on_partial=terms.on_partial,
            undoes=spec.rollback is not None, approved=self._policy is not None and self._policy.is_approved,
            reuse=terms.options.reuse,
        )  # fmt: skip

    def settle(self, decision: Decision, prior: Prior) -> Outcome[Any] | None:
        """The outcome if the log has one; None if an attempt is needed. Raises if there must not be one."""
        if decision is Decision.REPLAY:
            if self.spec.governed is not None:
                self.policy.check_replay(prior)
            outcome = Outcome("success", True, prior.attempt, value=prior.value())
        elif decision is Decision.EXPIRED:
            outcome = Outcome("expired", True, prior.attempt)
        elif decision in (Decision.EXECUTE, Decision.RUNNING, Decision.ROLL_BACK, Decision.VERIFY):
            return None
        else:
            if self.telemetry is not None:
                self.telemetry.settled(decision, prior)
            raise refusal(decision, prior, self.spec.key)
        if self.telemetry is not None:
            self.telemetry.settled(decision, prior)
        return outcome

    async def wait_for_lock(self, prior: Prior, tries: int, started: float) -> Outcome[Any] | None:
        """Another owner has the lock: pause, then return None to try again. Returns the outcome "skipped", or raises
        OperationInProgress, if that is what the terms say or the time is over."""
        key, terms, waited = self.spec.key, self.spec.terms, now() - started
        is_patient = terms.when_locked in ("wait", "backoff") and self.spec.governed is None
        is_first = not is_patient and tries == 0 and self._looks_for_owner
        if is_first and await has_lost_owner(self.spec.engine, self.spec.owner_names):
            return None
        await self.escalate(prior)
        if terms.when_locked == "skip":
            self.report_locked_out("skipped")
            return Outcome("skipped", False, 0)
        if terms.when_locked == "fail":
            self.report_locked_out("busy")
            raise in_progress(key)
        if self.is_nested():
            self.report_locked_out("reentered")
            raise in_progress(key, why="it runs inside of an operation that has the same lock, and would never get it")
        if waited >= terms.timeout:
            self.report_locked_out("timeout")
            raise in_progress(key, waited)
        left = max(0.0, terms.timeout - waited)
        if now() >= self._look_at:
            [look] = await self.spec.engine.call("operation_look", self.spec.owner_names)
            if look["seconds"] == 0:
                return None  # the owner is gone
            self._look_at = now() + (LOOK_EVERY if look["seconds"] is None else look["seconds"])
            if look["seconds"] is not None:
                left = min(left, look["seconds"] + 0.001)
        if terms.when_locked == "backoff":
            pause = backoff_delay(terms.retry, tries, jitter(0.0, 1.0), waited=waited, timeout=terms.timeout)
            await self._wait_in_line(min(pause, left))
            return None
        pause = min(min(0.05, 0.001 * 2 ** min(tries, 6)) * jitter(0.5, 1.5), left)
        if self.spec.governed is None:
            await sleep(pause)
        else:  # the lease was not waited for, because the policy is asked first
            await self._wait_in_line(pause)
        return None

    async def _wait_in_line(self, seconds: float) -> None:
        """Wait before the lock is asked for again. No release wakes a waiting transaction, so it asks often."""
        await sleep(min(seconds, min(0.25, self.spec.engine.poll) * jitter(0.5, 1.5)))

    async def escalate(self, prior: Prior) -> None:
        """Another owner has the lock: return if the operation may wait for it. Raises PolicyDenied, or opens a review
        and raises OperationInProgress."""
        spec = self.spec
        reason = None
        if spec.terms.when_locked == "escalate":
            reason = f"{spec.key.label} is already running, or another operation has its lock"
        if spec.governed is not None:
            try:
                reason = self.policy.check_busy(prior) or reason
            except PolicyDenied:
                self.report_locked_out("denied")
                raise
        if reason is not None:
            self.report_locked_out("review")
            number = await self.policy.open_review("locked", reason)
            why = f"it is already running, or another operation has its lock; it is up for review as number {number}"
            raise in_progress(spec.key, why=why)

    def report_locked_out(self, reason: str) -> None:
        """Publish that the attempt does not get its lock, and why it does not wait any longer."""
        if telemetry.listeners:
            from holdfast.operations.run_telemetry import labels

            fields = labels(self.spec.key, sovereign=self.spec.sovereign)
            telemetry.emit("operation.locked_out", **fields, reason=reason)

    # Around the function

    def report_begun(self, op: AsyncOp) -> None:
        """The function is about to be called: every error from here on is one of an attempt."""
        self.has_begun = True
        if self.telemetry is not None:
            self.telemetry.attempt_begun(op, self.prior, self.spec.terms.on_partial)

    def enter(self) -> None:
        """The function or block is about to run, in this thread or task."""
        self._is_entered = True
        _entered.set((*_entered.get(), self))

    def leave(self, error: BaseException | None = None) -> BaseException | None:
        """The function or block has ended, with this error. Returns the error to raise: another one if the attempt
        itself has cancelled the function."""
        if self._is_entered:
            _entered.set(tuple([each for each in _entered.get() if each is not self]))
            self._is_entered = False  # for tasks that the function has started and that go on
        return error

    def is_nested(self, *, same_key: bool = False) -> bool:
        """Whether the caller is inside of an operation that has the same lock, or the same key."""
        spec = self.spec
        for attempt in _entered.get():
            outer = attempt.spec
            if not attempt._is_entered or outer.engine.database != spec.engine.database:
                continue
            if outer.key.digest == spec.key.digest if same_key else outer.lease_name == spec.lease_name:
                return True
        return False

    async def check_preconditions(self, op: AsyncOp) -> None:
        """OperationFailed when one does not hold. Then the effect may start."""
        if self.spec.checks.before:
            await self._check_conditions("precondition", self.spec.checks.before, op)
        if not self.spec.terms.options.marks_effect and not op._has_begun:
            await op.effect_started()

    async def check_postconditions(self, op: AsyncOp) -> None:
        """OperationFailed when one does not hold, or the contract is not met."""
        if self.spec.checks.after:
            await self._check_conditions("postcondition", self.spec.checks.after, op)
        lineage = self.spec.lineage
        if lineage.contract is not None and lineage.contract.check is not None:
            check = (lineage.contract.check,)
            await self._check_conditions("postcondition", check, op, contract=lineage._contract_detail())

    async def _check_conditions(self, kind: str, conditions: Sequence[Function], op: AsyncOp, **more: Any) -> None:
        for condition in conditions:
            name = getattr(condition, "__name__", type(condition).__name__)
            try:
                answer, cause = await call_with_op(condition, op), None
                holds = answer is None or bool(answer)  # numpy has a False of its own, databases a 0
            except Exception as error:
                holds, cause = False, error
            detail = {} if cause is None else {"error": format_error(error_record(cause))}
            op._add_entry(kind, {"name": name, "ok": holds, **detail, **more})
            if not holds:
                why = f": {detail['error']}" if detail else ""
                raise OperationFailed(
                    f"operation {op.key.label!r}: {kind} {name!r} does not hold{why}", key=op.key.digest,
                    label=op.key.label, status="failure", error={"where": kind, "name": name, **detail},
                ) from cause  # fmt: skip

    # Recovery of a dead attempt

    async def roll_back(self, function: Function, prior: Prior, answered_at: float) -> None:
        """Call the rollback function for the dead attempt."""
        await call_with_op(function, await self.dead_op(prior, answered_at))

    async def probe(self, function: Function, prior: Prior, answered_at: float) -> Done | None:
        """Ask the verify function whether the effect of the dead attempt is there; None when it is not. TypeError for
        any other answer (a 1, a row, an array), which might mean that it is."""
        answer = await call_with_op(function, await self.dead_op(prior, answered_at))
        if answer is not None and not isinstance(answer, bool | Done):
            raise TypeError(f"verify must return True, op.done(result), False or None, not {answer!r:.80}")
        return answer if isinstance(answer, Done) else Done() if answer else None

    async def dead_op(self, prior: Prior, answered_at: float) -> AsyncOp:
        """The ``op`` of the dead attempt, with its checkpoints, and with our fence, which is newer than its own."""
        digest = self.spec.key.digest
        states = fold(await fetch_entries(self.spec.engine, digest))
        checkpoints = states[digest].checkpoints if digest in states else {}
        return AsyncOp(
            self.spec.key, prior, answered_at, attempt=prior.attempt, fence=self.fence, checkpoints=checkpoints,
            grants=self.grants(),
        )  # fmt: skip

    # Errors

    def refusal_of(self, error: BaseException) -> PolicyDenied | KeyReused | None:
        """The error in the place of one with which the database refuses what the stored policy forbids, or a key that
        belongs to another operation."""
        sqlstate = driver_errors.sqlstate(error)
        if sqlstate == KEY_REUSED:
            return key_reused(self.spec.key)
        kinds = {POLICY_CHANGED: PolicyChanged, POLICY_DENIES: PolicyDenied}
        kind = None if isinstance(error, PolicyDenied) else kinds.get(sqlstate or "")
        if kind is None:
            return None
        message = driver_errors.message(error).removeprefix(f"{self.spec.engine.database}: ")
        return kind(f"operation {self.spec.key.label!r}: {message}")

    def is_transient(self, error: BaseException) -> bool:
        """Whether the error is one of the database and says nothing about the operation."""
        if isinstance(error, BaseExceptionGroup):
            return any(map(self.is_transient, error.exceptions))
        return isinstance(error, EngineError) or is_transient(error, driver_errors.sqlstate(error))

    def is_uncounted(self, error: BaseException) -> bool:
        """Whether a transaction that failed so does not count as an attempt: it collided with others, or lost its
        connection. One that took too long counts, because it is likely to do so again."""
        if isinstance(error, BaseExceptionGroup):
            return any(map(self.is_uncounted, error.exceptions))
        return self.is_transient(error) and driver_errors.sqlstate(error) not in OVERRUN

    def is_remembered(self, error: BaseException) -> bool:
        """Whether the error is final: raised again instead of a new attempt."""
        declared = isinstance(error, tuple(self.spec.terms.retry.remember))
        return declared and not self.is_transient(error) and not is_unanswered(error)

    def log_unrecorded(self, error: object) -> None:
        """A failure could not be recorded. This is only logged: the user's own error is the one to raise."""
        log.event(
            "operation.unrecorded", WARNING, "the failure of operation %(operation)r could not be recorded: %(error)s",
            operation=self.spec.key.label, error=str(error),
        )  # fmt: skip
