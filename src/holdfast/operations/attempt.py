# Generated from attempt_async.py by scripts/unasync.py. Do not edit.
"""What both ways to run an operation share: what is known of it, and what follows from that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from holdfast.database import driver_errors as drivers
from holdfast.database.engine import Engine
from holdfast.database.sessions import Row
from holdfast.errors import EngineError, OperationFailed, OperationInProgress, PolicyDenied
from holdfast.operations import decide as operation
from holdfast.operations import replay, wal
from holdfast.operations.calling import call
from holdfast.operations.decide import Act, Prior
from holdfast.operations.governing import Governance, NeedsReview
from holdfast.operations.outcome import Outcome
from holdfast.operations.plan import Plan
from holdfast.operations.running import Done, Running
from holdfast.operations.terms import Function
from holdfast.operations.wal import Entry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import sleep
from holdfast.runtime.log import logger

log = logger("holdfast.operation")

PAGE = 1000
_around: ContextVar[tuple[Attempt, ...]] = ContextVar("holdfast_operations", default=())
"""The operations that whoever asks is inside of."""


def read_entries(engine: Engine, key: str) -> list[Entry]:
    """The chain of one operation."""
    found: list[Entry] = []
    after = 0
    while True:
        rows = engine.call("operation_entries", {"key": key, "after_number": after, "most": PAGE})
        for row in rows:
            found += wal.load(key, row["entries"])
        if len(rows) < PAGE:
            return found
        after = rows[-1]["number"]


def around() -> tuple[Attempt, ...]:
    """What whoever asks is inside of."""
    return _around.get()


class Attempt(Governance, ABC):
    """One way to run an operation: begin, then succeed or fail."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.prior: Prior
        self.began = False
        """Whether the function was called: what goes wrong before is not tried again by itself."""
        self.late = True
        """What it writes in its transaction gets its place in the log when that is committed, and not before."""
        self.unmended: Callable[..., Row] | None = None
        """What is to be written when its transaction is undone: a rollback has failed, or a probe."""
        self._running = False

    def begin(self) -> Running | Outcome:
        """Claim it, and wait for that as it was told to; or how it ended before. What must not go on is up for review,
        and goes on once when that was approved."""
        while True:
            try:
                self.permit()
                found = self._begin()
                if isinstance(found, Outcome) and found.status == "skipped":
                    self.not_begun()
                return found
            except (OperationInProgress, PolicyDenied):
                self.not_begun()
                raise
            except OperationFailed as error:
                if not self.refused(error):
                    raise
            except NeedsReview as need:
                self.reviewed(need)
            except BaseException:
                with suppress(Exception):  # the caller hears what went wrong first
                    self.not_begun()
                raise

    @abstractmethod
    def _begin(self) -> Running | Outcome: ...

    @abstractmethod
    def succeed(self, op: Running, value: Any) -> Outcome: ...

    @abstractmethod
    def fail(self, op: Running, error: BaseException) -> bool:
        """Write it down; True when nothing came of it, and it can begin again at once."""

    def enter(self) -> None:
        """The function is about to run, or the block."""
        self._running = True
        _around.set((*_around.get(), self))

    def drop(self) -> None:
        """It has ended, or was interrupted, wherever that was: nothing of it stays open, or stands in anybody's way."""
        self.leave()

    def leave(self) -> None:
        if self._running:
            _around.set(tuple([each for each in _around.get() if each is not self]))
            self._running = False  # for a task that was begun in there, and goes on

    def precede(self) -> None:
        """What it is inside of is written after it, in the same transaction: so it must not have its place before."""
        for each in _around.get():
            each.late = True

    def in_its_own_way(self, *, same_key: bool = False) -> bool:
        """Whether it is inside an operation that has its lock, and would wait for itself; or inside itself."""
        ours = self.plan
        if not _around.get():
            return False
        around = [
            each.plan for each in _around.get() if each._running and each.plan.engine.database == ours.engine.database
        ]
        return any(each.key.digest == ours.key.digest if same_key else each.lease == ours.lease for each in around)

    def check(self, op: Running) -> None:
        """What must hold before: what does not is recorded, and nothing is begun."""
        self._hold("precondition", self.plan.preconditions, op)
        if not self.plan.terms.marks_effect:
            op.effect_started()

    def check_after(self, op: Running) -> None:
        self._hold("postcondition", self.plan.postconditions, op)
        lineage = self.plan.lineage
        if lineage.contract is not None and lineage.contract.check is not None:
            self._hold("postcondition", (lineage.contract.check,), op, contract=lineage.agreed())

    def _hold(self, kind: str, conditions: Sequence[Function], op: Running, **about: Any) -> None:
        for condition in conditions:
            name = getattr(condition, "__name__", type(condition).__name__)
            try:
                answer, problem = call(condition, op), None
                holds = answer is None or bool(answer)  # other libraries have a False of their own, databases a 0
            except Exception as error:
                holds, problem = False, error
            said = {} if problem is None else {"error": operation.describe(operation.told(problem))}
            op.note(kind, {"name": name, "ok": holds, **said, **about})
            if not holds:
                why = f": {said['error']}" if said else ""
                raise OperationFailed(
                    f"operation {op.key.label!r}: {kind} {name!r} does not hold{why}", key=op.key.digest,
                    label=op.key.label, status="failure", error={"where": kind, "name": name, **said},
                ) from problem  # fmt: skip

    def settled(self, act: Act, prior: Prior) -> Outcome | None:
        """How it ended before, if it did; an error when it must not go on."""
        if act is Act.REPLAY:
            self.permit_replay(prior)
            if self.measured is not None:
                self.measured.found(act, prior)
            return Outcome("success", True, prior.attempt, value=prior.value())
        if act is Act.EXPIRED:
            if self.measured is not None:
                self.measured.found(act, prior)
            return Outcome("expired", True, prior.attempt)
        if act in (Act.MISMATCH, Act.REFUSE_PARTIAL, Act.REFUSE_FAILED, Act.EXHAUSTED):
            if self.measured is not None:
                self.measured.found(act, prior)
            raise operation.refusal(act, prior, self.plan.key)
        return None

    def locked(self, prior: Prior, asked: int, started: float) -> Outcome | None:
        """Somebody else is at it. None: ask again now."""
        key, terms, waited = self.plan.key, self.plan.terms, now() - started
        self.escalate(prior)
        if terms.when_locked == "skip":
            self.locked_out("skipped")
            return Outcome("skipped", False, 0)
        if terms.when_locked == "fail":
            self.locked_out("busy")
            raise operation.in_progress(key)
        if self.in_its_own_way():
            self.locked_out("reentered")
            raise operation.in_progress(
                key, why="it is inside of an operation with the same lock: it would wait for itself"
            )
        if waited >= terms.timeout:
            self.locked_out("timeout")
            raise operation.in_progress(key, waited)
        chance = jitter(0.0, 1.0)
        if terms.when_locked == "backoff":
            seconds = operation.pause(asked, waited, terms.timeout, chance)
        else:
            seconds = min(0.05, 0.001 * 2 ** min(asked, 6)) * (0.5 + chance)
        sleep(min(seconds, max(0.0, terms.timeout - waited)))
        return None

    def begun(self, op: Running) -> None:
        """Its function is about to be called: whatever goes wrong from here on is that of an attempt."""
        self.began = True
        if self.measured is not None:
            self.measured.begun(op, self.prior, self.plan.terms.on_partial)

    def over(self, how: Outcome | BaseException) -> None:
        """It is all that its run was made of."""
        if self.measured is not None:
            self.measured.over(how)

    def transient(self, error: BaseException) -> bool:
        if isinstance(error, BaseExceptionGroup):
            return any(map(self.transient, error.exceptions))
        return isinstance(error, EngineError) or operation.passes(error, drivers.sqlstate(error))

    def passes(self, error: BaseException) -> bool:
        """Whether it is as if nobody had tried, where nothing is left of that: others were in its way, or the
        connection was lost. What took too long is likely to do so again, and counts."""
        if isinstance(error, BaseExceptionGroup):
            return any(map(self.passes, error.exceptions))
        return self.transient(error) and drivers.sqlstate(error) not in operation.OVERRUN

    def remembers(self, error: BaseException) -> bool:
        declared = isinstance(error, self.plan.terms.remember_errors)
        return declared and not self.transient(error) and not operation.unanswered(error)

    def unrecorded(self, problem: object) -> None:
        """That it failed could not be written down. The user's error is what counts, so this is only said."""
        label = self.plan.key.label
        log.warning(
            "that operation %r failed could not be recorded: %s",
            label,
            problem,
            extra={"event": "operation.unrecorded", "operation": label, "error": str(problem)},
        )

    def undo(self, function: Function, prior: Prior, asked_at: float) -> Running:
        """Roll back what a dead attempt may have done; the operation as it was then."""
        op = self.dead(prior, asked_at)
        call(function, op)
        return op

    def probe(self, function: Function, prior: Prior, asked_at: float) -> Done | None:
        """Ask whether the effect of a dead attempt is there; None when it is not. Whatever else is said (a 1, a row, an
        array) may mean that it is, and then it must not be done again."""
        said = call(function, self.dead(prior, asked_at))
        if said is not None and not isinstance(said, bool | Done):
            raise TypeError(f"verify must return True, op.done(result), False or None, not {said!r:.80}")
        return said if isinstance(said, Done) else Done() if said else None

    fence = 0
    """Of the lease that it is done under."""

    def dead(self, prior: Prior, asked_at: float) -> Running:
        """The attempt that died, with what it had noted, and with our own fence: whatever it does late is older."""
        digest = self.plan.key.digest
        states = replay.fold(read_entries(self.plan.engine, digest))
        noted = states[digest].checkpoints if digest in states else {}
        return Running(self.plan.key, prior, asked_at, attempt=prior.attempt, fence=self.fence, checkpoints=noted)
