"""Rows of advisory locks, as ``client.locks`` returns them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from holdfast.timestamps import as_datetime


@dataclass(frozen=True, slots=True)
class LockRecord:
    """An advisory lock that a session holds or waits for; sessions of other programs included.

    A lock by name has ``name``, a lock by ``(namespace, number)`` has ``namespace`` and ``entity_id``. Locks of other
    programs have no name, and their namespace is a number. A transaction that protects a lease, or has acquired one and
    has not ended, is listed as "transaction under lease x" or "acquire of lease x". A field that this role may not read
    is None.
    """

    pid: int | None
    holder: str | None
    """``host:pid[:name]`` of the client that holds it or waits for it; the name is the application_name of its URL."""
    application_name: str | None
    """Of a client of holdfast: ``holdfast:host:pid[:name]``."""
    state: str | None
    query_start: datetime | None
    namespace: str | None
    entity_id: int
    """The number, or the 64-bit hash of the name."""
    name: str | None
    mode: str
    granted: bool
    """Held; else waited for."""
    held_since: datetime | None = field(compare=False)
    """When it was granted. None: it is waited for, it was granted less than a second ago, or a program other than
    holdfast holds it."""
    duration: float | None = field(compare=False)
    """Seconds since it was granted; while ``held_since`` is None, since the last statement of its session. Of a waiter,
    seconds that it has waited (counted anew every ten minutes)."""
    waiting: int
    """How many requests wait for this lock in all processes, those queued inside a process included. All records of a
    lock have the same number."""
    blocked_by: tuple[int, ...]
    """The pids that a waiting session waits for: holders, and waiters before it in the queue."""
    role: str | None = None
    """The database role of the session. None on SQLite."""

    @classmethod
    def _of(cls, row: Mapping[str, Any]) -> LockRecord:
        """``row``: of PostgreSQL's ``lock_list``, which has the key, too."""
        duration = row["duration"]
        return cls(**{
            **{name: value for name, value in row.items() if name not in ("pair", "key")},
            "holder": holder_of(row["application_name"]),
            "query_start": as_datetime(row["query_start"]),
            "held_since": as_datetime(row["held_since"]),
            "waiting": int(row["waiting"]),
            "duration": None if duration is None else max(0.0, duration),
            "blocked_by": tuple(dict.fromkeys(json.loads(row["blocked_by"]))),
        })  # fmt: skip

    @property
    def label(self) -> str:
        """A readable name of the lock."""
        if self.namespace is not None:
            return f"({self.namespace}, {self.entity_id})"
        return str(self.entity_id) if self.name is None else self.name

    def as_dict(self) -> dict[str, Any]:
        """All fields and the label, as JSON has them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        times = {
            name: value.isoformat(timespec="milliseconds")
            for name, value in values.items()
            if isinstance(value, datetime)
        }
        return {"label": self.label, **values, **times, "blocked_by": list(self.blocked_by)}


def holder_of(application_name: str | None) -> str | None:
    """Of a client of holdfast: its host, process and name."""
    prefix = "holdfast:"
    if application_name is None or not application_name.startswith(prefix):
        return None
    return application_name.removeprefix(prefix)
