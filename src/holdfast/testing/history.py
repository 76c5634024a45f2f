"""A history of what workers did: one file a worker, one line of JSON an event, written while it happens.

    record = Recorder(folder, "worker-1")
    with record.invoke("acquire", "nightly-import") as call:
        grant = lease.try_acquire()
        call.ok(grant.fence) if grant else call.fail()

An operation is two events, invoke and completion. The invoke is written before the operation is sent, so a worker that
dies leaves an invoke without a completion. Its outcome is *unknown*: it may have happened, and it may still happen.
This module does not judge what it reads; the checker does.
"""

import itertools
import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Literal, NamedTuple, Self, get_args

from holdfast.testing.resource import Resource

Kind = Literal["invoke", "ok", "fail", "unknown", "info"]
Outcome = Literal["ok", "fail", "unknown"]
Row = dict[str, Any]

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_KINDS = frozenset(get_args(Kind))
_SUFFIX = ".jsonl"
_DATABASE = "database.json"
_MAX_LINE = 1 << 20
"""Bytes."""
_NUMBER = (int, float)
_COLUMNS = {"time": _NUMBER, "worker": str, "op": str, "name": str, "id": str, "fence": (int, NoneType), "data": dict}
_ROWS: dict[str, dict[str, Any]] = {
    "writes": {"name": str, "fence": int, "key": (str, int)},
    "takeovers": {"name": str, "fence": int, "older": int},
    "grants": {"name": str, "fence": int},
    "effects": {"name": str, "value": object},
}


def now() -> float:
    """The clock of all histories. It never steps, and all processes of a machine share it."""
    return time.clock_gettime(_CLOCK)


class Event(NamedTuple):
    """One line of a history."""

    time: float
    worker: str
    kind: Kind
    op: str
    name: str
    id: str
    fence: int | None
    data: dict[str, Any]

    def line(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))

    @classmethod
    def parse(cls, line: str | bytes) -> Self:
        event = cls(**json.loads(line))
        if event.kind not in _KINDS:
            raise ValueError(f"kind={event.kind!r}: must be one of {', '.join(sorted(_KINDS))}")
        require(event._asdict(), _COLUMNS)
        if not math.isfinite(event.time):
            raise ValueError(f"time={event.time!r}: must be a number of seconds")
        return event


def require(row: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``row`` has each of these columns, with a value of one of its types."""
    for column, types in columns.items():
        if column not in row:
            raise ValueError(f"{column} is missing")
        if not isinstance(row[column], types):
            raise ValueError(f"{column}={row[column]!r} is a {type(row[column]).__name__}, which is the wrong type")


class RecordedOperation(NamedTuple):
    """An invoke and its completion. An unknown one completes at infinity: it may take effect at any time, or never."""

    op: str
    name: str
    worker: str
    outcome: Outcome
    fence: int | None
    invoked: float
    completed: float
    id: str
    data: dict[str, Any]

    def __str__(self) -> str:
        fence = "" if self.fence is None else f" fence {self.fence}"
        return f"{self.op} {self.name!r} {self.outcome}{fence} by {self.worker} at {span(self.invoked, self.completed)}"


class DatabaseRows(NamedTuple):
    """Rows read from the database after the run, to compare with the events."""

    writes: Sequence[Row] = ()
    """name, fence, key"""
    takeovers: Sequence[Row] = ()
    """name, fence, older: how many writes of that name with a lower fence this transaction saw"""
    grants: Sequence[Row] = ()
    """name, fence, outcome of grants that have ended"""
    timelines: Sequence[Any] = ()
    all_grants: bool = False
    """Whether ``grants`` has all grants that ended, and not only the last few."""
    sane_clocks: bool = False
    """Whether no clock was changed. Then two workers must never trust grants of the same lease at once."""
    effects: Sequence[Row] = ()
    """name, value: effects of operations"""
    set_back: bool = False
    """Whether the database was restored from a backup meanwhile, and has lost what was acknowledged since."""


class Recorder(Resource):
    """Writes the file of one worker. Safe from any thread, from any task and after a fork: a line is one append."""

    def __init__(self, folder: Path | str, worker: str) -> None:
        path = Path(folder) / f"{worker}{_SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.worker = worker
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._run = secrets.token_hex(3)
        self._numbers = itertools.count(1)
        self._drop_torn_line()

    def invoke(self, op: str, name: str, fence: int | None = None, **data: Any) -> "Pending":
        """Record that an operation is about to start, under the grant with this ``fence`` if there is one."""
        number = f"{self.worker}-{self._run}-{os.getpid()}-{next(self._numbers)}"
        self._write(Event(now(), self.worker, "invoke", op, name, number, fence, data))
        return Pending(self, op, name, number, fence)

    def info(self, op: str, name: str = "", fence: int | None = None, **data: Any) -> None:
        """Record something that is not an operation: a belief, a fault, a leftover."""
        self._write(Event(now(), self.worker, "info", op, name, "", fence, data))

    def complete(self, kind: Outcome, op: str, name: str, number: str, fence: int | None, data: dict[str, Any]) -> None:
        self._write(Event(now(), self.worker, kind, op, name, number, fence, data))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, event: Event) -> None:
        line = (event.line() + "\n").encode()
        if len(line) >= _MAX_LINE:
            raise ValueError(f"an event of {len(line)} bytes is too long for a history")
        if os.write(self._file, line) != len(line):
            raise OSError(f"the history of {self.worker} could not be written: is the disk full?")

    def _drop_torn_line(self) -> None:
        """Remove an unfinished last line of a killed worker with this name: our first line would be appended to it."""
        size = os.fstat(self._file).st_size
        start = max(0, size - _MAX_LINE)
        os.ftruncate(self._file, start + os.pread(self._file, _MAX_LINE, start).rfind(b"\n") + 1)


class Pending:
    """An operation that has been invoked. At the end of its block it is completed as unknown, if it was not before."""

    def __init__(self, recorder: Recorder, op: str, name: str, number: str, fence: int | None) -> None:
        self._recorder, self._op, self._name, self._number, self._fence = recorder, op, name, number, fence
        self.completed = False

    def ok(self, fence: int | None = None, **data: Any) -> None:
        """It happened."""
        self._complete("ok", fence, data)

    def fail(self, **data: Any) -> None:
        """It did not happen, and never will."""
        self._complete("fail", None, data)

    def unknown(self, **data: Any) -> None:
        """There was no answer, or one that proves nothing."""
        self._complete("unknown", None, data)

    def _complete(self, kind: Outcome, fence: int | None, data: dict[str, Any]) -> None:
        if self.completed:
            raise RuntimeError(f"{self._op} {self._name!r} ({self._number}) is completed already")
        self.completed = True
        fence = self._fence if fence is None else fence
        self._recorder.complete(kind, self._op, self._name, self._number, fence, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.completed:
            self.unknown(**({} if error is None else {"error": f"{type(error).__name__}: {error}"[:200]}))


def read(folder: Path | str) -> list[Event]:
    """The events of all workers in time order, without the unfinished last line of a killed worker.

    Raises FileNotFoundError if there is no history, ValueError if a line is damaged.
    """
    files = sorted(Path(folder).glob(f"*{_SUFFIX}"))
    if not files:
        raise FileNotFoundError(f"{folder}: there is no history here (no *{_SUFFIX})")
    return sorted((event for file in files for event in _lines(file)), key=lambda event: event.time)


def _lines(file: Path) -> Iterator[Event]:
    complete, _, _unfinished = file.read_bytes().rpartition(b"\n")
    for number, line in enumerate(complete.split(b"\n") if complete else (), 1):
        try:
            yield Event.parse(line)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {number} is not an event: {error}") from error


def operations(events: Iterable[Event]) -> list[RecordedOperation]:
    """Each invoke with its completion, in the order of the invokes. Raises ValueError if they do not match."""
    invokes: dict[str, Event] = {}
    completions: dict[str, Event] = {}
    for event in events:
        if event.kind == "info":
            continue
        same_kind = invokes if event.kind == "invoke" else completions
        if same_kind.setdefault(event.id, event) is not event:
            raise ValueError(f"{event.id} is {'invoked' if event.kind == 'invoke' else 'completed'} twice: {event}")
    if orphans := completions.keys() - invokes.keys():
        raise ValueError(f"{min(orphans)} is completed, but was never invoked")
    return [_operation(event, completions.get(id)) for id, event in invokes.items()]


def _operation(invoke: Event, completion: Event | None) -> RecordedOperation:
    fence, data = invoke.fence, invoke.data
    if completion is not None:
        fence = invoke.fence if completion.fence is None else completion.fence
        data = invoke.data | completion.data
    outcome: Outcome = "unknown"
    if completion is not None and (completion.kind == "ok" or completion.kind == "fail"):
        outcome = completion.kind
    completed = math.inf if completion is None or outcome == "unknown" else completion.time
    return RecordedOperation(
        invoke.op, invoke.name, invoke.worker, outcome, fence, invoke.time, completed, invoke.id, data
    )


def write_database(folder: Path | str, database: DatabaseRows) -> None:
    (Path(folder) / _DATABASE).write_text(json.dumps(database._asdict(), indent=1))


def read_database(folder: Path | str) -> DatabaseRows:
    """The rows stored beside the history; empty if there are none. Raises ValueError if they are damaged."""
    path = Path(folder) / _DATABASE
    if not path.exists():
        return DatabaseRows()
    try:
        document = json.loads(path.read_text())
        require({"the document": document}, {"the document": dict})
        database = DatabaseRows(**{field: document[field] for field in DatabaseRows._fields if field in document})
        require(database._asdict(), dict.fromkeys(_ROWS, (list, tuple)) | {"timelines": (list, tuple)})
        for field, columns in _ROWS.items():
            for number, row in enumerate(getattr(database, field)):
                require({f"{field}[{number}]": row}, {f"{field}[{number}]": dict})
                require(row, columns)
    except ValueError as error:
        raise ValueError(f"{path} does not describe a database: {error}") from error
    return database


def span(start: float, end: float) -> str:
    return f"{start:.6f} to {'?' if math.isinf(end) else f'{end:.6f}'}"
