"""Rows of reviews, as ``client.reviews`` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from holdfast.timestamps import as_datetime


@dataclass(frozen=True, slots=True)
class ReviewRecord:
    """An operation that needs, or needed, the decision of an operator.

    ``reason``: "attempts" (it has no attempts left, or was left partial), "locked" (its lock was taken, and
    ``when_locked`` is "escalate") or "policy" (a rule returned Review). ``status``: "open", "approved", "rejected",
    "reset", or "done" (the operation has succeeded since, and no decision is needed).
    """

    id: int
    key: str
    label: str
    dataset: str | None
    operation: str | None
    reason: str
    detail: str
    opened_at: datetime
    status: Literal["open", "approved", "rejected", "reset", "done"]
    actor: str | None
    """Who decided."""
    answer: str | None
    """The reason of the decision."""
    closed_at: datetime | None
    spent_at: datetime | None
    """When an approval was used, or when a reset lifted a rejection."""
    asked_by: str | None
    """The actor of the operation that it was opened for."""

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> ReviewRecord:
        times = {name: as_datetime(row[name]) for name in ("opened_at", "closed_at", "spent_at")}
        return cls(**{**row, **times})
