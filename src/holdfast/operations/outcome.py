"""What became of an operation, as its caller and as a listing sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from holdfast.timestamps import as_datetime

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``status``: "success", "skipped" because somebody else was at it, "expired" when it was done and
    the result is not kept any more (``reuse=False``), and in a batch "failed"."""

    status: Literal["success", "skipped", "expired", "failed"]
    replayed: bool
    attempt: int
    committed: bool = True
    """False when it is part of a transaction that was open already, now or when it ran: then the commit is the
    caller's, and until then it has not happened."""
    value: Any = field(default=None, repr=False)
    error: Exception | None = None
    """In a batch: why there is no result."""

    @property
    def result(self) -> Any:
        """What the function returned, now or when it ran; RuntimeError when it was skipped or has expired, the error if
        it failed."""
        if self.error is not None:
            raise self.error
        if self.status == "skipped":
            raise RuntimeError("the operation was skipped because somebody else was at it: there is no result")
        if self.status == "expired":
            raise RuntimeError("the operation was done, and its result is not kept any more")
        return self.value


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """An operation as ``client.operations`` shows it. ``status``: success | failure | running | partial: its owner is
    dead, and left it half done."""

    key: str
    label: str
    status: str
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
    """The name of the function that is registered to undo it."""
    owner: str | None
    """The lease that its last attempt was made under."""
    effect_started: bool
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None

    @classmethod
    def of(cls, row: Row) -> OperationRecord:
        status = "running" if row["alive"] else row["status"]
        times = {name: as_datetime(row[name]) for name in ("created_at", "updated_at", "expires_at")}
        error = json.loads(row["error"]) if row["error"] else None
        known = {name: row[name] for name in cls.__slots__ if name in row}
        return cls(
            **{**known, **times, "status": status, "error": error, "effect_started": bool(row["effect_started"])}
        )


def known(record: object) -> dict[str, Any]:
    """What a record of the log, or of a review, says of its operation to those who are asked about it."""
    names = ("key", "label", "dataset", "operation", "pipeline", "task", "attempt", "failures")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}
