# Generated from operation_async.py by scripts/unasync.py. Do not edit.
"""The handle of an operation: run a function, decorate one, or run a block. And the loop that drives attempts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from holdfast.canonical import digest
from holdfast.database.connections.connection import recognise
from holdfast.database.connections.sqlalchemy import subject_of
from holdfast.errors import OperationFailed
from holdfast.keys import OperationKey, PlainKey, as_key
from holdfast.operations.attempt import Attempt
from holdfast.operations.callers_transaction import CallersTransaction
from holdfast.operations.decide import NO_PRIOR, backoff_delay
from holdfast.operations.leased_attempt import LeasedAttempt
from holdfast.operations.op import Op, call_metered, call_with_op
from holdfast.operations.outcome import Outcome
from holdfast.operations.own_transaction import OwnTransaction, check_unused
from holdfast.operations.spec import OperationSpec
from holdfast.operations.terms import Function
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import BLOCK_CLOCK, check_callable, check_function, current_id, sleep

if TYPE_CHECKING:
    from inspect import Signature

    from holdfast.operations.run_telemetry import RunTelemetry

P = ParamSpec("P")
T = TypeVar("T")
SpecBuilder = Callable[[OperationKey | PlainKey, str | None, object], OperationSpec]
"""Builds the spec from a key, a fingerprint and a payload."""


class Operation:
    """An operation to be run: at most one effect, whatever the retries."""

    def __init__(self, build_spec: SpecBuilder, key: Any, fingerprint: str | None, tx: Any, payload: object) -> None:
        self._build_spec, self._key, self._fingerprint, self._tx = build_spec, key, fingerprint, tx
        self._payload = payload
        self._blocks: list[tuple[int, Attempt | None, Op]] = []
        """The entered blocks: the caller, the attempt (None: nothing to do), its ``op``."""

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Outcome[T]:
        """Call the function, unless the operation was done before: then the result is the recorded one. The function
        gets ``op`` if it has a parameter of that name, and the other arguments given here. Raises what the function
        raises; OperationInProgress, OperationFailed, KeyReused or PolicyDenied when it is not called."""
        check_callable(function, "function")
        return run(self._spec(), self._tx, function, args, kwargs)

    def __call__(self, function: Callable[P, T]) -> Callable[P, Outcome[T]]:
        """Decorator: every call is an operation. Its key is ``key``, or the result of ``key`` called with the
        arguments. Unless a payload was given, the arguments are the payload, with their defaults and without the
        ``self`` or ``cls`` of a method: the same key with other arguments is KeyReused.

        The types of its parameters and of its result are kept. Only that callers do not pass ``op`` cannot be said in
        types: a type checker accepts the call of a function with ``op: Op | None = None``."""
        check_callable(function, "what is decorated")
        check_function(function)
        named = function if hasattr(function, "__qualname__") else type(function)  # a functools.partial has no name
        name, signature = f"{named.__module__}.{named.__qualname__}", _signature_without_op(function)
        defaults = _defaults(signature)

        @wraps(function)
        def run_once(*args: P.args, **kwargs: P.kwargs) -> Outcome[T]:
            bound = {**defaults, **signature.bind(*args, **kwargs).arguments}  # TypeError before there is an attempt
            arguments = {each: value for each, value in bound.items() if each not in ("self", "cls")}
            key = as_key(self._key(*args, **kwargs)) if callable(self._key) else self._key
            fingerprint = self._fingerprint or digest((name, arguments), "the arguments")
            payload = [list(args), dict(kwargs)] if self._fingerprint is None else self._payload
            return run(self._build_spec(key, fingerprint, payload), self._tx, function, args, kwargs)

        return run_once

    def __enter__(self) -> Op:
        """Begin the operation for the body of the block. If it was done before, ``op.replayed`` is true and
        ``op.result`` the recorded result; otherwise the body does it and sets ``op.result``. With
        ``when_locked="skip"`` look at ``op.status``."""
        spec = self._spec()
        attempt = new_attempt(spec, self._tx)
        attempt.telemetry = new_run_telemetry(spec) if telemetry.listeners else None
        try:
            op = attempt.begin()
            if isinstance(op, Outcome):
                return self._enter_settled(spec, attempt, op)
            attempt.report_begun(op)
            try:
                attempt.check_preconditions(op)
            except BaseException as error:
                attempt.fail(op, error)
                raise
            attempt.enter()
            self._blocks.append((current_id(), attempt, op))
            if spec.meter is not None:
                from holdfast.operations.energy_clock import EnergyClock

                op._energy_clock = EnergyClock(op, spec.meter, BLOCK_CLOCK)
                op._energy_clock.start()
        except BaseException as error:
            try:
                attempt.drop()
            finally:
                if attempt.telemetry is not None:
                    attempt.telemetry.ended(error)
            raise
        return op

    def _enter_settled(self, spec: OperationSpec, attempt: Attempt, outcome: Outcome[Any]) -> Op:
        """The operation was done before, or is skipped. The body runs all the same, with the outcome in its ``op``, and
        nothing is recorded."""
        if attempt.telemetry is not None:
            attempt.telemetry.ended(outcome)
        op = Op(spec.key, NO_PRIOR, now(), attempt=outcome.attempt)
        op.replayed, op.status, op.result = outcome.replayed, outcome.status, outcome.value
        self._blocks.append((current_id(), None, op))
        return op

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        attempt, op = self._pop_block()
        if attempt is None:
            return
        result: Outcome[Any] | BaseException | None = error
        try:
            if op._energy_clock is not None:
                op._energy_clock.stop()
            problem = result = attempt.leave(error)
            if problem is None:
                result = self._succeed(attempt, op)
            else:
                attempt.fail(op, problem)
                if problem is not error:
                    raise problem
        except BaseException as raised:
            result = raised if result is None else result
            attempt.drop()
            raise
        finally:
            if result is not None and attempt.telemetry is not None:
                attempt.telemetry.ended(result)

    def _succeed(self, attempt: Attempt, op: Op) -> Outcome[Any]:
        try:
            attempt.check_postconditions(op)
            return attempt.succeed(op, op.result)
        except BaseException as error:
            attempt.fail(op, error)
            if (denied := attempt.refusal_of(error)) is not None:
                raise denied from error
            raise

    def _pop_block(self) -> tuple[Attempt | None, Op]:
        """The block that ends: the last one entered by this thread or task, or the only one, entered by another (a
        generator, for example, may be closed by another task)."""
        own = [block for block in self._blocks if block[0] == current_id()]
        if not own and len(self._blocks) != 1:
            raise RuntimeError("this operation was entered by several threads or tasks: exit it where it was entered")
        block = (own or self._blocks)[-1]
        self._blocks.remove(block)
        return block[1:]

    def _spec(self) -> OperationSpec:
        if callable(self._key):
            raise TypeError("key is a function of the arguments: use this operation as a decorator")
        return self._build_spec(self._key, self._fingerprint, self._payload)


def _signature_without_op(function: Function) -> Signature:
    """The parameters that the caller passes."""
    import inspect

    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        signature = inspect.signature(lambda *args, **kwargs: None)
    return signature.replace(parameters=[each for name, each in signature.parameters.items() if name != "op"])


def _defaults(signature: Signature) -> dict[str, Any]:
    """The defaults of parameters, except those without a digest, such as a sentinel, which no caller passes."""
    defaults = {}
    for name, parameter in signature.parameters.items():
        if parameter.default is not parameter.empty:
            with suppress(ValueError, TypeError):
                digest(parameter.default)
                defaults[name] = parameter.default
    return defaults


def new_attempt(spec: OperationSpec, tx: Any) -> Attempt:
    """An attempt under a lease; or, with ``tx``, in the caller's transaction. In autocommit mode with no transaction
    open, in one that the attempt begins and commits. RuntimeError when an operation of another thread or task runs on
    that connection. ValueError when ``join`` says otherwise than the connection."""
    spec.engine.check_usable()
    if tx is None:
        return LeasedAttempt(spec)
    connection = recognise(spec.engine.database, tx, "the log of operations is")
    connection_id = id(subject_of(tx))
    check_unused(connection_id)
    attempt: Attempt
    if connection.in_transaction() or connection.begins_by_itself():
        if spec.terms.join is False:
            raise ValueError(
                f"operation {spec.key.label!r}: join=False, and a transaction is open on tx, or begins with its next "
                "statement: give tx a connection in autocommit mode without an open transaction, or omit join, and "
                "commit after run()"
            )
        attempt = CallersTransaction(spec, connection, connection_id)
    else:
        if spec.terms.join is True:
            raise ValueError(
                f"operation {spec.key.label!r}: join=True, and tx is in autocommit mode with no transaction open: "
                "begin one before, or omit join, and the operation begins and commits its own"
            )
        attempt = OwnTransaction(spec, connection, tx, connection_id)
    if not spec.engine.schema_seen:  # our own session makes the tables, or says how to: the user's would only fail
        spec.engine.call("operation_get", {"key": spec.key.digest})
    return attempt


def new_run_telemetry(spec: OperationSpec) -> RunTelemetry:
    from holdfast.operations.run_telemetry import RunTelemetry

    return RunTelemetry(spec.key, sovereign=spec.sovereign)


def run(spec: OperationSpec, tx: Any, function: Function, args: Any, kwargs: Any) -> Outcome[Any]:
    """Run an operation: attempt it until it succeeds, or its retries are used up."""
    if not telemetry.listeners:
        return _run(spec, tx, function, args, kwargs, None)
    run_telemetry = new_run_telemetry(spec)
    try:
        outcome = _run(spec, tx, function, args, kwargs, run_telemetry)
    except BaseException as error:
        run_telemetry.ended(error)
        raise
    run_telemetry.ended(outcome)
    return outcome


def _run(
    spec: OperationSpec, tx: Any, function: Function, args: Any, kwargs: Any, run_telemetry: RunTelemetry | None
) -> Outcome[Any]:
    tries, last_error = 0, None
    while True:
        attempt = new_attempt(spec, tx)
        attempt.tries, attempt.telemetry = tries, run_telemetry
        try:
            return _run_attempt(attempt, function, args, kwargs)
        except BaseException as error:
            attempt.drop()
            spec = attempt.spec
            if not isinstance(error, Exception) or isinstance(error, OperationFailed):
                raise
            if last_error is not None and not attempt.has_begun:
                raise error from last_error  # the retry was refused: say what failed before
            if tries >= spec.terms.retry.in_this_run or not attempt.has_begun or attempt.is_remembered(error):
                raise
            last_error = error
        sleep(backoff_delay(spec.terms.retry, tries, jitter(0.0, 1.0)))
        tries += 1


def _run_attempt(attempt: Attempt, function: Function, args: Any, kwargs: Any) -> Outcome[Any]:
    """One attempt, repeated while its transaction collides with others."""
    meter = attempt.spec.meter
    while True:
        op = attempt.begin()
        if isinstance(op, Outcome):
            return op
        attempt.report_begun(op)
        try:
            attempt.enter()
            attempt.check_preconditions(op)
            if meter is None:
                value = call_with_op(function, op, *args, **kwargs)
            else:
                value = call_metered(meter, function, op, *args, **kwargs)
            attempt.check_postconditions(op)
            attempt.leave()
            return attempt.succeed(op, value)
        except BaseException as error:
            problem = attempt.leave(error) or error
            if not attempt.fail(op, problem):
                problem = attempt.refusal_of(problem) or problem
                if problem is error:
                    raise
                raise problem from error
        finally:
            if attempt.telemetry is not None:
                attempt.telemetry.attempt_left()
        if attempt.telemetry is not None:
            attempt.telemetry.collided()
        sleep(jitter(0.0, 0.01))
