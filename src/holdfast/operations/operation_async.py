"""The handle of an operation: run a function, decorate one, or put a block in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from holdfast.canonical import digest
from holdfast.errors import OperationFailed
from holdfast.operations.attempt_async import AsyncAttempt
from holdfast.operations.calling_async import call, costing
from holdfast.operations.decide import NOTHING, pause
from holdfast.operations.external_async import AsyncExternal
from holdfast.operations.joined_async import within
from holdfast.operations.outcome import Outcome
from holdfast.operations.plan_async import AsyncPlan
from holdfast.operations.running_async import AsyncRunning
from holdfast.operations.terms import Function
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency_async import check_callable, check_function, current_id, sleep

if TYPE_CHECKING:
    from inspect import Signature

    from holdfast.operations.measured import Measured

P = ParamSpec("P")
T = TypeVar("T")
Planned = Callable[[object, str | None, object], AsyncPlan]
"""What was said of an operation, for a key, a fingerprint and a payload."""


class AsyncOperation:
    """An operation to be run: at most one effect, whatever the retries."""

    def __init__(self, plan: Planned, key: Any, fingerprint: str | None, tx: Any, payload: object) -> None:
        self._plan_of, self._key, self._fingerprint, self._tx, self._payload = plan, key, fingerprint, tx, payload
        self._entered: list[tuple[int, AsyncAttempt | None, AsyncRunning]] = []

    async def run(self, function: Function, /, *args: Any, **kwargs: Any) -> Outcome:
        """Call it, unless it has been done: then the result is the one it had. The function is given ``op`` if it takes
        a parameter of that name, and what else is given here."""
        check_callable(function, "function")
        return await run(self._plan(), self._tx, function, args, kwargs)

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[Outcome]]:
        """Decorator: every call is an operation, whose key is ``key``, or what ``key`` makes of the arguments as they
        are passed. Unless a payload was given, the arguments are it, however they are passed or left to their default,
        but for the ``self`` or ``cls`` of a method: the same key with others is KeyReused."""
        check_callable(function, "what is decorated")
        check_function(function)
        named = function if hasattr(function, "__qualname__") else type(function)  # a functools.partial has no name
        name, signature = f"{named.__module__}.{named.__qualname__}", _taken(function)
        defaults = _defaults(signature)

        @wraps(function)
        async def once(*args: P.args, **kwargs: P.kwargs) -> Outcome:
            # What does not fit is an error before there is an attempt.
            bound = {**defaults, **signature.bind(*args, **kwargs).arguments}
            given = {each: value for each, value in bound.items() if each not in ("self", "cls")}
            key = self._key(*args, **kwargs) if callable(self._key) else self._key
            sent = self._fingerprint or digest((name, given), "the arguments")
            payload = [list(args), dict(kwargs)] if self._fingerprint is None else self._payload
            return await run(self._plan_of(key, sent, payload), self._tx, function, args, kwargs)

        return once

    async def __aenter__(self) -> AsyncRunning:
        """The body sees whether it was done already: ``op.replayed``, with the ``op.result`` it had. If it was not, the
        body does it, and says what the result is: ``op.result = …``. With ``when_locked="skip"``: ``op.status``."""
        plan = self._plan()
        attempt = await attempt_of(plan, self._tx)
        attempt.measured = measure(plan) if telemetry.listeners else None
        try:
            op = await attempt.begin()
            if isinstance(op, Outcome):
                attempt.over(op)
                seen = AsyncRunning(plan.key, NOTHING, now(), attempt=op.attempt)
                seen.replayed, seen.status, seen.result = op.replayed, op.status, op.value
                self._entered.append((current_id(), None, seen))
                return seen
            attempt.begun(op)
            try:
                await attempt.check(op)
            except BaseException as error:
                await attempt.fail(op, error)
                raise
            attempt.enter()
            self._entered.append((current_id(), attempt, op))
            if plan.energy is not None:
                from holdfast.operations.metering_async import BLOCK, Metering

                op.metering = Metering(op, plan.energy, BLOCK)
                op.metering.__enter__()
        except BaseException as error:
            try:
                await attempt.drop()
            finally:
                attempt.over(error)
            raise
        return op

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        attempt, op = self._left()
        if attempt is None:
            return
        how: Outcome | BaseException | None = error
        try:
            if op.metering is not None:
                op.metering.__exit__()
            attempt.leave()
            if error is not None:
                await attempt.fail(op, error)
            else:
                how = await self._succeed(attempt, op)
        except BaseException as problem:
            how = problem if error is None else error
            await attempt.drop()
            raise
        finally:
            if how is not None:
                attempt.over(how)

    async def _succeed(self, attempt: AsyncAttempt, op: AsyncRunning) -> Outcome:
        try:
            await attempt.check_after(op)
            return await attempt.succeed(op, op.result)
        except BaseException as problem:
            await attempt.fail(op, problem)
            raise

    def _left(self) -> tuple[AsyncAttempt | None, AsyncRunning]:
        """The block that ends is the last one begun here; or the only one, begun elsewhere (in a generator that another
        task closes, say)."""
        mine = [entry for entry in self._entered if entry[0] == current_id()]
        if not mine and len(self._entered) != 1:
            raise RuntimeError("an operation is left where it was not entered, and entered more than once elsewhere")
        entry = (mine or self._entered)[-1]
        self._entered.remove(entry)
        return entry[1:]

    def _plan(self) -> AsyncPlan:
        if callable(self._key):
            raise TypeError("key is a function of the arguments: this operation is a decorator")
        return self._plan_of(self._key, self._fingerprint, self._payload)


def _taken(function: Function) -> Signature:
    """What it takes from whoever calls it: everything but ``op``."""
    import inspect

    try:
        found = inspect.signature(function)
    except ValueError:  # one that is not written in Python
        found = inspect.signature(lambda *args, **kwargs: None)
    return found.replace(parameters=[each for name, each in found.parameters.items() if name != "op"])


def _defaults(signature: Signature) -> dict[str, Any]:
    """What an argument is that is not given; but for what has no single meaning, a sentinel say, which nobody sends."""
    found = {}
    for name, each in signature.parameters.items():
        if each.default is not each.empty:
            with suppress(ValueError, TypeError):
                digest(each.default)
                found[name] = each.default
    return found


async def attempt_of(plan: AsyncPlan, tx: Any) -> AsyncAttempt:
    plan.engine.check_usable()
    if tx is None:
        return AsyncExternal(plan)
    attempt = within(plan, tx)
    if not plan.engine.schema_seen:  # a session of our own makes the tables, or says how to: the user's would just fail
        await plan.engine.call("operation_get", {"key": plan.key.digest})
    return attempt


def measure(plan: AsyncPlan) -> Measured:
    from holdfast.operations.measured import Measured  # current_id: most processes have nobody who listens

    return Measured(plan.key, sovereign=plan.terms.sovereign)


async def run(plan: AsyncPlan, tx: Any, function: Function, args: Any, kwargs: Any) -> Outcome:
    if not telemetry.listeners:
        return await _run(plan, tx, function, args, kwargs, None)
    measured = measure(plan)
    try:
        outcome = await _run(plan, tx, function, args, kwargs, measured)
    except BaseException as error:
        measured.over(error)
        raise
    measured.over(outcome)
    return outcome


async def _run(
    plan: AsyncPlan, tx: Any, function: Function, args: Any, kwargs: Any, measured: Measured | None
) -> Outcome:
    tried, failed = 0, None
    while True:
        attempt = await attempt_of(plan, tx)
        attempt.tried, attempt.measured = tried, measured
        try:
            return await _once(attempt, function, args, kwargs)
        except BaseException as error:
            await attempt.drop()
            if not isinstance(error, Exception) or isinstance(error, OperationFailed):
                raise
            if failed is not None and not attempt.began:
                raise error from failed  # a retry that is refused says what it would have been one of
            if tried >= plan.terms.retries or not attempt.began or attempt.remembers(error):
                raise
            failed = error
        tried += 1
        await sleep(pause(tried, 0.0, 0.0, jitter(0.0, 1.0)))


async def _once(attempt: AsyncAttempt, function: Function, args: Any, kwargs: Any) -> Outcome:
    """As often as it takes while nothing comes of it because others are in the way."""
    while True:
        op = await attempt.begin()
        if isinstance(op, Outcome):
            return op
        attempt.begun(op)
        try:
            attempt.enter()
            await attempt.check(op)
            if attempt.plan.energy is None:
                value = await call(function, op, *args, **kwargs)
            else:
                value = await costing(attempt.plan.energy, function, op, *args, **kwargs)
            await attempt.check_after(op)
            attempt.leave()
            return await attempt.succeed(op, value)
        except BaseException as error:
            attempt.leave()
            if not await attempt.fail(op, error):
                raise
        finally:
            if attempt.measured is not None:
                attempt.measured.left()
        if attempt.measured is not None:
            attempt.measured.collided()
        await sleep(jitter(0.0, 0.01))
