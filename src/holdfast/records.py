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
            row["name"], row["holder"], row["fence"], when(row["acquired_at"]), when(row["expires_at"]),
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
        return cls(**{**row, "acquired_at": when(row["acquired_at"]), "ended_at": when(row["ended_at"])})


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Something that an operator did, or tried to do."""

    id: int
    at: datetime
    actor: str
    role: str | None
    """Whom the server knows the actor as; None on SQLite."""
    action: str
    subject: str
    reason: str
    fence: int | None
    """Of the lease under which it was done."""
    detail: Any
    outcome: str | None
    ended_at: datetime | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> AuditRecord:
        detail = row["detail"]
        return cls(**{
            **row,
            "at": when(row["at"]),
            "detail": json.loads(detail) if isinstance(detail, str) else detail,
            "ended_at": when(row["ended_at"]),
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReviewRecord:
    """An operation that somebody has to look at, or has. ``reason``: "attempts" (it failed as often as it may, or was
    left half done), "locked" (somebody else was at it, and that was to be escalated) or "policy". ``status``: open |
    approved | rejected | reset | done: there is nothing left to decide, for the operation was done since."""

    id: int
    key: str
    label: str
    dataset: str | None
    operation: str | None
    reason: str
    detail: str
    opened_at: datetime
    status: str
    actor: str | None
    """Who has answered."""
    answer: str | None
    """Why so."""
    closed_at: datetime | None
    spent_at: datetime | None
    """Of an approval, when it was used; of a rejection, when a reset lifted it."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> ReviewRecord:
        times = {name: when(row[name]) for name in ("opened_at", "closed_at", "spent_at")}
        return cls(**{**row, **times})


@dataclass(frozen=True, slots=True)
class LockRecord:
    """An advisory lock that a session holds or waits for, whoever took it, as ``client.locks`` shows it.

    A lock by name has ``name``, one by ``(namespace, number)`` has ``namespace`` and ``entity_id``. The locks of other
    programs have no name, and a namespace that is a number. What may not be seen is None.
    """

    pid: int | None
    application_name: str | None
    state: str | None
    query_start: datetime | None
    namespace: str | None
    entity_id: int
    """The number, or the 64 bits that a name comes to."""
    name: str | None
    mode: str
    granted: bool
    duration: float | None = field(compare=False)
    """Seconds: of a session that waits, since it stood in line, anew every ten minutes; of one that holds, at least."""
    blocked_by: tuple[int, ...]
    """The pids that a session waits for, be they ahead of it in the queue."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> LockRecord:
        duration = row["duration"]
        return cls(**{
            **row,
            "query_start": when(row["query_start"]),
            "duration": None if duration is None else max(0.0, duration),
            "blocked_by": tuple(dict.fromkeys(json.loads(row["blocked_by"]))),
        })  # fmt: skip

    @property
    def label(self) -> str:
        """As people would call it."""
        if self.namespace is not None:
            return f"({self.namespace}, {self.entity_id})"
        return str(self.entity_id) if self.name is None else self.name


def when(seconds: float | None) -> Any:
    """As people read it; None where there is none."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
