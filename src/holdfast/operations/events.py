"""Lineage events, derived from the log: the same entries always give the same events with the same ids.

A run is one attempt. It begins with START and ends with COMPLETE or FAIL. MESSAGE events (``op.emit``) come right
before COMPLETE, and only then, so an attempt that failed or was left half done publishes no data. UNDONE says that an
ended run was rolled back afterwards, with outputs if it had any. Pure: no database, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

from holdfast.operations.log import ENDS, LogEntry, attempt_of, parse_entries, run_id

Row = Mapping[str, Any]
NAMESPACE = UUID("6f2d2f2e-5f0b-5c0e-9a55-4b6f1f3c8f10")
UNREADABLE = "UNREADABLE"
TYPES = ("START", "MESSAGE", "COMPLETE", "FAIL", "UNDONE")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Event:
    """One event to publish. Two events with the same ``id`` are the same, to the last byte."""

    id: str
    type: str
    """START | MESSAGE | COMPLETE | FAIL | UNDONE; a parked one may be UNREADABLE"""
    at: str
    """ISO 8601 in UTC, by the database's clock."""
    run: str
    """A UUID, the same for all events of an attempt. ``client.operations.find_run`` finds the operation."""
    key: str
    """The digest of the operation's key."""
    number: int
    """Of the entry in the operation's log that the event is derived from."""
    attempt: int
    label: str
    pipeline: str | None = None
    task: str | None = None
    dataset: str | None = None
    operation: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    """Only of attempts that succeeded, even if they were undone since: no other has changed data."""
    topic: str | None = None
    payload: Any = None
    checksum: str | None = None
    params_hash: str | None = None
    result_hash: str | None = None
    fence: int = 0
    held: float | None = None
    """Seconds for which the lock was held."""
    actor: str | None = None
    justification: str | None = None
    sovereignty_event: bool = False
    """Whether the dataset is sovereign."""
    contract: Mapping[str, Any] | None = None
    """The data contract: ``name``, ``version`` and, at the end, ``verdict``: passed | failed | unchecked."""
    energy: Mapping[str, Any] | None = None
    """The estimated cost of the execution, if the client has a meter: ``cpu_seconds``, ``wall_seconds``,
    ``energy_joules``, ``carbon_grams``, ``method`` and its ``parameters``."""
    error: str | None = None

    @property
    def job(self) -> str:
        """The name of the job that this is a run of."""
        return f"{self.pipeline}.{self.task}" if self.pipeline and self.task else self.label

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without empty fields. A number is never empty, and the payload of a MESSAGE may be null."""
        fields = {
            name: value
            for name, value in asdict(self).items()
            if value is not None and value is not False and value != ()
        }
        return fields if self.topic is None else {**fields, "payload": self.payload}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Event:
        """From the result of ``as_dict``. ValueError when the fields are not those of an event."""
        lists = {name: tuple(fields[name]) for name in ("inputs", "outputs") if name in fields}
        try:
            return cls(**{**fields, **lists})
        except TypeError as error:
            raise ValueError(f"not an event: {error}") from None


def unreadable(row: Row) -> Event:
    """Stands for a row of the log that cannot be parsed: it is parked for an operator, and never published."""
    key, number = row["key"], row["number"]
    event_id = str(uuid5(NAMESPACE, f"{key}/{number}/{UNREADABLE}"))
    labels = {name: row[name] for name in ("pipeline", "task", "dataset", "operation")}
    return Event(event_id, UNREADABLE, "", run_id(key, 0), key, number, 0, row["label"] or key, **labels)


def format_time(at: int) -> str:
    """Microseconds since 1970, as ISO 8601."""
    return (_EPOCH + timedelta(microseconds=at)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def derive(row: Row) -> list[Event]:
    """The events of one row of the log, in order. ValueError when the row cannot be parsed."""
    key, texts = row["key"], json.loads(row["before"] or "[]")
    runs: dict[int, _Run] = {}
    for text in texts:
        for entry in parse_entries(key, text):
            _update_run(runs, entry)
            _end_run(runs, entry)
    entries = parse_entries(key, row["entries"])
    events: list[Event] = []
    for index, entry in enumerate(entries):
        _update_run(runs, entry, entries[index + 1 :])
        events += _events_of(row, runs, entry)
        _end_run(runs, entry)
    return events


def archived_fields(entries: Sequence[LogEntry], attempt: int) -> dict[str, Any]:
    """What an ``archived`` entry must carry about an attempt, for the UNDONE event should it be rolled back."""
    runs: dict[int, _Run] = {attempt: _Run()}
    for entry in entries:
        _update_run(runs, entry)
    return {"said": dict(runs[attempt].claim), "verdict": runs[attempt].verdict}


@dataclass(slots=True)
class _Run:
    """One attempt, as far as its entries were read."""

    claim: Mapping[str, Any] = field(default_factory=dict)
    """The fields of its ``claimed`` entry."""
    is_sovereign: bool = False
    is_open: bool = False
    has_succeeded: bool = False
    held: float | None = None
    verdict: str = "unchecked"


def _update_run(runs: dict[int, _Run], entry: LogEntry, later: Sequence[LogEntry] = ()) -> None:
    """``later``: the entries that were written together with this one; the next may belong to the same event."""
    run, fields = runs.setdefault(attempt_of(entry), _Run()), entry.fields
    if entry.kind == "claimed":
        run.claim, run.is_open = fields, True
        run.is_sovereign = any(each.kind == "sovereignty" for each in later[:1])
    elif entry.kind == "sovereignty":
        run.is_sovereign = True
    elif entry.kind == "postcondition" and "contract" in fields:
        run.verdict = "passed" if fields.get("ok") else "failed"
    elif entry.kind == "archived":
        state = fields.get("state", {})
        run.has_succeeded, run.is_sovereign = state.get("status") == "success", bool(state.get("sovereignty"))
        run.claim, run.verdict = fields.get("said", {}), fields.get("verdict", run.verdict)
    elif entry.kind in ENDS:
        run.has_succeeded = run.has_succeeded or entry.kind == "success"
        released = (each.fields.get("held") for each in later[:1] if each.kind == "lock_released")
        run.held = next(released, None)


def _end_run(runs: dict[int, _Run], entry: LogEntry) -> None:
    if entry.kind in ENDS:
        runs[attempt_of(entry)].is_open = False


def _events_of(row: Row, runs: dict[int, _Run], entry: LogEntry) -> Iterator[Event]:
    attempt, fields = attempt_of(entry), entry.fields
    run = runs[attempt]
    if entry.kind == "claimed":
        yield _event(row, run, entry, attempt, "START")
    elif entry.kind == "success":
        messages = [message for message in json.loads(row["outbox"] or "[]") if message[0] == attempt]
        for ordinal, (_, topic, payload) in enumerate(messages):
            event = _event(row, run, entry, attempt, "MESSAGE", f"/{ordinal}")
            yield replace(event, topic=topic, payload=json.loads(payload))
        yield replace(
            _event(row, run, entry, attempt, "COMPLETE"), outputs=_outputs(row, run), result_hash=entry.payload_hash,
            held=run.held, energy=fields.get("energy"),
        )  # fmt: skip
    elif entry.kind == "failure":
        event = _event(row, run, entry, attempt, "FAIL")
        yield replace(event, error=fields.get("error"), held=run.held, energy=fields.get("energy"))
    elif entry.kind in ("rollback", "reset"):
        by = f" by {fields['actor']}: {fields.get('reason')}" if fields.get("actor") else ""
        cause = ": its owner died" if run.is_open else ": it had failed"
        error = f"{'rolled back' if entry.kind == 'rollback' else 'reset'}{by or cause}"
        if run.is_open:
            yield replace(_event(row, run, entry, attempt, "FAIL"), error=error)
        elif entry.kind == "rollback":
            outputs = _outputs(row, run) if run.has_succeeded else ()
            yield replace(_event(row, run, entry, attempt, "UNDONE"), error=error, outputs=outputs)


def _event(row: Row, run: _Run, entry: LogEntry, attempt: int, type: str, suffix: str = "") -> Event:
    claim = run.claim
    contract = claim.get("contract")
    verdict = {} if type in ("START", "MESSAGE") else {"verdict": run.verdict}
    return Event(
        str(uuid5(NAMESPACE, f"{entry.operation}/{entry.number}/{type}{suffix}")), type, format_time(entry.at),
        run_id(entry.operation, attempt), entry.operation, entry.number, attempt, row["label"] or entry.operation,
        row["pipeline"], row["task"], row["dataset"], row["operation"], tuple(claim.get("inputs", ())),
        checksum=row["checksum"], params_hash=row["params_hash"], fence=entry.fence, actor=claim.get("actor"),
        justification=claim.get("justification"), sovereignty_event=run.is_sovereign,
        contract=None if contract is None else {**contract, **verdict},
    )  # fmt: skip


def _outputs(row: Row, run: _Run) -> tuple[str, ...]:
    return tuple(run.claim.get("outputs") or ([row["dataset"]] if row["dataset"] else []))
