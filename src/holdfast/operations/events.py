"""What others are told of operations, derived from the log: the same events with the same ids, however often.

A run is one attempt. It begins with START and ends with COMPLETE or FAIL; what the operation emitted is told right
before its COMPLETE, and only then, so nothing that failed or was left half done reaches anybody as data. UNDONE says
that a run which had ended was rolled back afterwards, with outputs if it had any. Nothing here reads a database or asks
a clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

from holdfast.operations import wal
from holdfast.operations.wal import Entry

Row = Mapping[str, Any]
NAMESPACE = UUID("6f2d2f2e-5f0b-5c0e-9a55-4b6f1f3c8f10")
UNREADABLE = "UNREADABLE"
TYPES = ("START", "MESSAGE", "COMPLETE", "FAIL", "UNDONE")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing to be told. Two events with the same ``id`` are the same, to the last byte."""

    id: str
    type: str
    """START | MESSAGE | COMPLETE | FAIL | UNDONE; what is parked may be UNREADABLE"""
    at: str
    """ISO 8601 in UTC, by the database's clock."""
    run: str
    """A UUID, the same for all events of an attempt."""
    key: str
    """The digest of the operation's key."""
    number: int
    """Of the entry in the operation's log that it comes from."""
    attempt: int
    label: str
    pipeline: str | None = None
    task: str | None = None
    dataset: str | None = None
    operation: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    """Only of what succeeded, be it undone since: nothing else has changed any data."""
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
    """Whether the dataset is a sovereign one."""
    contract: Mapping[str, Any] | None = None
    """The data contract: ``name``, ``version`` and, at the end, ``verdict``: passed | failed | unchecked."""
    energy: Mapping[str, Any] | None = None
    """What the execution is estimated to have cost, where the client was told to: ``cpu_seconds``, ``wall_seconds``,
    ``energy_joules``, ``carbon_grams``, ``method`` and its ``parameters``."""
    error: str | None = None

    @property
    def job(self) -> str:
        """What it is a run of."""
        return f"{self.pipeline}.{self.task}" if self.pipeline and self.task else self.label

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what says nothing is left out."""
        said = asdict(self).items()  # a number says something, be it 0
        told = {name: value for name, value in said if value is not None and value is not False and value != ()}
        return told if self.topic is None else {**told, "payload": self.payload}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Event:
        """From what ``as_dict`` gave. ValueError when it is none."""
        lists = {name: tuple(told[name]) for name in ("inputs", "outputs") if name in told}
        try:
            return cls(**{**told, **lists})
        except TypeError as error:
            raise ValueError(f"that is no event: {error}") from None


def unreadable(row: Row) -> Event:
    """Stands for a row of the log that is none of ours: it is parked, so that somebody sees it, and never told."""
    key, number = row["key"], row["number"]
    made = str(uuid5(NAMESPACE, f"{key}/{number}/{UNREADABLE}"))
    known = {name: row[name] for name in ("pipeline", "task", "dataset", "operation")}
    return Event(made, UNREADABLE, "", run_id(key, 0), key, number, 0, row["label"] or key, **known)


def run_id(key: str, attempt: int) -> str:
    return str(uuid5(NAMESPACE, f"{key}/{attempt}"))


def time_of(at: int) -> str:
    """Microseconds since 1970, as people and machines read them."""
    return (_EPOCH + timedelta(microseconds=at)).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class _Run:
    """What is known of an attempt."""

    said: Mapping[str, Any] = field(default_factory=dict)
    sovereign: bool = False
    open: bool = False
    done: bool = False
    held: float | None = None
    verdict: str = "unchecked"


def derive(row: Row) -> list[Event]:
    """The events of one row of the log, in order."""
    key, texts = row["key"], json.loads(row["before"] or "[]")
    before = [entry for text in texts for entry in wal.load(key, text)]
    here = wal.load(key, row["entries"])
    runs: dict[int, _Run] = {}
    for entry in before:
        _learn(runs, entry)
        _end(runs, entry)
    found: list[Event] = []
    for place, entry in enumerate(here):
        _learn(runs, entry, here[place + 1 :])
        found += _events(row, runs, entry)
        _end(runs, entry)
    return found


def kept(entries: Sequence[Entry], attempt: int) -> dict[str, Any]:
    """What has to be known of an attempt whose entries are put away, to tell of it should it be undone."""
    runs: dict[int, _Run] = {attempt: _Run()}
    for entry in entries:
        _learn(runs, entry)
    return {"said": dict(runs[attempt].said), "verdict": runs[attempt].verdict}


def _learn(runs: dict[int, _Run], entry: Entry, later: Sequence[Entry] = ()) -> None:
    """``later``: what was written together with it, of which some is about the very same moment."""
    run, told = runs.setdefault(_attempt(entry), _Run()), entry.told
    if entry.kind == "claimed":
        run.said, run.open = told, True
        run.sovereign = any(each.kind == "sovereignty" for each in later[:1])
    elif entry.kind == "sovereignty":
        run.sovereign = True
    elif entry.kind == "postcondition" and "contract" in told:
        run.verdict = "passed" if told.get("ok") else "failed"
    elif entry.kind == "archived":
        state = told.get("state", {})
        run.done, run.sovereign = state.get("status") == "success", bool(state.get("sovereignty"))
        run.said, run.verdict = told.get("said", {}), told.get("verdict", run.verdict)
    elif entry.kind in wal.ENDS:
        run.done = run.done or entry.kind == "success"
        released = (each.told.get("held") for each in later[:1] if each.kind == "lock_released")
        run.held = next(released, None)


def _end(runs: dict[int, _Run], entry: Entry) -> None:
    if entry.kind in wal.ENDS:
        runs[_attempt(entry)].open = False


def _events(row: Row, runs: dict[int, _Run], entry: Entry) -> Iterator[Event]:
    attempt, told = _attempt(entry), entry.told
    run = runs[attempt]
    if entry.kind == "claimed":
        yield _event(row, run, entry, attempt, "START")
    elif entry.kind == "success":
        emitted = [each for each in json.loads(row["outbox"] or "[]") if each[0] == attempt]
        for ordinal, (_, topic, payload) in enumerate(emitted):
            event = _event(row, run, entry, attempt, "MESSAGE", f"/{ordinal}")
            yield replace(event, topic=topic, payload=json.loads(payload))
        event = _event(row, run, entry, attempt, "COMPLETE")
        yield replace(
            event, outputs=_outputs(row, run), result_hash=entry.payload_hash, held=run.held, energy=told.get("energy")
        )
    elif entry.kind == "failure":
        event = _event(row, run, entry, attempt, "FAIL")
        yield replace(event, error=told.get("error"), held=run.held, energy=told.get("energy"))
    elif entry.kind in ("rollback", "reset"):
        by = f" by {told['actor']}: {told.get('reason')}" if told.get("actor") else ""
        died = ": its owner died" if run.open else ": it had failed"
        why = f"{'rolled back' if entry.kind == 'rollback' else 'reset'}{by or died}"
        if run.open:
            yield replace(_event(row, run, entry, attempt, "FAIL"), error=why)
        elif entry.kind == "rollback":
            outputs = _outputs(row, run) if run.done else ()
            yield replace(_event(row, run, entry, attempt, "UNDONE"), error=why, outputs=outputs)


def _event(row: Row, run: _Run, entry: Entry, attempt: int, type: str, mark: str = "") -> Event:
    said = run.said
    contract = said.get("contract")
    ended = {} if type in ("START", "MESSAGE") else {"verdict": run.verdict}
    return Event(
        str(uuid5(NAMESPACE, f"{entry.operation}/{entry.number}/{type}{mark}")), type, time_of(entry.at),
        run_id(entry.operation, attempt), entry.operation, entry.number, attempt, row["label"] or entry.operation,
        row["pipeline"], row["task"], row["dataset"], row["operation"], tuple(said.get("inputs", ())),
        checksum=row["checksum"], params_hash=row["params_hash"], fence=entry.fence, actor=said.get("actor"),
        justification=said.get("justification"), sovereignty_event=run.sovereign,
        contract=None if contract is None else {**contract, **ended},
    )  # fmt: skip


def _outputs(row: Row, run: _Run) -> tuple[str, ...]:
    return tuple(run.said.get("outputs") or ([row["dataset"]] if row["dataset"] else []))


def _attempt(entry: Entry) -> int:
    """Of a rollback: the one that is rolled back, not the one that does it."""
    attempt = entry.told.get("attempt") if entry.kind == "rollback" else None
    return attempt if isinstance(attempt, int) else entry.attempt
