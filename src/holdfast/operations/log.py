"""The log of operations as values: entries, the hash chain of an operation, its state, and what proves it.

    wal_pointer of the row ──────────────────────────────┐
    entry 1 ◄─ hash ─ entry 2 ◄─ hash ─ entry 3 ◄─ hash ─┘

Every entry carries the hash of the entry before it, and the row of the operation points at the last one. A changed,
missing, added or moved entry is detected. Rewriting the whole chain together with its pointer, or deleting both, is
detected only with a copy kept elsewhere (an archive, a pointer). Results are hashed apart from the entries, so a result
can expire while its chain stays provable.

Nothing here reads a database, reads a clock, or calls a function of the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from json.encoder import encode_basestring_ascii
from typing import Any, Literal, NamedTuple, get_args

from holdfast.errors import CursorExpired
from holdfast.keys import digest_of, digest_of_text, label_of
from holdfast.operations import result_codec
from holdfast.operations.decide import Prior, correction_error, format_error, parse_error

Row = Mapping[str, Any]
Kind = Literal[
    "claimed", "lock_acquired", "lock_released", "precondition", "effect_started", "checkpoint", "postcondition",
    "success", "failure", "rollback", "reset", "sovereignty", "archived",
]  # fmt: skip
KINDS: tuple[str, ...] = get_args(Kind)
ENDS = ("success", "failure", "rollback", "reset")
"""The kinds that end an attempt."""
_LATEST = 250_000_000_000_000_000
"""In microseconds: a time that a datetime can have."""
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


# Entries


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One event in the life of an operation. ``detail`` is JSON, kept as the text that was hashed."""

    operation: str
    number: int
    """Position in the chain, from 1."""
    kind: str
    attempt: int
    fence: int
    at: int
    """Microseconds since 1970, by the database's clock."""
    detail: str
    payload_hash: str | None
    previous: str
    """The hash of the entry before; empty in the first."""
    hash: str
    payload: bytes | None = None
    """The bytes behind ``payload_hash``; None when they have expired or were not fetched."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """``detail``, parsed; empty when it is not a JSON object."""
        try:
            fields = json.loads(self.detail)
        except (ValueError, RecursionError):
            return {}
        return fields if isinstance(fields, dict) else {}

    @property
    def pointer(self) -> str:
        """The value of ``wal_pointer`` while this is the last entry."""
        return f"{self.number}:{self.hash}"

    @property
    def run(self) -> str:
        """The id of the run in lineage that this entry belongs to."""
        return run_id(self.operation, attempt_of(self))


def attempt_of(entry: LogEntry) -> int:
    """The attempt that an entry is about: for a rollback, the attempt that is rolled back, which its detail names."""
    attempt = entry.fields.get("attempt") if entry.kind == "rollback" else None
    return attempt if isinstance(attempt, int) else entry.attempt


def run_id(key: str, attempt: int) -> str:
    """The id of an attempt in lineage: a UUID of version 8, whose first 12 digits are those of the operation's key. So
    an index finds the operation, see ``key_prefix``."""
    own = sha256(f"{key}/{attempt}".encode()).hexdigest()
    return f"{key[:8]}-{key[8:12]}-8{own[:3]}-8{own[3:6]}-{own[6:18]}"


def key_prefix(run: object) -> str:
    """The first digits of the key of the operation that a run is an attempt of. ValueError unless ``run`` is a UUID."""
    if not isinstance(run, str) or not _UUID.fullmatch(run):
        raise ValueError(f"run must be a UUID in lower case, as in the events of lineage, not {run!r:.80}")
    return run[:8] + run[9:13]


def hash_entry(
    operation: str, number: int, kind: str, attempt: int, fence: int, at: int, detail: str, payload_hash: str | None,
    previous: str,
) -> str:  # fmt: skip
    """The hash of an entry: sha256 of its parts, each as its length in bytes, a colon, the text and a comma, and ``-,``
    for a missing part. Simple enough to be checked by any program that has sha256."""
    n, a, f, t = str(number), str(attempt), str(fence), str(at)
    hashed = "-," if payload_hash is None else f"{len(payload_hash)}:{payload_hash},"
    text = (
        f"{len(operation)}:{operation},{len(n)}:{n},{len(kind)}:{kind},{len(a)}:{a},{len(f)}:{f},{len(t)}:{t},"
        f"{len(detail)}:{detail},{hashed}{len(previous)}:{previous},"
    )
    if text.isascii():  # nearly always, and then a character is a byte
        return sha256(text.encode()).hexdigest()
    parts = (operation, n, kind, a, f, t, detail, payload_hash, previous)
    return sha256(b"".join(map(_length_prefixed, parts))).hexdigest()


def _length_prefixed(part: str | None) -> bytes:
    if part is None:
        return b"-,"
    body = part.encode()
    return b"%d:%s," % (len(body), body)


def next_entry(
    last: LogEntry | None, operation: str, kind: Kind, *, attempt: int, fence: int, at: int, detail: str = "{}",
    payload: bytes | None = None, payload_hash: str | None = None,
) -> LogEntry:  # fmt: skip
    """The entry that follows ``last`` in a chain, or its first one."""
    number, previous = (1, "") if last is None else (last.number + 1, last.hash)
    hashed = sha256(payload).hexdigest() if payload is not None else payload_hash
    own_hash = hash_entry(operation, number, kind, attempt, fence, at, detail, hashed, previous)
    return LogEntry(operation, number, kind, attempt, fence, at, detail, hashed, previous, own_hash, payload)


def dump_entries(entries: Sequence[LogEntry]) -> str:
    """Entries that are written together, as one JSON text: the hash of the entry before, the entries, the hash of the
    last. The hashes in between follow from these. Payloads are stored elsewhere. At least one entry."""
    rows = [[e.number, e.kind, e.attempt, e.fence, e.at, e.detail, e.payload_hash] for e in entries]
    return json.dumps([entries[0].previous, *rows, entries[-1].hash], separators=(",", ":"))


def parse_entries(operation: str, text: str) -> list[LogEntry]:
    """The entries of such a text; their hashes are not checked here, see ``verify_chain``. ValueError when the text has
    another form."""
    entries: list[LogEntry] = []
    try:
        previous, *rows, last = json.loads(text) or ("", "")
        for number, kind, attempt, fence, at, detail, payload_hash in rows:
            numbers, texts = (number, attempt, fence, at), (kind, detail, payload_hash or "", previous, last)
            if {*map(type, numbers)} != {int} or {*map(type, texts)} != {str} or not 0 <= at < _LATEST:
                raise TypeError(f"entry {number!r:.20} of the log has a field of a wrong type: it was damaged")
            parts = (operation, number, kind, attempt, fence, at, detail, payload_hash, previous)
            previous = last if len(entries) == len(rows) - 1 else hash_entry(*parts)
            entries.append(LogEntry(*parts, previous))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the log of operation {operation[:12]}… holds a text that is not a list of entries: {error}"
        ) from None
    return entries


# Writing: the end of a chain, for the process that extends it
#
# hot: every operation builds five or six entries, so these functions build the JSON and the hashed text as strings
# instead of making LogEntry objects; see ``bench operation``. ``hash_entry`` and ``dump_entries`` define the format.

_to_json = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would build an encoder at every call

EncodedEntry = tuple[str, str]
"""The text that is hashed, without operation and previous hash; and the JSON text that is stored."""


class ChainUpdate(NamedTuple):
    """Entries to write, and the pointer that the row must have for that."""

    expected: str | None
    pointer: str
    number: int
    entries: str


PendingEntry = tuple[str, int, int, float, Mapping[str, Any] | str | None, str | None]
"""The arguments of ``encode_entry`` without the number: kind, attempt, fence, at, detail, payload_hash."""


class Chain:
    """Collects the entries of one operation until they are written together."""

    __slots__ = ("_hash", "_mark", "_number", "_pointer", "_prefix", "_sent_hash", "_sent_number", "entries")

    def __init__(self, operation: str, pointer: str | None) -> None:
        number, _, self._hash = (pointer or "0:").partition(":")
        self._prefix, self._pointer, self._number = hash_prefix(operation), pointer, int(number)
        self.entries: list[PendingEntry] = []
        """Those that are not written yet."""
        self._mark: int | None = None

    @property
    def next_number(self) -> int:
        return self._number + len(self.entries) + 1

    def mark(self) -> None:
        """Entries from here on can be taken back with ``discard_marked``."""
        self._mark = len(self.entries)

    def discard_marked(self) -> None:
        """Drop the entries added since ``mark``, if it was called."""
        del self.entries[len(self.entries) if self._mark is None else self._mark :]

    def pending(self, *more: EncodedEntry) -> ChainUpdate:
        """The entries that are not written yet, encoded and hashed. ``more``: entries that were encoded once for many
        chains, from ``next_number`` on."""
        first = self._number + 1
        encoded = [encode_entry(number, *entry) for number, entry in enumerate(self.entries, first)]
        encoded += more
        self._sent_number = self._number + len(encoded)
        self._sent_hash, text = link_entries(self._prefix, self._hash, encoded)
        return ChainUpdate(self._pointer, f"{self._sent_number}:{self._sent_hash}", first, text)

    def confirm(self) -> None:
        """What ``pending`` returned last is written. Entries added since stay pending."""
        del self.entries[: self._sent_number - self._number]
        self._number, self._hash = self._sent_number, self._sent_hash
        self._pointer = f"{self._sent_number}:{self._sent_hash}"


def hash_prefix(operation: str) -> str:
    """The first part of the hashed text of every entry of an operation."""
    return f"{len(operation.encode())}:{operation},"


def link_entries(prefix: str, previous: str, entries: Sequence[EncodedEntry]) -> tuple[str, str]:
    """Chain entries to the one with the hash ``previous``: the hash of the last, and the text of ``dump_entries``."""
    last, texts = previous, []
    for hashed, stored in entries:
        last = sha256(f"{prefix}{hashed}{len(last)}:{last},".encode()).hexdigest()
        texts.append(stored)
    return last, f'["{previous}",{"".join(texts)}"{last}"]'


def encode_entry(
    number: int, kind: str, attempt: int, fence: int, at: float, detail: Mapping[str, Any] | str | None = None,
    payload_hash: str | None = None,
) -> EncodedEntry:  # fmt: skip
    """``at``: seconds since 1970, by the database's clock. A detail that is a str is JSON already. All parts are ASCII,
    and only the detail can contain characters to escape."""
    text = encode_detail(detail)
    hashed_head, stored_head = _encode_head(number, kind, attempt, fence)
    when = str(int(at * 1_000_000))
    hashed, stored = "-", "null"
    if payload_hash is not None:
        hashed, stored = f"{len(payload_hash)}:{payload_hash}", f'"{payload_hash}"'
    return (
        f"{hashed_head}{len(when)}:{when},{len(text)}:{text},{hashed},",
        f"{stored_head}{when},{encode_basestring_ascii(text)},{stored}],",
    )


def encode_detail(detail: Mapping[str, Any] | str | None) -> str:
    """The detail of an entry as the text that is hashed. A str is JSON already."""
    return detail if isinstance(detail, str) else _to_json(detail) if detail else "{}"


@lru_cache
def _encode_head(number: int, kind: str, attempt: int, fence: int) -> EncodedEntry:
    """Cached: consecutive operations mostly differ in nothing of this."""
    parts = (str(number), kind, str(attempt), str(fence))
    return "".join([f"{len(part)}:{part}," for part in parts]), f'[{number},"{kind}",{attempt},{fence},'


# State: entries folded, nothing executed

_ARCHIVED_FIELDS = (
    "status", "attempt", "fence", "effect_started", "checkpoints", "result_hash", "error", "remembered", "fingerprint",
    "failures", "open", "owner", "rollback", "keep", "version", "bucket", "parts", "resets", "sovereignty",
)  # fmt: skip
"""The fields of a state that its ``archived`` entry carries."""
_NO_ATTEMPT: dict[str, Any] = {
    "effect_started": False, "checkpoints": {}, "result_hash": None, "result": None, "error": None,
    "remembered": False, "failures": 0, "open": False, "keep": None,
}  # fmt: skip
"""The state when nothing of an attempt is left."""


@dataclass(frozen=True, slots=True)
class OperationState:
    """The state of an operation according to its entries. ``status``: partial | success | failure | undone | reset;
    a running attempt is partial, too, because the log does not know whether its owner is alive."""

    operation: str
    status: str = "partial"
    attempt: int = 0
    fence: int = 0
    effect_started: bool = False
    """Whether the current or last attempt may have had an effect that was not rolled back."""
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    result_hash: str | None = None
    result: bytes | None = None
    """The encoded result; None when it was not kept, or has expired."""
    error: str | None = None
    remembered: bool = False
    """Whether the error is raised again instead of calling the function."""
    fingerprint: str | None = None
    """Of the payload of the last claim."""
    failures: int = 0
    """Failed attempts since the operation was new, succeeded or was reset, including dead ones."""
    open: bool = False
    """Whether an attempt without an end is not counted in ``failures`` yet."""
    owner: str | None = None
    """The lease of the last attempt; None in a transaction."""
    rollback: str | None = None
    """The name of the registered rollback function."""
    keep: float | None = None
    """Seconds for which its result is kept; None: for ever."""
    version: str | None = None
    bucket: str | None = None
    """``version`` and ``bucket`` are parts of the key of the first attempt that only the entries have."""
    parts: str | None = None
    """The digest of its parts, if the digest of the key was given."""
    resets: int = 0
    sovereignty: bool = False
    number: int = 0
    """Of the last entry."""
    at: int = 0

    @property
    def kept(self) -> bool:
        """Whether there is a result that has not expired."""
        return self.result is not None

    @property
    def value(self) -> Any:
        """What the function returned. LookupError when no result is kept."""
        if self.result is None:
            raise LookupError(f"no result of operation {self.operation[:12]}… is kept: it is {self.status}")
        return result_codec.decode(self.result)


def fold(entries: Iterable[LogEntry], before: Mapping[str, OperationState] | None = None) -> dict[str, OperationState]:
    """The state of every operation after these entries, which are in the order of their chain. ``before``: the states
    to start from; folding all at once or in pieces gives the same."""
    states = dict(before or {})
    for entry in entries:
        state = states.get(entry.operation) or OperationState(entry.operation)
        changes = {"number": entry.number, "at": entry.at, "fence": max(state.fence, entry.fence)}
        states[entry.operation] = replace(state, **{**changes, **_changes(state, entry)})
    return states


def _changes(state: OperationState, entry: LogEntry) -> dict[str, Any]:
    match entry.kind:
        case "claimed":
            fields = entry.fields
            return _NO_ATTEMPT | {
                "status": "partial", "attempt": entry.attempt, "open": True, "failures": state.failures,
                "fingerprint": _optional_text(fields.get("fingerprint")),
                **({} if state.attempt else {name: fields.get(name) for name in ("version", "bucket", "parts")}),
            }  # fmt: skip
        case "lock_acquired":
            return _lock_acquired(state, entry.fields, entry.attempt)
        case "effect_started":
            return {"effect_started": True}
        case "checkpoint":
            fields = entry.fields
            return {"checkpoints": {**state.checkpoints, str(fields.get("name")): fields.get("value")}}
        case "success":
            return {
                "status": "success", "result_hash": entry.payload_hash, "result": entry.payload, "error": None,
                "failures": 0, "open": False, "keep": entry.fields.get("keep"),
            }  # fmt: skip
        case "failure":
            fields = entry.fields
            return {
                "status": "failure", "error": _optional_text(fields.get("error")), "remembered": "remembered" in fields,
                "failures": state.failures + state.open, "open": False,
            }  # fmt: skip
        case "rollback":
            fields = entry.fields
            error = format_error(correction_error("rollback", fields))
            failures = state.failures + (state.open and "why" not in fields)
            return _NO_ATTEMPT | {"status": "undone", "error": error, "failures": failures}
        case "reset":
            error = format_error(correction_error("reset", entry.fields))
            return _NO_ATTEMPT | {"status": "reset", "error": error, "resets": state.resets + 1}
        case "sovereignty":
            return {"sovereignty": True}
        case "archived" if not state.attempt:  # else the archived entries were folded, too
            archived = entry.fields.get("state")
            if isinstance(archived, dict):
                return {name: archived[name] for name in _ARCHIVED_FIELDS if name in archived}
    return {}


def _lock_acquired(state: OperationState, fields: Mapping[str, Any], attempt: int) -> dict[str, Any]:
    """A new owner ends the attempt before it, which counts as failed. Two exceptions: ``mended``, the owner has just
    recovered that attempt; ``outside``, the owner recovers or resets, and starts no attempt. A failed attempt that may
    have had an effect is partial again while its owner undoes it."""
    changes = {"owner": fields.get("owner"), "rollback": fields.get("rollback")}
    if state.status == "partial" and state.attempt and "mended" not in fields:
        outside = "outside" in fields
        return changes | {"failures": state.failures + (not outside), "open": outside}
    if (state.status, state.attempt) == ("failure", attempt) and state.effect_started:
        return changes | {"status": "partial", "error": None}
    return changes


def archived_fields(state: OperationState) -> dict[str, Any]:
    """The state as an ``archived`` entry carries it, so that later entries can be folded without the archived ones."""
    return {name: getattr(state, name) for name in _ARCHIVED_FIELDS}


def _optional_text(value: object) -> str | None:
    return None if value is None else str(value)


# Verification of one chain


class LogProblem(NamedTuple):
    """``what``: tampered | missing | reordered | foreign | payload (differs from its hash) | head (differs from the
    pointer) | unpaired (a lock entry without its counterpart) | impossible (no attempt writes this order) | log (the
    row differs from the entries). Of lineage: missing | unknown | differs | reordered | parked | waiting."""

    what: str
    operation: str
    number: int
    """Of the entry where it shows."""
    told: str
    """The message."""

    @property
    def broken(self) -> bool:
        """Whether the log is damaged. An unpaired lock is left by a crash, and waiting events are published later."""
        return self.what not in ("unpaired", "waiting")


def verify_chain(entries: Sequence[LogEntry], *, pointer: str | None = None, running: bool = False) -> list[LogProblem]:
    """The problems of the entries of one operation, in the order in which they were read.

    ``pointer``: of the last entry, from the row or from a copy kept elsewhere. ``running``: an attempt is in progress,
    so the last lock may be unreleased.
    """
    problems = [*_link_problems(entries), *_lifecycle_problems(entries), *_lock_problems(entries, running)]
    last = entries[-1] if entries else None
    if pointer is not None and (last is None or last.pointer != pointer):
        operation, number = ("", 0) if last is None else (last.operation, last.number)
        actual = "there are no entries" if last is None else f"the last is {last.pointer[:20]}…"
        message = f"the log says that the last entry is {pointer[:20]}…; {actual}"
        problems.append(LogProblem("head", operation, number, message))
    return problems


def _link_problems(entries: Sequence[LogEntry]) -> Iterable[LogProblem]:
    before: LogEntry | None = None
    for entry in entries:
        problem = _numbering_problem(before, entry)
        if problem is not None:
            yield LogProblem(problem[0], entry.operation, entry.number, problem[1])
        elif before is not None and entry.previous != before.hash:
            yield LogProblem("tampered", entry.operation, entry.number, "it does not follow from the entry before it")
        parts = (entry.operation, entry.number, entry.kind, entry.attempt, entry.fence, entry.at, entry.detail)
        if hash_entry(*parts, entry.payload_hash, entry.previous) != entry.hash:
            yield LogProblem("tampered", entry.operation, entry.number, "its hash is not the hash of its content")
        if entry.payload is not None and sha256(entry.payload).hexdigest() != entry.payload_hash:
            yield LogProblem("payload", entry.operation, entry.number, "its payload is not the one that was hashed")
        before = entry


def _numbering_problem(before: LogEntry | None, entry: LogEntry) -> tuple[str, str] | None:
    if before is None:
        if entry.number == 1:
            return None if entry.previous == "" else ("tampered", "it is the first and refers to one before it")
        if entry.kind == "archived":
            return None
        return "missing", f"the chain begins with entry {entry.number}, and nothing says that those before are archived"
    if entry.operation != before.operation:
        return "foreign", f"it is of operation {entry.operation[:12]}…, in the chain of {before.operation[:12]}…"
    if entry.number > before.number + 1:
        return "missing", f"entries {before.number + 1} to {entry.number - 1} are missing"
    if entry.number <= before.number:
        return "reordered", f"it comes after entry {before.number}"
    return None


def _lifecycle_problems(entries: Sequence[LogEntry]) -> Iterable[LogProblem]:
    """An order of entries that no attempt writes, even if the hashes are right."""
    open_attempt: int | None = None
    latest = 0
    for entry in entries:
        message = None
        if entry.kind not in KINDS:
            message = f"there is no entry of kind {entry.kind!r}"
        elif entry.kind == "claimed":
            if entry.attempt <= latest:
                message = f"attempt {entry.attempt} is claimed after attempt {latest}"
            open_attempt = latest = max(latest, entry.attempt)
        elif entry.kind == "lock_acquired" and entry.attempt == latest:
            open_attempt = latest  # an attempt that has ended is resumed, to be undone
        elif entry.kind == "archived":
            latest, open_attempt = max(latest, entry.attempt), None
        elif entry.kind in ("success", "failure"):
            if open_attempt != entry.attempt:
                message = f"{entry.kind} of attempt {entry.attempt}, which is not in progress"
            open_attempt = None
        elif entry.kind in ("effect_started", "checkpoint", "postcondition") and open_attempt != entry.attempt:
            message = f"{entry.kind} of attempt {entry.attempt}, which is not in progress"
        elif entry.kind in ENDS:
            open_attempt = None
        if message is not None:
            yield LogProblem("impossible", entry.operation, entry.number, message)


def _lock_problems(entries: Sequence[LogEntry], running: bool) -> Iterable[LogProblem]:
    held: LogEntry | None = None
    for entry in entries:
        if entry.kind == "lock_acquired":
            if held is not None:
                yield _unpaired(held, "acquired, and not released before it was acquired again")
            held = entry
        elif entry.kind == "lock_released":
            if held is None:
                yield _unpaired(entry, "released, and not acquired before")
            held = None
    if held is not None and not running:
        yield _unpaired(held, "acquired and never released: its owner died, or lost the database")


def _unpaired(entry: LogEntry, message: str) -> LogProblem:
    return LogProblem("unpaired", entry.operation, entry.number, f"the lock of attempt {entry.attempt} was {message}")


# Verification of the whole log: chains, and the rows of their operations

_STATE_FIELDS = ("status", "attempt", "result_hash", "fingerprint", "effect_started")
_ROW_FIELDS = ("failures", "fence", "owner", "rollback", "keep")
_KEY_FIELDS = ("pipeline", "task", "dataset", "operation", "checksum", "params_hash")


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """One operation: its entries and its row. ``status`` is None when there are entries without a row."""

    operation: str
    label: str
    status: str | None
    attempt: int | None
    pointer: str | None
    alive: bool
    result: bytes | None
    result_hash: str | None
    fingerprint: str | None
    effect_started: bool
    error: str | None
    entries: Sequence[LogEntry]
    damage: str | None = None
    """Why its entries could not be parsed."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Pipeline, task, dataset and operation, from the row."""
    row: Row = field(default_factory=dict)

    def state(self) -> OperationState:
        """Its entries folded, with the result if that is kept."""
        state = fold(self.entries).get(self.operation) or OperationState(self.operation)
        kept = self.result if state.status == "success" and state.result_hash == self.result_hash else None
        return replace(state, result=kept)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``client.operations.verify()``."""

    operations: int
    entries: int
    problems: tuple[LogProblem, ...] = field(default=())

    @property
    def broken(self) -> tuple[LogProblem, ...]:
        """Problems that no crash explains."""
        return tuple(each for each in self.problems if each.broken)

    @property
    def passed(self) -> bool:
        return not self.broken


class LogVerifier:
    """Collects the problems of chains one by one: the log may not fit into memory."""

    def __init__(self) -> None:
        self._operations = self._entries = 0
        self._problems: list[LogProblem] = []

    def add(self, logged: LoggedOperation) -> None:
        self._operations += 1
        self._entries += len(logged.entries)
        self._problems += verify_operation(logged)

    def verification(self, more: Iterable[LogProblem] = ()) -> Verification:
        return Verification(self._operations, self._entries, (*self._problems, *more))


def parse_operations(
    rows: Iterable[Row], archived: Mapping[str, Sequence[LogEntry]] | None = None
) -> Iterator[LoggedOperation]:
    """From rows in the order of their keys. ``archived``: entries by key that come before those in the rows."""
    for operation, group in groupby(rows, key=lambda row: str(row["key"])):
        own_rows = list(group)
        entries: list[LogEntry] = []
        damage = None
        try:
            for row in own_rows:
                if row["entries"] is not None:
                    entries += parse_entries(operation, row["entries"])
        except ValueError as error:
            damage = str(error)
        if archived:
            entries = join_chains(archived.get(operation, ()), entries)
        first = own_rows[0]
        result = None if first["result"] is None else bytes.fromhex(first["result"])
        yield LoggedOperation(
            operation, first["label"] or operation, first["status"], first["attempt"], first["pointer"],
            bool(first["alive"]), result, first["result_hash"], first["fingerprint"], bool(first["effect_started"]),
            first["error"], entries, damage, {name: first[name] for name in _KEY_FIELDS[:4]}, first,
        )  # fmt: skip


def join_chains(before: Sequence[LogEntry], after: Sequence[LogEntry]) -> list[LogEntry]:
    """Both in sequence. Identical entries appear once: a chain may have been written to an archive and then not been
    removed from the log."""
    archived = {entry.number: entry for entry in before}
    return [*before, *(entry for entry in after if archived.get(entry.number) != entry)]


def verify_operation(logged: LoggedOperation) -> list[LogProblem]:
    """The problems of one chain, by itself and compared with its row."""
    last = logged.entries[-1].number if logged.entries else 0
    if logged.damage is not None:
        return [LogProblem("tampered", logged.operation, last, logged.damage)]
    if logged.status is None:
        return [LogProblem("missing", logged.operation, last, "there are entries of an operation that has no row")]
    problems = verify_chain(logged.entries, pointer=logged.pointer, running=logged.alive)
    if any(each.broken for each in problems):
        return [each._replace(operation=each.operation or logged.operation) for each in problems]
    state = logged.state()
    in_row, in_entries = _facts_in_row(logged), _facts_in_entries(logged, state)
    differing = [name for name in in_entries if not _is_same(in_row[name], in_entries[name])]
    if differing:
        here, there = (", ".join(f"{name} {each[name]!r:.80}" for name in differing) for each in (in_row, in_entries))
        problems.append(LogProblem("log", logged.operation, last, f"the log says {here}; its entries {there}"))
    elif not _matches_key(logged, state):
        message = "the label or the parts of the key in its row do not belong to its key"
        problems.append(LogProblem("log", logged.operation, last, message))
    elif not _has_result(logged, state):
        message = "the result that is kept is not the one that was hashed"
        problems.append(LogProblem("payload", logged.operation, last, message))
    return problems


def _facts_in_row(logged: LoggedOperation) -> dict[str, Any]:
    """What the row says about everything in ``_facts_in_entries``."""
    error = parse_error(logged.error) if logged.error else {}
    text = format_error(error) if error else None
    flags = {"error": text, "remembered": bool(error.get("remembered")), "reset": bool(error.get("reset"))}
    own = {name: logged.row[name] for name in _ROW_FIELDS}
    return {name: getattr(logged, name) for name in _STATE_FIELDS} | own | flags


def _facts_in_entries(logged: LoggedOperation, state: OperationState) -> dict[str, Any]:
    facts = {name: getattr(state, name) for name in (*_STATE_FIELDS, *_ROW_FIELDS, "error", "remembered")}
    facts["reset"] = state.status == "reset"
    if state.status == "reset":
        facts["status"] = "failure"  # the row has no status of its own for it
    facts["fence"] = logged.entries[-1].fence if logged.entries else 0
    if state.status == "success":
        del facts["effect_started"]  # certain, even if a probe and not the attempt reported it
    if state.status == "partial":
        del facts["error"]  # why the attempt could not be ended or undone is only in the row
    return facts


def _is_same(in_row: object, in_entry: object) -> bool:
    """Databases differ in how exactly they store seconds."""
    if in_row == in_entry:
        return True
    return isinstance(in_row, float) and isinstance(in_entry, int | float) and abs(in_row - in_entry) < 0.001


def _matches_key(logged: LoggedOperation, state: OperationState) -> bool:
    """Whether the key, which is a hash, is the hash of what the row says."""
    label = logged.row["label"]
    pipeline, task, dataset, operation, checksum, params_hash = parts = [logged.row[name] for name in _KEY_FIELDS]
    if not any(parts):
        return digest_of_text(label) == logged.operation
    version, bucket = state.version, state.bucket
    digest = digest_of(pipeline, task, dataset, operation, version, checksum, bucket, params_hash)
    return digest == (state.parts or logged.operation) and label == label_of(
        pipeline, task, dataset, operation, version, bucket
    )


def _has_result(logged: LoggedOperation, state: OperationState) -> bool:
    """Whether the result of a success is the hashed one. One that is kept for a limited time may be gone."""
    if logged.result is None:
        return state.status != "success" or state.keep is not None
    return sha256(logged.result).hexdigest() == logged.result_hash


# Reading the log in pages


class LogPage(NamedTuple):
    """Entries in the order of the log, and where the next page begins."""

    entries: list[LogEntry]
    cursor: str


class LogCursor(NamedTuple):
    """The position of the last row that was read. Rows are ordered by horizon, then by place."""

    space: int | None = None
    """Changes when a dump is restored or a database is copied: then the other fields mean nothing."""
    after_horizon: str | None = None
    """The transaction horizon of that row: transactions below it had ended when the row was placed."""
    after_place: int | None = None
    """The number of that row among those of its horizon."""

    @classmethod
    def parse(cls, cursor: object) -> LogCursor:
        if cursor is None:
            return cls()
        match = re.fullmatch(r"(\d+)(?:/(\d+)/(\d+))?", cursor) if isinstance(cursor, str) else None
        if match is None:
            raise ValueError(f"after must be the cursor of a page that was read, not {cursor!r:.80}")
        space, horizon, place = match.groups()
        return cls(int(space), horizon, None if place is None else int(place))

    def __str__(self) -> str:
        rest = "" if self.after_place is None else f"/{self.after_horizon}/{self.after_place}"
        return f"{self.space}{rest}"


def parse_page(cursor: LogCursor, rows: Sequence[Row]) -> LogPage:
    """The page after ``cursor``. CursorExpired when the database has not got the row that was read last.

    The first row of the answer has no key: it says that, and the space.
    """
    head, *entry_rows = rows
    if head["expired"]:
        raise CursorExpired(
            f"{cursor} is from another copy of this log, or from before a restore: read from the beginning"
        )
    entries = [entry for row in entry_rows for entry in parse_entries(row["key"], row["entries"])]
    if not entry_rows:
        return LogPage(entries, str(cursor._replace(space=head["space"])))
    last = entry_rows[-1]
    return LogPage(entries, str(LogCursor(head["space"], str(last["horizon"]), last["place"])))


# Pointers that users keep: ``number:hash``

_POINTER = re.compile(r"[0-9]+:([0-9a-f]{64})")


def hash_in_pointer(text: object) -> str | None:
    """The hash of a WAL pointer; None when the text is a key."""
    match = _POINTER.fullmatch(text) if isinstance(text, str) else None
    return None if match is None else match[1]


def unknown_pointer(pointer: str) -> LookupError:
    return LookupError(
        f"no entry of the log has the pointer {pointer}: it is of another database, or was archived; give the key of "
        "the operation instead"
    )


def check_pointer(label: str, entries: Sequence[LogEntry], pointer: str) -> None:
    """LookupError unless the attempt of this pointer may have had an effect, and is still the latest."""
    what = f"pointer {pointer} is of operation {label!r}"
    index = next((index for index, entry in enumerate(entries) if entry.pointer == pointer), None)
    if index is None:
        raise LookupError(f"{what}, and that entry was archived: give the key of the operation instead")
    [then], [now] = fold(entries[: index + 1]).values(), fold(entries).values()
    entry = entries[index]
    if not has_effect(then):
        raise LookupError(
            f"{what}, whose entry {entry.number}, {entry.kind}, leaves nothing to undo: it is {then.status}"
        )
    if not has_effect(now) or now.attempt != then.attempt:
        raise LookupError(
            f"{what} in attempt {then.attempt}, which is not the latest any more: it is {now.status} in attempt "
            f"{now.attempt} now; give its current pointer, or its key"
        )


def has_effect(state: OperationState | Prior) -> bool:
    """Whether there may be an effect to undo."""
    return state.status == "success" or state.effect_started
