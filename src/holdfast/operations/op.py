# Generated from op_async.py by scripts/unasync.py. Do not edit.
"""``op``: the running operation, as the user's function and the body of an ``with`` block see it; and the calls
of user functions, which get ``op`` if they have a parameter of that name.

It collects the entries of its attempt in a chain. Who writes the chain is decided by the strategy: a leased attempt
writes every checkpoint at once (``_save``), a transaction writes all entries at its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.names import check_name
from holdfast.operations import result_codec
from holdfast.operations.decide import Key, Prior, format_error
from holdfast.operations.log import Chain
from holdfast.operations.terms import Function
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import CALL_CLOCK, Mutex, count_cpu, maybe_await

if TYPE_CHECKING:
    from holdfast.lease.grant import LeaseGrant
    from holdfast.operations.energy import Meter
    from holdfast.operations.energy_clock import EnergyClock


class Done(NamedTuple):
    """Returned by a probe when the effect is there, with the result that the operation had."""

    result: Any = None


class Op:
    """The running operation: the argument ``op`` of functions that have a parameter of that name, and what ``with
    client.operation(…) as op`` enters. ``key``, ``attempt`` and ``fence`` (of its lease; 0 in a transaction) identify
    the attempt."""

    # Class attributes are the defaults: most operations set none of them.
    status: str = "running"
    """In a block: "running"; "success", "skipped" or "expired" when its body has nothing to do."""
    replayed = False
    """In a block: whether the operation was done before."""
    result: Any = None
    """In a block: the result, set by its body, or the recorded one of a replay."""
    _energy: Mapping[str, Any] | None = None
    """What the function cost, set when it has ended and the client has a meter."""
    _energy_clock: EnergyClock | None = None
    """Of a block."""
    _outbox: list[tuple[str, str]] | None = None
    _has_begun = False
    """There may be an effect."""
    _is_closed = False

    def __init__(
        self, key: Key, prior: Prior, answered_at: float, *, attempt: int, fence: int = 0,
        checkpoints: Mapping[str, Any] | None = None, chain: Chain | None = None,
        save: Callable[[Op], None] | None = None, grants: Sequence[LeaseGrant] = (),
    ) -> None:  # fmt: skip
        self.key, self.attempt, self.fence = key, attempt, fence
        self.checkpoints = dict(checkpoints) if checkpoints else {}
        """Those of this attempt; for a rollback or a probe, those of the dead attempt."""
        self._chain = chain or Chain(key.digest, prior.pointer)
        self._save = save
        """Writes the pending entries; None: they are written at the end."""
        self._grants = grants
        """Of the leases under which it runs: its own, and that of a sovereign dataset. None in a transaction."""
        self._answered_at, self._server_time = answered_at, prior.now
        self._dead_prior = prior if prior.status == "partial" else None
        """The attempt that a dead owner left without an end."""

    def __repr__(self) -> str:
        return f"<operation {self.key.label!r} attempt {self.attempt}>"

    @property
    def lost(self) -> bool:
        """True once the lease of this attempt is lost, so that another attempt may run, and also when the attempt has
        ended. Always False in a transaction: there the commit is refused instead."""
        return any(grant.lost for grant in self._grants)

    def check(self) -> None:
        """Raise LeaseLost when the lease of this attempt is certainly gone, OwnershipUnknown when the database has not
        answered in time. Does nothing in a transaction."""
        for grant in self._grants:
            grant.check()

    def effect_started(self) -> None:
        """From here on there may be an effect: if this process dies, the operation is not tried again without a
        rollback or a probe.

        Called before the function, unless the operation has ``marks_effect=True``: then the function calls it.
        """
        if not self._has_begun:
            self._has_begun = True
            self._add_and_save("effect_started")

    def checkpoint(self, name: str, value: Any = None) -> None:
        """Record progress: a rollback or a probe of this attempt finds it in ``op.checkpoints``."""
        check_name(name, "name")
        if isinstance(value, bytes):
            raise ValueError(f"the value of checkpoint {name!r} must be one that JSON has, not bytes")
        result_codec.encode(value, "the value")
        self.checkpoints[name] = value
        if not self._has_begun:  # a checkpoint implies an effect
            self._has_begun = True
            self._add_entry("effect_started")
        detail = json.dumps({"name": name, "value": value}, separators=(",", ":"))  # now: the value may be mutable
        self._add_and_save("checkpoint", detail)

    def emit(self, topic: str, payload: Any) -> None:
        """Add a message to the outbox: published by a relay if the operation succeeds, and only then."""
        check_name(topic, "topic")
        self._outbox = self._outbox or []
        self._outbox.append((topic, json.dumps(payload, allow_nan=False)))

    def done(self, result: Any = None) -> Done:
        """For a probe, when the effect is there: ``return op.done(result)``."""
        result_codec.encode(result)
        return Done(result)

    # For the attempt that it belongs to

    def _outbox_json(self) -> str | None:
        return json.dumps(self._outbox) if self._outbox else None

    def _add_and_save(self, kind: str, detail: str | None = None) -> None:
        """One at a time, because the function may run several threads or tasks. RuntimeError after the end."""
        with self._mutex():
            if self._is_closed:
                raise RuntimeError(f"operation {self.key.label!r} has ended: nothing can be recorded for it any more")
            at = self._server_time + now() - self._answered_at
            self._chain.entries.append((kind, self.attempt, self.fence, at, detail, None))
            if self._save is not None:
                self._save(self)

    def _close(self) -> None:
        """Refuse further checkpoints: the function may have returned before the threads or tasks that it started."""
        with self._mutex():
            self._is_closed = True

    def _mutex(self) -> Mutex:
        mutex: Mutex = self.__dict__.setdefault("_lazy_mutex", Mutex())
        return mutex

    def _add_entry(
        self, kind: str, detail: Mapping[str, Any] | None = None, *, payload_hash: str | None = None
    ) -> None:
        if self._energy is not None and kind in ("success", "failure"):
            detail = {**(detail or {}), "energy": self._energy}
        if kind == "rollback":
            self._dead_prior = None
        at = self._server_time + now() - self._answered_at
        self._chain.entries.append((kind, self.attempt, self.fence, at, detail, payload_hash))

    def _add_claim(self, entries: list[tuple[str, dict[str, Any] | None]]) -> None:
        """Add the entries that begin an attempt. A dead attempt that was not rolled back ends as failed before."""
        dead, self._dead_prior = self._dead_prior, None
        if dead is not None:
            error = format_error(dead.error_fields) if dead.error else "its owner died"
            at = self._server_time + now() - self._answered_at
            self._chain.entries.append(("failure", dead.attempt, self.fence, at, {"error": error}, None))
        for kind, detail in entries:
            self._add_entry(kind, detail)

    def _add_release(self) -> None:
        """Add the last entry of an attempt: how long it held the lock."""
        held = now() - self._answered_at
        at, detail = self._server_time + held, f'{{"held":{held:.6f}}}'
        self._chain.entries.append(("lock_released", self.attempt, self.fence, at, detail, None))

    def _held_seconds(self) -> float:
        """Seconds since the database answered."""
        return now() - self._answered_at


# Calls of user functions


def call_with_op(function: Function, op: Op, *args: Any, **kwargs: Any) -> Any:
    """Call a user function, with ``op`` if it has a parameter of that name, wherever that stands."""
    index = op_parameter(function)
    if index is None:
        return maybe_await(function(*args, **kwargs))
    if 0 <= index <= len(args):
        return maybe_await(function(*args[:index], op, *args[index:], **kwargs))
    return maybe_await(function(*args, op=op, **kwargs))


def call_metered(meter: Meter, function: Function, op: Op, *args: Any, **kwargs: Any) -> Any:
    """The same, with its energy in ``op._energy``."""
    from holdfast.operations.energy_clock import EnergyClock

    clock = EnergyClock(op, meter, CALL_CLOCK)
    clock.start()
    try:
        return count_cpu(clock, call_with_op, function, op, *args, **kwargs)
    finally:
        clock.stop()


def op_parameter(function: Function) -> int | None:
    """The index of the parameter ``op`` among the positional ones; -1: keyword-only; None: there is none."""
    # hot: reads the code object instead of inspect.signature, which is on the path of every call (bench operation).
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return _op_parameter_by_signature(function)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if "op" not in names:
        return None
    index: int = names.index("op")
    return -1 if index >= code.co_argcount else index - hasattr(function, "__self__")  # a bound method has its self


def _op_parameter_by_signature(function: Function) -> int | None:
    import inspect

    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # written in C
        return None
    if "op" not in parameters:
        return None
    return -1 if parameters["op"].kind is inspect.Parameter.KEYWORD_ONLY else list(parameters).index("op")
