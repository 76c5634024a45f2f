"""The answers of queries: the library's records, with the types and docstrings that are declared there.

A record whose fields may all be seen is answered as it is. Of the others, ``fields_of`` leaves out what is not for
clients: no token of a lease and no result of an operation is returned. A test lists the fields of every answer, so that
a field which a record gains is not answered before someone has decided that it may be.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, create_model

from holdfast import LeaseRecord, LockRecord, OperationRecord
from holdfast.records import (
    AuditRecord,
    HistoryRecord,
    LogEntry,
    ParkedRecord,
    RelayRecord,
    ReviewRecord,
    ScheduleRecord,
    ScheduleRun,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class OperatorAnswer(BaseModel):
    """Reads records and dicts. Records inside it are validated, too; their docstrings are in the OpenAPI document."""

    model_config = ConfigDict(from_attributes=True, revalidate_instances="always", use_attribute_docstrings=True)


AnswerT = TypeVar("AnswerT", bound=OperatorAnswer)


def fields_of(record: type, *, without: tuple[str, ...] = ()) -> Callable[[type[AnswerT]], type[AnswerT]]:
    """Class decorator: adds the fields of ``record``, except ``without`` and those that the answer declares itself."""
    types = get_type_hints(record)
    schema = TypeAdapter(list[record], config=OperatorAnswer.model_config).json_schema()  # type: ignore[valid-type]
    described = schema["$defs"][record.__name__]["properties"]

    def add(answer: type[AnswerT]) -> type[AnswerT]:
        left_out = {*without, *answer.model_fields}
        fields: dict[str, Any] = {
            field.name: (types[field.name], Field(description=described[field.name].get("description")))
            for field in dataclasses.fields(record)
            if field.name not in left_out
        }
        return create_model(answer.__name__, __base__=answer, __module__=answer.__module__, **fields)

    return add


class LeasePage(OperatorAnswer):
    leases: list[LeaseRecord]
    count: int
    """All that are held, on this page or not."""
    next: str | None
    """`after` for the next page; null when this is the last."""


class HistoryList(OperatorAnswer):
    history: list[HistoryRecord]


@fields_of(LockRecord)
class LockAnswer(OperatorAnswer):
    label: str
    """Its name, or its namespace and number."""


class LockList(OperatorAnswer):
    locks: list[LockAnswer]
    count: int
    """All that are held or waited for, in this list or not."""


@fields_of(OperationRecord, without=("pointer", "owner"))
class OperationAnswer(OperatorAnswer):
    pass


class OperationList(OperatorAnswer):
    operations: list[OperationAnswer]
    more: bool
    """Whether there are others, beyond `limit` or the bytes of an answer."""


def _from_microseconds(at: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at)


@fields_of(LogEntry, without=("payload",))
class LogEntryAnswer(OperatorAnswer):
    at: Annotated[datetime, BeforeValidator(_from_microseconds)]
    detail: Annotated[Any, BeforeValidator(json.loads)]


class OperationWithLog(OperationAnswer):
    wal: list[LogEntryAnswer]
    """All its entries in the log, in order."""


class LogEntryPage(OperatorAnswer):
    wal: list[LogEntryAnswer]
    next: str
    """`after` for the entries that follow, now or later."""


@fields_of(ParkedRecord, without=("event",))
class ParkedAnswer(OperatorAnswer):
    label: str = Field(validation_alias=AliasPath("event", "label"))
    type: str = Field(validation_alias=AliasPath("event", "type"))


@fields_of(RelayRecord, without=("fence", "cursor"))
class RelayAnswer(OperatorAnswer):
    refused: list[ParkedAnswer]
    """The oldest of what its sink refused."""


class RelayList(OperatorAnswer):
    relays: list[RelayAnswer]
    lag: float
    """Seconds, of the relay that is furthest behind."""


@fields_of(ScheduleRun)
class ScheduleRunAnswer(OperatorAnswer):
    lateness: float | None
    """Seconds from the slot to its first start."""


@fields_of(ScheduleRecord, without=("last",))
class ScheduleAnswer(OperatorAnswer):
    last: ScheduleRunAnswer | None
    """What became of its last slot."""


class ScheduleList(OperatorAnswer):
    schedules: list[ScheduleAnswer]
    count: int


class ScheduleRunList(OperatorAnswer):
    runs: list[ScheduleRunAnswer]


class ReviewList(OperatorAnswer):
    reviews: list[ReviewRecord]
    more: bool
    """Whether there are others, beyond `limit` or the bytes of an answer."""


@fields_of(LeaseRecord, without=("kind", "host", "pid", "info", "waiting"))
class GateAnswer(OperatorAnswer):
    timed: bool
    """Open for a stated time; else a window, which closes with the work in it."""
    reason: str | None


class GateList(OperatorAnswer):
    gates: list[GateAnswer]


class AuditList(OperatorAnswer):
    audit: list[AuditRecord]
    more: bool
    """Whether there are others, beyond `limit` or the bytes of an answer."""
