"""One row of the audit, as ``client.audit.list()`` returns it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast.timestamps import as_datetime


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Something that an operator did, or tried to do."""

    id: int
    at: datetime
    actor: str
    role: str | None
    """The database role of the actor; None on SQLite."""
    action: str
    subject: str
    reason: str
    fence: int | None
    """Of the lease under which it was done."""
    detail: Any
    outcome: str | None
    """How it ended; None while it runs, or when its end was not recorded."""
    ended_at: datetime | None

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> AuditRecord:
        detail = row["detail"]
        return cls(**{
            **row,
            "at": as_datetime(row["at"]),
            "detail": json.loads(detail) if isinstance(detail, str) else detail,
            "ended_at": as_datetime(row["ended_at"]),
        })  # fmt: skip
