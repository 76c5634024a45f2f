"""Rows of relays and of the events that sinks refused, as ``client.relays`` returns them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast.operations.events import Event
from holdfast.timestamps import as_datetime


@dataclass(frozen=True, slots=True)
class RelayRecord:
    """How far a relay has come."""

    name: str
    holder: str | None
    """The process that runs it at present."""
    told: int
    """Events that its sink has taken."""
    entries: int
    """Entries of the log that are not published yet, counted up to 100,000. An entry may have several events."""
    lag: float
    """Seconds since the oldest of them was written."""
    parked: int
    problem: str | None
    """Why its sink takes nothing at present."""
    since: datetime | None
    """Since when it takes nothing."""
    moved_at: datetime
    fence: int
    cursor: str
    """Its place in the log."""

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> RelayRecord:
        return cls(**{**row, "since": as_datetime(row["since"]), "moved_at": as_datetime(row["moved_at"])})


@dataclass(frozen=True, slots=True)
class ParkedRecord:
    """An event that a sink refused."""

    id: str
    key: str
    event: Event
    problem: str
    tries: int
    parked_at: datetime
    again: bool
    """Whether the relay will send it again."""

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> ParkedRecord:
        return cls(**{
            **row,
            "event": Event.of(json.loads(row["event"])),
            "parked_at": as_datetime(row["parked_at"]),
            "again": bool(row["again"]),
        })  # fmt: skip
