"""The telemetry events of one run of an operation. Not imported while nothing listens."""

from __future__ import annotations

from itertools import count
from typing import Any

from holdfast.errors import KeyReused, OperationFailed, OperationInProgress, PolicyDenied
from holdfast.operations.decide import Decision, Prior
from holdfast.operations.outcome import Outcome
from holdfast.operations.terms import OnPartial
from holdfast.runtime.clock import now
from holdfast.runtime.telemetry import emit

ENERGY_FIELDS = ("cpu_seconds", "wall_seconds", "energy_joules", "carbon_grams")
"""Summed over all attempts of a run, where they are estimated."""
_numbers = count(1)


def labels(source: Any, *, sovereign: bool | None = None) -> dict[str, Any]:
    """The labels of a key or of a record of the log. A plain key has none."""
    return {
        "pipeline": source.pipeline, "task": source.task, "dataset_id": source.dataset,
        "operation_type": source.operation, "sovereignty_event": sovereign,
    }  # fmt: skip


class RunTelemetry:
    """Publishes the events of one run, from ``operation.started`` to ``operation.ended``. ``run`` is its number in this
    process, which start and end have in common."""

    __slots__ = ("_attempt", "_has_begun", "_key", "_labels", "_op", "_refused", "_since", "_total_energy", "run")

    def __init__(self, key: Any, *, sovereign: bool) -> None:
        self.run, self._since, self._key = next(_numbers), now(), key.digest
        self._labels = labels(key, sovereign=sovereign)
        self._has_begun, self._attempt = False, 0
        self._op: Any = None
        self._refused: Prior | None = None
        """The row because of which the run was refused. Published when the run ends: a review may still allow an
        attempt."""
        self._total_energy: dict[str, float] = {}
        self._publish("operation.started", run=self.run, key=self._key)

    def settled(self, decision: Decision, prior: Prior) -> None:
        """The log decides the outcome; the function is not called."""
        if decision not in (Decision.REPLAY, Decision.EXPIRED):
            self._refused = prior
            return
        self._publish("operation.found", status=prior.status)
        if decision is Decision.REPLAY:
            self._publish("operation.replayed")

    def attempt_begun(self, op: Any, prior: Prior, on_partial: OnPartial) -> None:
        """The function is about to be called; a dead attempt was recovered before."""
        self._has_begun, self._op, self._attempt, self._refused = True, op, op.attempt, None
        if prior.is_new:
            self._publish("operation.new")
        else:
            self._publish("operation.found", status=prior.status)
            self._publish("operation.retried", reason=prior.status)
            if prior.status == "partial":
                recovered = prior.effect_started and on_partial != "refuse"
                self._publish("operation.partial", fate=on_partial if recovered else "execute")
        if prior.status is not None:
            # "anew": the operation has a row, but was reset or has expired
            self._publish("operation.rewritten", reason="anew" if prior.is_new else "retry")
        self._publish("operation.begun", run=self.run, attempt=op.attempt)

    def collided(self) -> None:
        self._publish("operation.retried", reason="collision")

    def attempt_left(self) -> None:
        """The attempt is over. Called in the thread or task that began it."""
        op, self._op = self._op, None
        if op is not None:
            if op._energy is not None:
                self._total_energy = {
                    name: self._total_energy.get(name, 0.0) + op._energy[name] for name in ENERGY_FIELDS
                }
            self._publish("operation.left", run=self.run, held=op._held_seconds())

    def ended(self, result: Outcome[Any] | BaseException) -> None:
        """The run is over, with this outcome or error."""
        self.attempt_left()
        error = result if isinstance(result, BaseException) else result.error
        if error is not None:
            if self._refused is not None:
                self._publish("operation.found", status=self._refused.status)
                if self._refused.status == "partial":
                    self._publish("operation.partial", fate="refuse")
            self._publish_end(_outcome_of(error, has_begun=self._has_begun), self._attempt, error)
            return
        assert isinstance(result, Outcome)
        if result.status == "success" and not result.replayed and not self._has_begun:  # a probe reported it done
            self._publish("operation.found", status="partial")
            self._publish("operation.partial", fate="verify")
        replayed = result.replayed and result.status == "success"  # not "expired": its result is not kept any more
        self._publish_end("replayed" if replayed else result.status, result.attempt, None)

    def _publish_end(self, outcome: str, attempt: int, error: BaseException | None) -> None:
        fields = {"run": self.run, "key": self._key, "attempt": attempt, "error": error}
        seconds = now() - self._since
        self._publish("operation.ended", outcome=outcome, seconds=seconds, **fields, **self._total_energy)

    def _publish(self, event: str, **fields: Any) -> None:
        emit(event, **self._labels, **fields)


def _outcome_of(error: BaseException, *, has_begun: bool) -> str:
    if not isinstance(error, Exception):
        return "interrupted"
    if not has_begun and isinstance(error, OperationInProgress):
        return "locked"
    if not has_begun and isinstance(error, OperationFailed | KeyReused | PolicyDenied):
        return "refused"
    return "failed"
