"""The rows that listings return, as values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A live lease as ``client.leases`` shows it. Never the token: that is the holder's secret."""

    name: str
    holder: str
    fence: int
    acquired_at: datetime
    expires_at: datetime
    host: str | None
    pid: int | None
    info: Mapping[str, Any]
    remaining: float = field(compare=False)
    """Seconds to ``expires_at`` by the database's own clock, when it was asked; ours may differ."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> LeaseRecord:
        return cls(
            row["name"], row["holder"], row["fence"], _when(row["acquired_at"]), _when(row["expires_at"]),
            row["host"], row["pid"], json.loads(row["info"] or "{}"), row["remaining"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """A grant that has ended: who held what, when, and how it ended."""

    name: str
    holder: str
    host: str | None
    pid: int | None
    fence: int
    acquired_at: datetime
    ended_at: datetime
    outcome: str
    actor: str | None
    reason: str | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> HistoryRecord:
        return cls(**{**row, "acquired_at": _when(row["acquired_at"]), "ended_at": _when(row["ended_at"])})


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
