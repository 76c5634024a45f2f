# Generated from running_async.py by scripts/unasync.py. Do not edit.
"""An operation while it runs, as its own function sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.names import check_name
from holdfast.operations import results
from holdfast.operations.chain import Chain
from holdfast.operations.decide import Key, Prior, describe
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import Mutex

if TYPE_CHECKING:
    from holdfast.operations.metering import Metering


class Done(NamedTuple):
    """What a probe says when the effect is there, with the result that it had."""

    result: Any = None


class Running:
    """``op``: for a function that takes a parameter of that name, and for the body of a ``with``."""

    spent: Mapping[str, Any] | None = None
    """What its function cost in energy, when that is over and was to be known."""
    metering: Metering | None = None
    outbox: list[tuple[str, str]] | None = None
    replayed, status, began, _over = False, "running", False, False
    result: Any = None
    """In a ``with``: what the body says that it is, or what it was the first time."""

    def __init__(
        self, key: Key, prior: Prior, asked_at: float, *, attempt: int, fence: int = 0,
        checkpoints: Mapping[str, Any] | None = None, chain: Chain | None = None,
        save: Callable[[Running], None] | None = None,
    ) -> None:  # fmt: skip
        self.key, self.attempt, self.fence = key, attempt, fence
        self.checkpoints = dict(checkpoints) if checkpoints else {}
        """What was noted so far; for a rollback or a probe, what the attempt had noted that died."""
        self.chain = chain or Chain(key.digest, prior.pointer)
        self._save, self._asked_at, self._server_time = save, asked_at, prior.now
        self._dead = prior if prior.status == "partial" else None
        """The attempt that whoever died has left without an end."""

    def __repr__(self) -> str:
        return f"<operation {self.key.label!r} attempt {self.attempt}>"

    def effect_started(self) -> None:
        """From here on there may be an effect: should we die, it is not tried again without a rollback or a probe.

        Said by itself before the function is called, unless the operation was made with ``marks_effect=True``.
        """
        if not self.began:
            self.began = True
            self._noted("effect_started")

    def checkpoint(self, name: str, value: Any = None) -> None:
        """Note how far it has come: whoever rolls it back, or asks whether it is done, finds it in ``checkpoints``."""
        check_name(name, "name")
        if isinstance(value, bytes):
            raise ValueError(f"the value of checkpoint {name!r} must be one that JSON has, not bytes")
        results.encode(value, "the value")
        self.checkpoints[name] = value
        if not self.began:  # there would be nothing to note otherwise
            self.began = True
            self.note("effect_started")
        self._noted("checkpoint", {"name": name, "value": value})

    def emit(self, topic: str, payload: Any) -> None:
        """To be told to others: kept in the outbox together with the effect, if there is one."""
        check_name(topic, "topic")
        self.outbox = self.outbox or []
        self.outbox.append((topic, json.dumps(payload, allow_nan=False)))

    def told(self) -> str | None:
        """What was emitted, as it is written: with the success alone, or what came to nothing would be told."""
        return json.dumps(self.outbox) if self.outbox else None

    def done(self, result: Any = None) -> Done:
        """For a probe, when the effect is there: ``return op.done(result)``."""
        results.encode(result)
        return Done(result)

    def _noted(self, kind: str, detail: Mapping[str, Any] | None = None) -> None:
        """At once, and one after the other: a function may do several things at a time."""
        with self._turn():
            if self._over:
                raise RuntimeError(f"operation {self.key.label!r} is over: nothing can be noted of it any more")
            self.note(kind, detail)
            if self._save is not None:
                self._save(self)

    def over(self) -> None:
        """Nothing is noted from here on but its end: a function may have returned before all that it has begun."""
        with self._turn():
            self._over = True

    def _turn(self) -> Mutex:
        mutex: Mutex = self.__dict__.setdefault("_mutex", Mutex())
        return mutex

    def note(self, kind: str, detail: Mapping[str, Any] | None = None, *, payload_hash: str | None = None) -> None:
        if self.spent is not None and kind in ("success", "failure"):
            detail = {**(detail or {}), "energy": self.spent}
        if kind == "rollback":
            self._dead = None
        self.chain.add(kind, self.attempt, self.fence, self.time(), detail, payload_hash)

    def bury(self) -> None:
        """Before the next attempt is claimed: what was not rolled back has come to nothing as well, and is told so."""
        dead, self._dead = self._dead, None
        if dead is not None:
            why = describe(dead.told) if dead.error else "its owner died"
            self.chain.add("failure", dead.attempt, self.fence, self.time(), {"error": why})

    def released(self) -> None:
        """The last entry of an attempt: for how long it had the lock."""
        held = self.held()
        self.chain.add("lock_released", self.attempt, self.fence, self._server_time + held, f'{{"held":{held:.6f}}}')

    def time(self) -> float:
        """Seconds since 1970, by the database's clock."""
        return self._server_time + self.held()

    def held(self) -> float:
        """Seconds since the lock was asked for."""
        return now() - self._asked_at
