"""What both ways to run an operation share: what is known of it, what follows from that, and how it is written down."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast._async.engines.engine import AsyncEngine
from holdfast._async.primitives.operations.governing import AsyncGovernance, NeedsReview
from holdfast._async.primitives.operations.running import AsyncRunning, Done
from holdfast._wire import Row, drivers
from holdfast._wire.aio_waiting import settled, sleep
from holdfast._wire.clock import jitter, now
from holdfast._wire.log import logger
from holdfast.core import operation, replay, results, wal
from holdfast.core.errors import EngineError, OperationFailed
from holdfast.core.keys import lock_key
from holdfast.core.lineage import NOTHING, Lineage
from holdfast.core.operation import LEASE, Act, Key, Prior
from holdfast.core.operation_terms import Function, OperationTerms
from holdfast.core.outcome import Outcome
from holdfast.core.wal import Entry

if TYPE_CHECKING:
    from holdfast.core.energy import Meter
    from holdfast.core.policy import Governed

log = logger("holdfast.operation")

PAGE = 1000
_TOLD = (
    "began", "label", "key", "expected", "pointer", "number", "entries", "status", "attempt", "fence", "fingerprint",
    "result", "result_hash", "error", "keep", "effect_started", "failures", "rollback", "outbox", "pipeline", "task",
    "dataset", "operation", "checksum", "params_hash", "late",
)  # fmt: skip
"""In the order in which the end of a transaction is told of them."""
_around: ContextVar[tuple[AsyncAttempt, ...]] = ContextVar("holdfast_operations", default=())
"""The operations that whoever asks is inside of."""


class AsyncPlan(NamedTuple):
    """All that was said about an operation."""

    engine: AsyncEngine
    key: Key
    fingerprint: str | None
    terms: OperationTerms
    rollback: Function | None = None
    handler: str | None = None
    """The name under which rollback and probe are registered."""
    verify: Function | None = None
    preconditions: Sequence[Function] = ()
    postconditions: Sequence[Function] = ()
    owner: str | None = None
    lineage: Lineage = NOTHING
    governed: Governed | None = None
    """What the policy is to be asked with, if it has to."""
    energy: Meter | None = None
    """What says what the execution cost, if that is wanted."""

    @property
    def lease(self) -> str:
        """The name of the lease under which it is done, if it is not done in a transaction."""
        return self.owner or lease_of(self.key.lock_key or 0)

    @property
    def whole(self) -> Row | None:
        """What asks for the lock of the dataset itself, if that is sovereign: the other one is of one operation."""
        if not self.terms.sovereign or self.key.dataset is None:
            return None
        lock = lock_key(self.key.dataset, "")
        return {"key": "", "lock": lock, "lease": lease_of(lock)}

    def parameters(self, op: AsyncRunning, status: str, **more: Any) -> Row:
        """What is written of it, with the entries that are waiting."""
        key, written = self.key, op.chain.waiting()
        known = {
            "key": key.digest, "label": key.label, "pipeline": key.pipeline, "task": key.task, "dataset": key.dataset,
            "operation": key.operation, "checksum": key.checksum, "params_hash": key.params_hash,
            "fingerprint": self.fingerprint, "rollback": self.handler, "status": status, "attempt": op.attempt,
            "fence": op.fence, "effect_started": op.began, "outbox": op.told() if status == "success" else None,
            "result": None, "result_hash": None, "error": None, "keep": None, "owner": None, "token": None,
            "lock": None, "failures": 0,
        }  # fmt: skip
        return {**known, **written._asdict(), **more}


def lease_of(lock: int) -> str:
    return f"{LEASE}{lock & 0xFFFFFFFFFFFFFFFF:016x}"


async def call(function: Function, op: AsyncRunning, *args: Any, **kwargs: Any) -> Any:
    """With ``op`` if it takes one."""
    place = place_of(function)
    if place is None:
        return await settled(function(*args, **kwargs))
    if 0 <= place <= len(args):
        return await settled(function(*args[:place], op, *args[place:], **kwargs))
    return await settled(function(*args, op=op, **kwargs))


async def costing(meter: Meter, function: Function, op: AsyncRunning, *args: Any, **kwargs: Any) -> Any:
    """Call it, and note what that costs."""
    from holdfast._wire.aio_metering import spending

    return await spending(op, meter, call, function, op, *args, **kwargs)


def place_of(function: Function) -> int | None:
    """Where among its arguments it takes ``op``; -1: by its name alone; None: it does not."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return _signed(function)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if "op" not in names:
        return None
    place: int = names.index("op")
    return -1 if place >= code.co_argcount else place - hasattr(function, "__self__")  # self is not given here


def _signed(function: Function) -> int | None:
    import inspect

    try:
        taken = inspect.signature(function).parameters
    except ValueError:  # one that is not written in Python
        return None
    if "op" not in taken:
        return None
    return -1 if taken["op"].kind is inspect.Parameter.KEYWORD_ONLY else list(taken).index("op")


async def read_entries(engine: AsyncEngine, key: str) -> list[Entry]:
    """The chain of one operation."""
    found: list[Entry] = []
    after = 0
    while True:
        rows = await engine.call("operation_entries", {"key": key, "after_number": after, "most": PAGE})
        for row in rows:
            found += wal.load(key, row["entries"])
        if len(rows) < PAGE:
            return found
        after = rows[-1]["number"]


class AsyncAttempt(AsyncGovernance, ABC):
    """One way to run an operation: begin, then succeed or fail."""

    def __init__(self, plan: AsyncPlan) -> None:
        super().__init__(plan)
        self.prior: Prior
        self.began = False
        """Whether the function was called: what goes wrong before is not tried again by itself."""
        self.late = True
        """What it writes in its transaction gets its place in the log when that is committed, and not before."""
        self._running = False

    async def begin(self) -> AsyncRunning | Outcome:
        """Claim it, and wait for that as it was told to; or how it ended before. What must not go on is up for review,
        and goes on once when that was approved."""
        while True:
            try:
                await self.permit()
                return await self._begin()
            except OperationFailed as error:
                if not await self.refused(error):
                    raise
            except NeedsReview as need:
                await self.reviewed(need)

    @abstractmethod
    async def _begin(self) -> AsyncRunning | Outcome: ...

    @abstractmethod
    async def succeed(self, op: AsyncRunning, value: Any) -> Outcome: ...

    @abstractmethod
    async def fail(self, op: AsyncRunning, error: BaseException) -> bool:
        """Write it down; True when nothing came of it, and it can begin again at once."""

    def enter(self) -> None:
        """The function is about to run, or the block."""
        self._running = True
        _around.set((*_around.get(), self))

    def leave(self) -> None:
        if self._running:
            self._running = False  # for a task that was begun in there, and goes on
            _around.set(tuple([each for each in _around.get() if each is not self]))

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

    async def check(self, op: AsyncRunning) -> None:
        """What must hold before: what does not is recorded, and nothing is begun."""
        await self._hold("precondition", self.plan.preconditions, op)
        if not self.plan.terms.marks_effect:
            await op.effect_started()

    async def check_after(self, op: AsyncRunning) -> None:
        await self._hold("postcondition", self.plan.postconditions, op)
        lineage = self.plan.lineage
        if lineage.contract is not None and lineage.contract.check is not None:
            await self._hold("postcondition", (lineage.contract.check,), op, contract=lineage.agreed())

    async def _hold(self, kind: str, conditions: Sequence[Function], op: AsyncRunning, **about: Any) -> None:
        for condition in conditions:
            name = getattr(condition, "__name__", type(condition).__name__)
            try:
                answer, problem = await call(condition, op), None
                holds = answer is None or bool(answer)  # other libraries have a False of their own, databases a 0
            except Exception as error:
                holds, problem = False, error
            said = {} if problem is None else {"error": f"{type(problem).__name__}: {problem}"[:1000]}
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

    async def locked(self, prior: Prior, asked: int, started: float) -> Outcome | None:
        """Somebody else is at it. None: ask again now."""
        key, terms, waited = self.plan.key, self.plan.terms, now() - started
        await self.escalate(prior)
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
        await sleep(min(seconds, max(0.0, terms.timeout - waited)))
        return None

    def begun(self, op: AsyncRunning) -> None:
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

    def remembers(self, error: BaseException) -> bool:
        return isinstance(error, self.plan.terms.remember_errors) and not self.transient(error)

    def unrecorded(self, problem: object) -> None:
        """That it failed could not be written down. The user's error is what counts, so this is only said."""
        label = self.plan.key.label
        log.warning(
            "that operation %r failed could not be recorded: %s",
            label,
            problem,
            extra={"event": "operation.unrecorded", "operation": label, "error": str(problem)},
        )

    async def undo(self, function: Function, prior: Prior, asked_at: float) -> AsyncRunning:
        """Roll back what a dead attempt may have done; the operation as it was then."""
        op = await self.dead(prior, asked_at)
        await call(function, op)
        return op

    async def probe(self, function: Function, prior: Prior, asked_at: float) -> Done | None:
        """Ask whether the effect of a dead attempt is there; None when it is not. Whatever else is said (a 1, a row, an
        array) may mean that it is, and then it must not be done again."""
        said = await call(function, await self.dead(prior, asked_at))
        if said is not None and not isinstance(said, bool | Done):
            raise TypeError(f"verify must return True, op.done(result), False or None, not {said!r:.80}")
        return said if isinstance(said, Done) else Done() if said else None

    fence = 0
    """Of the lease that it is done under."""

    async def dead(self, prior: Prior, asked_at: float) -> AsyncRunning:
        """The attempt that died, with what it had noted, and with our own fence: whatever it does late is older."""
        digest = self.plan.key.digest
        states = replay.fold(await read_entries(self.plan.engine, digest))
        noted = states[digest].checkpoints if digest in states else {}
        return AsyncRunning(self.plan.key, prior, asked_at, attempt=prior.attempt, fence=self.fence, checkpoints=noted)


def as_told(parameters: Row) -> str:
    """What the end of a transaction is told, as one text, which every connection has the letters for."""
    told = line(map(parameters.get, _TOLD))
    return told if told.isascii() else "\x1e" + json.dumps(told)


def line(parts: Iterable[Any]) -> str:
    """None of them has a control character in it, or is empty: names may not, and the rest is JSON or hexadecimal."""
    return "\x1f".join(["" if part is None else str(part) for part in parts])


def kept(value: Any) -> dict[str, Any]:
    """A result as it is written; ValueError when it cannot be."""
    encoded = results.encode(value)
    return {"result": encoded.hex(), "result_hash": sha256(encoded).hexdigest()}
