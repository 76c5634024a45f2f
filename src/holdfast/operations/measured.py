"""One run of an operation, as whoever listens is told of it. Nothing of this is made while nobody does."""

from __future__ import annotations

from itertools import count
from typing import Any

from holdfast.errors import KeyReused, OperationFailed, OperationInProgress, PolicyDenied
from holdfast.operations.decide import Act, Prior
from holdfast.operations.outcome import Outcome
from holdfast.operations.terms import OnPartial
from holdfast.runtime.clock import now
from holdfast.runtime.telemetry import tell

SPENT = ("cpu_seconds", "wall_seconds", "energy_joules", "carbon_grams")
"""What all attempts of a run cost together, where that is estimated."""
_runs = count(1)


def labels(about: Any, *, sovereign: bool | None = None) -> dict[str, Any]:
    """What a key, or a record of the log, says of its operation; of a plain key that is nothing."""
    return {
        "pipeline": about.pipeline, "task": about.task, "dataset_id": about.dataset,
        "operation_type": about.operation, "sovereignty_event": sovereign,
    }  # fmt: skip


class Measured:
    """``run``: the number, in this process, by which start and end belong together."""

    __slots__ = ("_attempt", "_began", "_key", "_labels", "_op", "_refused", "_since", "_spent", "run")

    def __init__(self, key: Any, *, sovereign: bool) -> None:
        self.run, self._since, self._key = next(_runs), now(), key.digest
        self._labels = labels(key, sovereign=sovereign)
        self._began, self._attempt = False, 0
        self._op: Any = None
        self._refused: Prior | None = None
        """What it was refused for: told when that is how it ends, for somebody may have approved it."""
        self._spent: dict[str, float] = {}
        self._tell("operation.started", run=self.run, key=self._key)

    def found(self, act: Act, prior: Prior) -> None:
        """The log knows it, and that is all that comes of it."""
        if act not in (Act.REPLAY, Act.EXPIRED):
            self._refused = prior
            return
        self._tell("operation.found", status=prior.status)
        if act is Act.REPLAY:
            self._tell("operation.replayed")

    def begun(self, op: Any, prior: Prior, on_partial: OnPartial) -> None:
        """Its function is about to be called; what a dead attempt left was dealt with before."""
        self._began, self._op, self._attempt, self._refused = True, op, op.attempt, None
        if prior.fresh:
            self._tell("operation.new")
        else:
            self._tell("operation.found", status=prior.status)
            self._tell("operation.retried", reason=prior.status)
            if prior.status == "partial":
                mended = prior.effect_started and on_partial != "refuse"
                self._tell("operation.partial", fate=on_partial if mended else "execute")
        if prior.status is not None:
            self._tell("operation.rewritten", reason="anew" if prior.fresh else "retry")
        self._tell("operation.begun", run=self.run, attempt=op.attempt)

    def collided(self) -> None:
        self._tell("operation.retried", reason="collision")

    def left(self) -> None:
        """The attempt is over, in the thread or task that began it."""
        op, self._op = self._op, None
        if op is not None:
            if op.spent is not None:
                self._spent = {name: self._spent.get(name, 0.0) + op.spent[name] for name in SPENT}
            self._tell("operation.left", run=self.run, held=op.held())

    def over(self, how: Outcome | BaseException) -> None:
        self.left()
        error = how if isinstance(how, BaseException) else how.error
        if error is not None:
            if self._refused is not None:
                self._tell("operation.found", status=self._refused.status)
                if self._refused.status == "partial":
                    self._tell("operation.partial", fate="refuse")
            self._end(_status(error, began=self._began), self._attempt, error)
            return
        assert isinstance(how, Outcome)
        if how.status == "success" and not how.replayed and not self._began:  # a probe has said that it is done
            self._tell("operation.found", status="partial")
            self._tell("operation.partial", fate="verify")
        replayed = how.replayed and how.status == "success"  # and not "expired": its result is kept no longer
        self._end("replayed" if replayed else how.status, how.attempt, None)

    def _end(self, outcome: str, attempt: int, error: BaseException | None) -> None:
        about = {"run": self.run, "key": self._key, "attempt": attempt, "error": error}
        self._tell("operation.ended", outcome=outcome, seconds=now() - self._since, **about, **self._spent)

    def _tell(self, event: str, **fields: Any) -> None:
        tell(event, **self._labels, **fields)


def _status(error: BaseException, *, began: bool) -> str:
    if not isinstance(error, Exception):
        return "interrupted"
    if not began and isinstance(error, OperationInProgress):
        return "locked"
    if not began and isinstance(error, OperationFailed | KeyReused | PolicyDenied):
        return "refused"
    return "failed"
