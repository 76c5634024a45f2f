"""Rows of advisory locks, as ``client.locks`` returns them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from holdfast.timestamps import as_datetime


@dataclass(frozen=True, slots=True)
class LockRecord:
    """An advisory lock that a session holds or waits for; sessions of other programs included.

    A lock by name has ``name``, a lock by ``(namespace, number)`` has ``namespace`` and ``entity_id``. Locks of other
    programs have no name, and their namespace is a number. A field that this role may not read is None.
    """

    pid: int | None
    application_name: str | None
    state: str | None
    query_start: datetime | None
    namespace: str | None
    entity_id: int
    """The number, or the 64-bit hash of the name."""
    name: str | None
    mode: str
    granted: bool
    """Held; else waited for."""
    duration: float | None = field(compare=False)
    """Seconds that the session has waited (counted anew every ten minutes) or has held it (at least)."""
    blocked_by: tuple[int, ...]
    """The pids that a waiting session waits for: holders, and waiters before it in the queue."""

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> LockRecord:
        duration = row["duration"]
        return cls(**{
            **row,
            "query_start": as_datetime(row["query_start"]),
            "duration": None if duration is None else max(0.0, duration),
            "blocked_by": tuple(dict.fromkeys(json.loads(row["blocked_by"]))),
        })  # fmt: skip

    @property
    def label(self) -> str:
        """A readable name of the lock."""
        if self.namespace is not None:
            return f"({self.namespace}, {self.entity_id})"
        return str(self.entity_id) if self.name is None else self.name
