"""The result of an operation: as its caller gets it, and as a listing shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from holdfast.operations.decide import parse_error
from holdfast.operations.log import run_id
from holdfast.timestamps import as_datetime

Row = Mapping[str, Any]
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, repr=False)
class Outcome(Generic[T_co]):
    """How a run ended. ``status``: "success"; "skipped", another owner had the lock; "expired", it was done and the
    result is not kept any more (``reuse=False``); in a batch also "failed"."""

    status: Literal["success", "skipped", "expired", "failed"]
    replayed: bool
    attempt: int
    committed: bool = True
    """False when it is part of a transaction that the caller still has to commit."""
    value: T_co | None = None
    """The result, or None when there is none."""
    error: Exception | None = None
    """In a batch: why there is no result."""

    def __repr__(self) -> str:
        """Without a result when there is none, and with the other fields only where they say something."""
        fields: dict[str, object] = {"status": self.status, "attempt": self.attempt}
        if self.status == "success":
            fields["result"] = self.value
        if self.replayed:
            fields["replayed"] = True
        if not self.committed:
            fields["committed"] = False
        if self.error is not None:
            fields["error"] = self.error
        return f"Outcome({', '.join([f'{name}={value!r}' for name, value in fields.items()])})"

    @property
    def result(self) -> T_co:
        """What the function returned, now or when it ran. RuntimeError when it was skipped or has expired; its error
        when it failed."""
        if self.error is not None:
            raise self.error
        if self.status == "skipped":
            raise RuntimeError("the operation was skipped because another owner has its lock: there is no result")
        if self.status == "expired":
            raise RuntimeError("the operation was done, and its result is not kept any more")
        return self.value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """An operation in a listing of ``client.operations``. ``status``: success | failure | running | partial (its owner
    is dead, and left it half done) | undone (rolled back, and not run again since)."""

    key: str
    label: str
    status: Literal["success", "failure", "running", "partial", "undone"]
    attempt: int
    failures: int
    fence: int
    pipeline: str | None
    task: str | None
    dataset: str | None
    operation: str | None
    result_hash: str | None
    error: Mapping[str, Any] | None
    pointer: str
    """The end of its chain in the log of entries."""
    rollback: str | None
    """The name of the registered function that undoes it."""
    owner: str | None
    """The lease of its last attempt."""
    effect_started: bool
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None

    @property
    def run(self) -> str:
        """The id of the last attempt in lineage: ``run`` of its events, the runId in OpenLineage."""
        return run_id(self.key, self.attempt)

    @classmethod
    def _of(cls, row: Row) -> OperationRecord:
        status = "running" if row["alive"] else row["status"]
        times = {name: as_datetime(row[name]) for name in ("created_at", "updated_at", "expires_at")}
        error = parse_error(row["error"]) if row["error"] else None
        fields = {name: row[name] for name in cls.__slots__ if name in row}
        return cls(
            **{**fields, **times, "status": status, "error": error, "effect_started": bool(row["effect_started"])}
        )


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """What ``recover()`` did to an operation that a dead owner left. ``status``: success (its probe found the effect) |
    undone | partial (it needs a decision). ``reason``: how it was recovered, or why it was not."""

    key: str
    label: str
    status: Literal["success", "undone", "partial"]
    reason: str


def policy_fields(record: object) -> dict[str, Any]:
    """The fields of an operation's or review's record that a policy is asked with."""
    names = ("key", "label", "dataset", "operation", "pipeline", "task", "attempt", "failures")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}
