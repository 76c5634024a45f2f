"""What is told of each thing, field by field. No proof of holding is in it, nor what an operation has returned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

WHEN = "2026-11-15T08:00:00Z"
_KEY = "9f2b4c6d8e0a1b3c5d7e9f0a2b4c6d8e0a1b3c5d7e9f0a2b4c6d8e0a1b3c5d7e"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def example(**fields: Any) -> ConfigDict:
    """An answer's ``model_config``: read from the library's records, and shown by such an example."""
    return ConfigDict(from_attributes=True, json_schema_extra={"examples": [fields]})


class Lease(BaseModel):
    name: str
    holder: str
    fence: int = Field(description="Rises with every acquisition.")
    host: str | None
    pid: int | None
    acquired_at: datetime
    expires_at: datetime = Field(description="When it is free if nothing renews it, by the database's clock.")
    remaining: float = Field(description="Seconds until then, when the database was asked.")
    info: dict[str, Any] = Field(description="What the holder's process says of itself; `ttl` in seconds.")
    model_config = example(
        name="nightly-import", holder="worker-1", fence=42, host="worker-1", pid=4711, acquired_at=WHEN,
        expires_at="2026-11-15T08:00:30Z", remaining=21.5, info={"label": "worker-1", "ttl": 30.0},
    )  # fmt: skip


class Leases(BaseModel):
    leases: list[Lease]
    count: int = Field(description="All that are held, on this page or not.")
    next: str | None = Field(description="`after` for the next page; null when this is the last.")


class Grant(BaseModel):
    name: str
    holder: str
    host: str | None
    pid: int | None
    fence: int
    acquired_at: datetime
    ended_at: datetime
    outcome: Literal["released", "expired", "session_lost", "reentered", "forced"]
    actor: str | None = Field(description="Who took it away, if somebody did.")
    reason: str | None
    model_config = example(
        name="nightly-import", holder="worker-1", host="worker-1", pid=4711, fence=41,
        acquired_at="2026-11-15T07:00:00Z", ended_at=WHEN, outcome="forced", actor="jane", reason="its machine is gone",
    )  # fmt: skip


class History(BaseModel):
    history: list[Grant]


class Lock(BaseModel):
    label: str = Field(description="As people would call it.")
    name: str | None
    namespace: str | None
    entity_id: int
    pid: int | None
    application_name: str | None
    state: str | None
    query_start: datetime | None
    mode: str
    granted: bool = Field(description="Held; else waited for.")
    duration: float | None = Field(description="Seconds: waited, or held for at least so long.")
    blocked_by: list[int] = Field(description="The pids of the sessions that this one waits for.")
    model_config = example(
        label="(agent, 7)", name=None, namespace="agent", entity_id=7, pid=118, application_name="holdfast",
        state="active", query_start=WHEN, mode="exclusive", granted=False, duration=1.2, blocked_by=[117],
    )  # fmt: skip


class Locks(BaseModel):
    locks: list[Lock]
    count: int = Field(description="All that are held or waited for, told here or not.")


class Operation(BaseModel):
    key: str
    label: str
    status: Literal["success", "failure", "running", "partial"]
    attempt: int
    failures: int
    fence: int
    pipeline: str | None
    task: str | None
    dataset: str | None
    operation: str | None
    result_hash: str | None
    error: dict[str, Any] | None
    rollback: str | None
    effect_started: bool
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None
    model_config = example(
        key=_KEY, label="etl/load/parcels/upsert", status="success", attempt=2, failures=1, fence=42, pipeline="etl",
        task="load", dataset="parcels", operation="upsert", result_hash=_KEY, error=None, rollback=None,
        effect_started=True, created_at=WHEN, updated_at=WHEN, expires_at=None,
    )  # fmt: skip


class Operations(BaseModel):
    operations: list[Operation]


class Entry(BaseModel):
    operation: str
    number: int
    kind: str
    attempt: int
    fence: int
    at: datetime
    detail: Any
    payload_hash: str | None
    previous: str
    hash: str
    model_config: ClassVar[ConfigDict] = example(
        operation=_KEY, number=1, kind="claimed", attempt=1, fence=42, at=WHEN, detail={"actor": "jane"},
        payload_hash=None, previous="", hash=_KEY,
    )  # fmt: skip


class OperationWithLog(Operation):
    wal: list[Entry] = Field(description="Every entry that the log has of it, in order.")


class Log(BaseModel):
    wal: list[Entry]
    next: str = Field(description="`after` for what comes next, now or later.")


class Parked(BaseModel):
    id: str
    key: str
    label: str
    type: str
    problem: str
    tries: int
    parked_at: datetime
    again: bool = Field(description="Whether it is to be told again.")


class Relay(BaseModel):
    name: str
    holder: str | None
    told: int
    entries: int = Field(description="Of the log, not told yet; counted as far as 100,000.")
    lag: float = Field(description="Seconds since the oldest of them was written.")
    parked: int
    problem: str | None
    since: datetime | None
    moved_at: datetime
    refused: list[Parked] = Field(description="The oldest of what its sink refused.")
    model_config = example(
        name="catalogue", holder="worker-1", told=1200, entries=3, lag=0.4, parked=0, problem=None, since=None,
        moved_at=WHEN, refused=[],
    )  # fmt: skip


class Outbox(BaseModel):
    relays: list[Relay]
    lag: float = Field(description="Seconds, of the relay that is furthest behind.")


class Review(BaseModel):
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
    answer: str | None
    closed_at: datetime | None
    spent_at: datetime | None
    model_config = example(
        id=3, key=_KEY, label="etl/load/parcels/upsert", dataset="parcels", operation="upsert", reason="attempts",
        detail="tried 3 times", opened_at=WHEN, status="open", actor=None, answer=None, closed_at=None, spent_at=None,
    )  # fmt: skip


class Reviews(BaseModel):
    reviews: list[Review]


class Gate(BaseModel):
    name: str
    holder: str
    fence: int
    acquired_at: datetime
    expires_at: datetime
    remaining: float
    timed: bool = Field(description="Open for a stated time; else a window, which closes with the work in it.")
    reason: str | None
    model_config = example(
        name="dot_config", holder="jane", fence=42, acquired_at=WHEN, expires_at="2026-11-15T08:10:00Z",
        remaining=480.0, timed=True, reason="new addresses",
    )  # fmt: skip


class Gates(BaseModel):
    gates: list[Gate]


class Audited(BaseModel):
    id: int
    at: datetime
    actor: str
    role: str | None
    action: str
    subject: str
    reason: str
    fence: int | None
    detail: Any
    outcome: str | None = Field(description="How it ended; null: it is under way, or nobody could tell.")
    ended_at: datetime | None
    model_config = example(
        id=17, at=WHEN, actor="jane", role="holdfast", action="lease.release", subject="nightly-import",
        reason="its machine is gone", fence=43, detail={"destructive": True}, outcome="done", ended_at=WHEN,
    )  # fmt: skip


class Audit(BaseModel):
    audit: list[Audited]


def gate(lease: Any) -> Gate:
    """From the lease behind it."""
    info = lease.info
    name = lease.name.partition(":")[2]
    told = {each: getattr(lease, each) for each in ("holder", "fence", "acquired_at", "expires_at", "remaining")}
    return Gate(name=name, timed="for" in info, reason=info.get("reason"), **told)


def entries(found: Sequence[Any]) -> list[Entry]:
    return [
        Entry(
            **{name: getattr(each, name) for name in Entry.model_fields if name not in ("at", "detail")},
            at=_EPOCH + timedelta(microseconds=each.at),
            detail=json.loads(each.detail),
        )
        for each in found
    ]
