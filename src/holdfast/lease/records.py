"""Rows of leases and of their history, as ``client.leases`` returns them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from holdfast.names import Kind
from holdfast.timestamps import as_datetime


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A live lease. It never contains the token, which is the holder's secret."""

    name: str
    kind: Kind
    """Whose it is: the program's own ("plain"), or that of a guard, an elector, a gate, a slot, an operation or a
    relay."""
    holder: str
    fence: int
    """Rises with every acquisition."""
    acquired_at: datetime
    expires_at: datetime
    """When it is free unless renewed, by the database's clock."""
    host: str | None
    pid: int | None
    info: Mapping[str, Any]
    """What the holder's process says of itself; ``ttl`` in seconds; ``failover`` "session" if it ends with the holder's
    database session."""
    remaining: float = field(compare=False)
    """Seconds to ``expires_at``, by the database's clock at the time of the query. The local clock may differ."""
    waiting: int = field(compare=False)
    """Processes that wait for it, or for any slot of its pool. Those that wait through a pooler are not counted."""

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> LeaseRecord:
        return cls(
            row["name"], row["kind"], row["holder"], row["fence"], as_datetime(row["acquired_at"]),
            as_datetime(row["expires_at"]), row["host"], row["pid"], json.loads(row["info"] or "{}"), row["remaining"],
            row["waiting"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """A grant that has ended: who held which lease, from when to when, and how it ended."""

    name: str
    holder: str
    role: str | None
    """The database role that took it; None on SQLite."""
    host: str | None
    pid: int | None
    fence: int
    acquired_at: datetime
    ended_at: datetime
    outcome: Literal["released", "expired", "session_lost", "reentered", "forced"]
    actor: str | None
    """The operator who took it away, or None."""
    reason: str | None

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> HistoryRecord:
        return cls(**{**row, "acquired_at": as_datetime(row["acquired_at"]), "ended_at": as_datetime(row["ended_at"])})
