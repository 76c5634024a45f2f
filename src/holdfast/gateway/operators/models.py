"""The answers of queries, field by field, read from the attributes of the library's records.

They are declared here, and not generated from the records: a record may gain a field that clients must not see. No
token of a lease and no result of an operation is returned.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

_TIME = "2026-11-15T08:00:00Z"
_KEY = "9f2b4c6d8e0a1b3c5d7e9f0a2b4c6d8e0a1b3c5d7e9f0a2b4c6d8e0a1b3c5d7e"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def with_example(**fields: Any) -> ConfigDict:
    """The ``model_config`` of an answer: read from attributes, with an example in the OpenAPI document."""
    return ConfigDict(from_attributes=True, json_schema_extra={"examples": [fields]})


class LeaseAnswer(BaseModel):
    name: str
    holder: str
    fence: int = Field(description="Rises with every acquisition.")
    host: str | None
    pid: int | None
    acquired_at: datetime
    expires_at: datetime = Field(description="When it is free unless renewed, by the database's clock.")
    remaining: float = Field(description="Seconds until then, when the database was asked.")
    info: dict[str, Any] = Field(description="What the holder's process says of itself; `ttl` in seconds.")
    model_config = with_example(
        name="nightly-import", holder="worker-1", fence=42, host="worker-1", pid=4711, acquired_at=_TIME,
        expires_at="2026-11-15T08:00:30Z", remaining=21.5, info={"label": "worker-1", "ttl": 30.0},
    )  # fmt: skip


class LeasePage(BaseModel):
    leases: list[LeaseAnswer]
    count: int = Field(description="All that are held, on this page or not.")
    next: str | None = Field(description="`after` for the next page; null when this is the last.")


class EndedGrant(BaseModel):
    name: str
    holder: str
    host: str | None
    pid: int | None
    fence: int
    acquired_at: datetime
    ended_at: datetime
    outcome: Literal["released", "expired", "session_lost", "reentered", "forced"]
    actor: str | None = Field(description="The operator who took it away, or null.")
    reason: str | None
    model_config = with_example(
        name="nightly-import", holder="worker-1", host="worker-1", pid=4711, fence=41,
        acquired_at="2026-11-15T07:00:00Z", ended_at=_TIME, outcome="forced", actor="jane",
        reason="its machine is gone",
    )  # fmt: skip


class EndedGrantList(BaseModel):
    history: list[EndedGrant]


class LockAnswer(BaseModel):
    label: str = Field(description="Its name, or its namespace and number.")
    name: str | None
    namespace: str | None
    entity_id: int
    pid: int | None
    application_name: str | None
    state: str | None
    query_start: datetime | None
    mode: str
    granted: bool = Field(description="Held; else waited for.")
    duration: float | None = Field(description="Seconds that it was waited for, or held at least.")
    blocked_by: list[int] = Field(description="The pids of the sessions that this one waits for.")
    model_config = with_example(
        label="(agent, 7)", name=None, namespace="agent", entity_id=7, pid=118, application_name="holdfast",
        state="active", query_start=_TIME, mode="exclusive", granted=False, duration=1.2, blocked_by=[117],
    )  # fmt: skip


class LockList(BaseModel):
    locks: list[LockAnswer]
    count: int = Field(description="All that are held or waited for, in this list or not.")


class OperationAnswer(BaseModel):
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
    model_config = with_example(
        key=_KEY, label="etl/load/parcels/upsert", status="success", attempt=2, failures=1, fence=42, pipeline="etl",
        task="load", dataset="parcels", operation="upsert", result_hash=_KEY, error=None, rollback=None,
        effect_started=True, created_at=_TIME, updated_at=_TIME, expires_at=None,
    )  # fmt: skip


class OperationList(BaseModel):
    operations: list[OperationAnswer]


def _from_microseconds(at: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at)


class LogEntryAnswer(BaseModel):
    operation: str
    number: int
    kind: str
    attempt: int
    fence: int
    at: Annotated[datetime, BeforeValidator(_from_microseconds)]
    detail: Annotated[Any, BeforeValidator(json.loads)]
    payload_hash: str | None
    previous: str
    hash: str
    model_config = with_example(
        operation=_KEY, number=1, kind="claimed", attempt=1, fence=42, at=_TIME, detail={"actor": "jane"},
        payload_hash=None, previous="", hash=_KEY,
    )  # fmt: skip


class OperationWithLog(OperationAnswer):
    wal: list[LogEntryAnswer] = Field(description="All its entries in the log, in order.")


class LogEntryPage(BaseModel):
    wal: list[LogEntryAnswer]
    next: str = Field(description="`after` for the entries that follow, now or later.")


class ParkedEvent(BaseModel):
    id: str
    key: str
    label: str = Field(validation_alias=AliasPath("event", "label"))
    type: str = Field(validation_alias=AliasPath("event", "type"))
    problem: str
    tries: int
    parked_at: datetime
    again: bool = Field(description="Whether it is to be published again.")


class RelayAnswer(BaseModel):
    name: str
    holder: str | None
    told: int
    entries: int = Field(description="Entries of the log that are not published yet; counted up to 100,000.")
    lag: float = Field(description="Seconds since the oldest of them was written.")
    parked: int
    problem: str | None
    since: datetime | None
    moved_at: datetime
    refused: list[ParkedEvent] = Field(description="The oldest of what its sink refused.")
    model_config = with_example(
        name="catalogue", holder="worker-1", told=1200, entries=3, lag=0.4, parked=0, problem=None, since=None,
        moved_at=_TIME, refused=[],
    )  # fmt: skip


class RelayList(BaseModel):
    relays: list[RelayAnswer]
    lag: float = Field(description="Seconds, of the relay that is furthest behind.")


class ReviewAnswer(BaseModel):
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
    model_config = with_example(
        id=3, key=_KEY, label="etl/load/parcels/upsert", dataset="parcels", operation="upsert", reason="attempts",
        detail="tried 3 times", opened_at=_TIME, status="open", actor=None, answer=None, closed_at=None, spent_at=None,
    )  # fmt: skip


class ReviewList(BaseModel):
    reviews: list[ReviewAnswer]


class GateAnswer(BaseModel):
    name: str
    holder: str
    fence: int
    acquired_at: datetime
    expires_at: datetime
    remaining: float
    timed: bool = Field(description="Open for a stated time; else a window, which closes with the work in it.")
    reason: str | None
    model_config = with_example(
        name="dot_config", holder="jane", fence=42, acquired_at=_TIME, expires_at="2026-11-15T08:10:00Z",
        remaining=480.0, timed=True, reason="new addresses",
    )  # fmt: skip


class GateList(BaseModel):
    gates: list[GateAnswer]


class AuditAnswer(BaseModel):
    id: int
    at: datetime
    actor: str
    role: str | None
    action: str
    subject: str
    reason: str
    fence: int | None
    detail: Any
    outcome: str | None = Field(description="How it ended; null while it runs, or when its end was not recorded.")
    ended_at: datetime | None
    model_config = with_example(
        id=17, at=_TIME, actor="jane", role="holdfast", action="lease.release", subject="nightly-import",
        reason="its machine is gone", fence=43, detail={"destructive": True}, outcome="done", ended_at=_TIME,
    )  # fmt: skip


class AuditList(BaseModel):
    audit: list[AuditAnswer]
