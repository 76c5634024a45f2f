"""What the log says became of operations: entries folded into state and results. Nothing is executed, ever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.operations import results
from holdfast.operations.decide import describe, mended
from holdfast.operations.wal import Entry

_KEPT = (
    "status", "attempt", "fence", "effect_started", "checkpoints", "result_hash", "error", "remembered", "fingerprint",
    "failures", "open", "owner", "rollback", "keep", "version", "bucket", "resets", "sovereignty",
)  # fmt: skip
"""What is kept of a state when its entries are put away."""
_NOTHING: dict[str, Any] = {
    "effect_started": False, "checkpoints": {}, "result_hash": None, "result": None, "error": None,
    "remembered": False, "failures": 0, "open": False, "keep": None,
}  # fmt: skip
"""Where nothing is left of an attempt."""


@dataclass(frozen=True, slots=True)
class State:
    """An operation as its entries tell it. ``status``: partial | success | failure | reset; partial is also what is
    under way, because the log does not know who is alive."""

    operation: str
    status: str = "partial"
    attempt: int = 0
    fence: int = 0
    effect_started: bool = False
    """Whether the attempt under way, or the last one, may have had an effect that was not rolled back."""
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    result_hash: str | None = None
    result: bytes | None = None
    """As it was encoded; None where it was not kept, or has expired."""
    error: str | None = None
    remembered: bool = False
    """Whether the error is one that is given again, and the function not called."""
    fingerprint: str | None = None
    """Of the payload that it was last claimed with."""
    failures: int = 0
    """Attempts that came to nothing since it was begun, done or reset; what was taken up to be mended is among them."""
    open: bool = False
    """Whether it is left by an attempt that is not among these."""
    owner: str | None = None
    """The lease that it was last held under; None in a transaction."""
    rollback: str | None = None
    """The name of what undoes it."""
    keep: float | None = None
    """Seconds for which its result is kept, if not for good."""
    version: str | None = None
    bucket: str | None = None
    """The parts of its key that are nowhere else in the log."""
    resets: int = 0
    sovereignty: bool = False
    number: int = 0
    """Of the last entry."""
    at: int = 0

    @property
    def kept(self) -> bool:
        """Whether there is a result, and it has not expired."""
        return self.result is not None

    @property
    def value(self) -> Any:
        """What was returned; LookupError when no result is kept."""
        if self.result is None:
            raise LookupError(f"no result of operation {self.operation[:12]}… is kept: it is {self.status}")
        return results.decode(self.result)


def fold(entries: Iterable[Entry], before: Mapping[str, State] | None = None) -> dict[str, State]:
    """The state of every operation after these entries, which come in the order of their chain; ``before``: after those
    that came before them. Folding all at once or piece by piece is the same."""
    states = dict(before or {})
    for entry in entries:
        states[entry.operation] = step(states.get(entry.operation) or State(entry.operation), entry)
    return states


def step(state: State, entry: Entry) -> State:
    """What one entry makes of a state."""
    fence = max(state.fence, entry.fence)
    return replace(state, **{"number": entry.number, "at": entry.at, "fence": fence, **_changes(state, entry)})


def _changes(state: State, entry: Entry) -> dict[str, Any]:
    match entry.kind:
        case "claimed":
            told = entry.told
            return _NOTHING | {
                "status": "partial", "attempt": entry.attempt, "open": True, "failures": state.failures,
                "fingerprint": _text(told.get("fingerprint")), "version": state.version or told.get("version"),
                "bucket": state.bucket or told.get("bucket"),
            }  # fmt: skip
        case "lock_acquired":
            return _taken(state, entry.told, entry.attempt)
        case "effect_started":
            return {"effect_started": True}
        case "checkpoint":
            told = entry.told
            return {"checkpoints": {**state.checkpoints, str(told.get("name")): told.get("value")}}
        case "success":
            return {
                "status": "success", "result_hash": entry.payload_hash, "result": entry.payload, "error": None,
                "failures": 0, "open": False, "keep": entry.told.get("keep"),
            }  # fmt: skip
        case "failure":
            told, failures = entry.told, state.failures + state.open
            return {
                "status": "failure", "error": _text(told.get("error")), "remembered": "remembered" in told,
                "failures": failures, "open": False,
            }  # fmt: skip
        case "rollback":
            told = entry.told
            failures = state.failures + (state.open and "why" not in told)
            return _NOTHING | {"status": "failure", "error": describe(mended("rollback", told)), "failures": failures}
        case "reset":
            why = describe(mended("reset", entry.told))
            return _NOTHING | {"status": "reset", "error": why, "resets": state.resets + 1}
        case "sovereignty":
            return {"sovereignty": True}
        case "archived" if not state.attempt:  # else the entries before it are there as well
            known = entry.told.get("state")
            return {name: known[name] for name in _KEPT if name in known} if isinstance(known, dict) else {}
    return {}


def _taken(state: State, told: Mapping[str, Any], attempt: int) -> dict[str, Any]:
    """Somebody has its lock. What was under way before has come to nothing, unless it is who has just mended that, or
    who is at it from outside, and uses up no attempt; and what failed and may have had an effect is under way again, to
    be undone."""
    known = {"owner": told.get("owner"), "rollback": told.get("rollback")}
    if state.status == "partial" and state.attempt and "mended" not in told:
        outside = "outside" in told
        return known | {"failures": state.failures + (not outside), "open": outside}
    if (state.status, state.attempt) == ("failure", attempt) and state.effect_started:
        return known | {"status": "partial", "error": None}
    return known


def snapshot(state: State) -> dict[str, Any]:
    """What an ``archived`` entry says of the entries before it, so that what comes after can be folded without them."""
    return {name: getattr(state, name) for name in _KEPT}


def _text(value: object) -> str | None:
    return None if value is None else str(value)
