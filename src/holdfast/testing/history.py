"""What workers did, written down as they do it: one JSON line an event, one file a worker.

    record = Recorder(folder, "worker-1")
    with record.invoke("acquire", "nightly-import") as call:
        grant = lease.try_acquire()
        call.ok(grant.fence) if grant else call.fail()

An operation is two events, invoke and completion. The invoke is on disk before the operation is sent, so a worker that
dies leaves an invoke without a completion, which counts as *unknown*: it may have happened, and it may still happen.
Nothing here judges what it reads; that is the checker's work.
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

from holdfast.testing.closing import Closing

Kind = Literal["invoke", "ok", "fail", "unknown", "info"]
Outcome = Literal["ok", "fail", "unknown"]
Row = dict[str, Any]

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_KINDS = frozenset(get_args(Kind))
_SUFFIX = ".jsonl"
_DATABASE = "database.json"
_LONGEST = 1 << 20
"""Bytes: no line is longer."""
_NUMBER = (int, float)
_COLUMNS = {"time": _NUMBER, "worker": str, "op": str, "name": str, "id": str, "fence": (int, NoneType), "data": dict}
_ROWS: dict[str, dict[str, Any]] = {
    "writes": {"name": str, "fence": int, "key": (str, int)},
    "takeovers": {"name": str, "fence": int, "older": int},
    "grants": {"name": str, "fence": int},
    "effects": {"name": str, "value": object},
}


def now() -> float:
    """The clock of all histories: never steps, and is the same for all processes of one machine."""
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


def require(found: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
    """ValueError unless each of these columns is there, and of one of its kinds."""
    for column, kinds in columns.items():
        if column not in found:
            raise ValueError(f"{column} is missing")
        if not isinstance(found[column], kinds):
            raise ValueError(f"{column}={found[column]!r} is no value for it")


class Operation(NamedTuple):
    """An invoke and its completion. One that is unknown has no end: it may take effect at any time, or never."""

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


class Database(NamedTuple):
    """The other side of the story, read from the database when all is over."""

    writes: Sequence[Row] = ()
    """name, fence, key"""
    takeovers: Sequence[Row] = ()
    """name, fence, older: the writes of that name with a lower fence that this transaction saw"""
    grants: Sequence[Row] = ()
    """name, fence, outcome of grants that have ended"""
    timelines: Sequence[Any] = ()
    all_grants: bool = False
    """Whether ``grants`` is of all that there ever were, and not of the last few."""
    sane_clocks: bool = False
    """Whether no clock was stepped or made to drift, so that no two workers may ever believe in the same lease."""
    effects: Sequence[Row] = ()
    """name, value: what operations did"""


class Recorder(Closing):
    """Writes the file of one worker. From any thread, in any task, and after a fork: a line is one write to its end."""

    def __init__(self, folder: Path | str, worker: str) -> None:
        path = Path(folder) / f"{worker}{_SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.worker = worker
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._run = secrets.token_hex(3)
        self._numbers = itertools.count(1)
        self._drop_torn_line()

    def invoke(self, op: str, name: str, fence: int | None = None, **data: Any) -> "Pending":
        """Say what is about to be done. The fence is that of the grant it is done under, if there is one."""
        number = f"{self.worker}-{self._run}-{os.getpid()}-{next(self._numbers)}"
        self._write(Event(now(), self.worker, "invoke", op, name, number, fence, data))
        return Pending(self, op, name, number, fence)

    def info(self, op: str, name: str = "", fence: int | None = None, **data: Any) -> None:
        """Something that is not an operation: a belief, a fault, what was left over."""
        self._write(Event(now(), self.worker, "info", op, name, "", fence, data))

    def complete(self, kind: Outcome, op: str, name: str, number: str, fence: int | None, data: dict[str, Any]) -> None:
        self._write(Event(now(), self.worker, kind, op, name, number, fence, data))

    def close(self) -> None:
        """Harmless a second time."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, event: Event) -> None:
        line = (event.line() + "\n").encode()
        if len(line) >= _LONGEST:
            raise ValueError(f"an event of {len(line)} bytes is too long for a history")
        if os.write(self._file, line) != len(line):
            raise OSError(f"the history of {self.worker} could not be written: is the disk full?")

    def _drop_torn_line(self) -> None:
        """What a worker of this name was writing when it was killed would spoil our first line."""
        size = os.fstat(self._file).st_size
        start = max(0, size - _LONGEST)
        os.ftruncate(self._file, start + os.pread(self._file, _LONGEST, start).rfind(b"\n") + 1)


class Pending:
    """An operation that has been invoked. As a context it is unknown at the end unless something else was said."""

    def __init__(self, recorder: Recorder, op: str, name: str, number: str, fence: int | None) -> None:
        self._recorder, self._op, self._name, self._number, self._fence = recorder, op, name, number, fence
        self.completed = False

    def ok(self, fence: int | None = None, **data: Any) -> None:
        """It certainly happened."""
        self._complete("ok", fence, data)

    def fail(self, **data: Any) -> None:
        """It certainly did not happen, and never will."""
        self._complete("fail", None, data)

    def unknown(self, **data: Any) -> None:
        """Nobody answered, or the answer cannot be relied on."""
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
    """The events of all workers in time order. The torn last line of a killed worker is no event."""
    files = sorted(Path(folder).glob(f"*{_SUFFIX}"))
    if not files:
        raise FileNotFoundError(f"{folder}: there is no history here (no *{_SUFFIX})")
    return sorted((event for file in files for event in _lines(file)), key=lambda event: event.time)


def _lines(file: Path) -> Iterator[Event]:
    whole, _, _torn = file.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else (), 1):
        try:
            yield Event.parse(line)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {number} is not an event: {error}") from error


def operations(events: Iterable[Event]) -> list[Operation]:
    """Each invoke with its completion, in the order of the invokes."""
    begun: dict[str, Event] = {}
    ended: dict[str, Event] = {}
    for event in events:
        if event.kind == "info":
            continue
        chosen = begun if event.kind == "invoke" else ended
        if chosen.setdefault(event.id, event) is not event:
            raise ValueError(f"{event.id} is {'invoked' if chosen is begun else 'completed'} twice: {event}")
    if orphans := ended.keys() - begun.keys():
        raise ValueError(f"{min(orphans)} is completed, but was never invoked")
    return [_operation(event, ended.get(number)) for number, event in begun.items()]


def _operation(invoke: Event, end: Event | None) -> Operation:
    fence, data = invoke.fence, invoke.data
    if end is not None:
        fence, data = (invoke.fence if end.fence is None else end.fence), invoke.data | end.data
    outcome: Outcome = "unknown"
    if end is not None and (end.kind == "ok" or end.kind == "fail"):
        outcome = end.kind
    until = math.inf if end is None or outcome == "unknown" else end.time
    return Operation(invoke.op, invoke.name, invoke.worker, outcome, fence, invoke.time, until, invoke.id, data)


def write_database(folder: Path | str, database: Database) -> None:
    (Path(folder) / _DATABASE).write_text(json.dumps(database._asdict(), indent=1))


def read_database(folder: Path | str) -> Database:
    """What was written beside the history; a history without it can be judged in part."""
    path = Path(folder) / _DATABASE
    if not path.exists():
        return Database()
    try:
        known = json.loads(path.read_text())
        require({"the document": known}, {"the document": dict})
        database = Database(**{field: known[field] for field in Database._fields if field in known})
        require(database._asdict(), dict.fromkeys(_ROWS, (list, tuple)) | {"timelines": (list, tuple)})
        for field, columns in _ROWS.items():
            for number, row in enumerate(getattr(database, field)):
                require({f"{field}[{number}]": row}, {f"{field}[{number}]": dict})
                require(row, columns)
    except ValueError as error:
        raise ValueError(f"{path} is not what a database said: {error}") from error
    return database


def span(start: float, end: float) -> str:
    return f"{start:.6f} to {'?' if math.isinf(end) else f'{end:.6f}'}"
