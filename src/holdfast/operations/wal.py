"""The log of operations, as values: entries, the chain that ties those of an operation together, and its proof.

Each entry carries the hash of the one before it, and the log's ``wal_pointer`` says which is the last: one that was
changed, taken out, put in or moved is found. Whoever can rewrite the whole chain and the pointer, or take out both, is
found out only by what was kept elsewhere. What a payload was, a result for one, is hashed apart, so that it can expire
while the chain stays provable. Nothing here reads a database or calls anything of the user's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal[
    "claimed", "lock_acquired", "lock_released", "precondition", "effect_started", "checkpoint", "postcondition",
    "success", "failure", "rollback", "reset", "sovereignty", "archived",
]  # fmt: skip
KINDS: tuple[str, ...] = get_args(Kind)
ENDS = ("success", "failure", "rollback", "reset")
"""What an attempt ends with."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened to an operation. ``detail`` is JSON, kept as the text it was hashed as."""

    operation: str
    number: int
    """From 1 on, in its chain."""
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
    """What ``payload_hash`` is of, unless it has expired or was not asked for."""

    @property
    def told(self) -> Mapping[str, Any]:
        """Its detail, read; empty when there is nothing in it that could be."""
        try:
            found = json.loads(self.detail)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def pointer(self) -> str:
        """What the log's ``wal_pointer`` says when this is the last."""
        return f"{self.number}:{self.hash}"


def seal(
    operation: str, number: int, kind: str, attempt: int, fence: int, at: int, detail: str, payload_hash: str | None,
    previous: str,
) -> str:  # fmt: skip
    """The hash of an entry: sha256 of its parts, each as its length in bytes, a colon, the text and a comma; of a part
    that is missing, ``-,``. So simple that anything which has sha256 can check it, without this library."""
    n, a, f, t = str(number), str(attempt), str(fence), str(at)
    hashed = "-," if payload_hash is None else f"{len(payload_hash)}:{payload_hash},"
    text = (
        f"{len(operation)}:{operation},{len(n)}:{n},{len(kind)}:{kind},{len(a)}:{a},{len(f)}:{f},{len(t)}:{t},"
        f"{len(detail)}:{detail},{hashed}{len(previous)}:{previous},"
    )
    if text.isascii():  # as nearly all are, and then a character is a byte
        return sha256(text.encode()).hexdigest()
    return sha256(b"".join(map(_sealed, (operation, n, kind, a, f, t, detail, payload_hash, previous)))).hexdigest()


def append(
    after: Entry | None, operation: str, kind: Kind, *, attempt: int, fence: int, at: int, detail: str = "{}",
    payload: bytes | None = None, payload_hash: str | None = None,
) -> Entry:  # fmt: skip
    """The entry that comes next in a chain."""
    number, previous = (1, "") if after is None else (after.number + 1, after.hash)
    hashed = sha256(payload).hexdigest() if payload is not None else payload_hash
    sealed = seal(operation, number, kind, attempt, fence, at, detail, hashed, previous)
    return Entry(operation, number, kind, attempt, fence, at, detail, hashed, previous, sealed, payload)


def dump(entries: Sequence[Entry]) -> str:
    """What was written together, as one JSON text: the hash of the entry before, the entries, the hash of the last.
    The hashes in between follow from these. Not the payloads, which are kept elsewhere."""
    rows = [[e.number, e.kind, e.attempt, e.fence, e.at, e.detail, e.payload_hash] for e in entries]
    return json.dumps([entries[0].previous, *rows, entries[-1].hash], separators=(",", ":"))


def load(operation: str, text: str) -> list[Entry]:
    """The entries in such a text, as they are said to be: it is ``verify`` that doubts. ValueError when it is none."""
    entries: list[Entry] = []
    try:
        previous, *rows, last = json.loads(text) or ("", "")
        for number, kind, attempt, fence, at, detail, payload_hash in rows:
            numbers, texts = (number, attempt, fence, at), (kind, detail, payload_hash or "", previous, last)
            if {*map(type, numbers)} != {int} or {*map(type, texts)} != {str}:
                raise TypeError(f"entry {number!r:.20} has parts of another kind")
            parts = (operation, number, kind, attempt, fence, at, detail, payload_hash, previous)
            previous = last if len(entries) == len(rows) - 1 else seal(*parts)
            entries.append(Entry(*parts, previous))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the log of operation {operation[:12]}… holds a text that is none of its own: {error}"
        ) from None
    return entries


class Problem(NamedTuple):
    """``what``: tampered | missing | reordered | foreign | payload (is not what was hashed) | head (the pointer says
    otherwise) | unpaired (a lock entry without its other half) | impossible (no lifecycle has that order). Of lineage:
    missing | unknown | differs | reordered | parked | waiting (to be told)."""

    what: str
    operation: str
    number: int
    """Of the entry where it shows."""
    told: str

    @property
    def broken(self) -> bool:
        """Whether the chain itself is: an unpaired lock is what a crash leaves, and what waits is told later."""
        return self.what not in ("unpaired", "waiting")


def verify(entries: Sequence[Entry], *, pointer: str | None = None, running: bool = False) -> list[Problem]:
    """What is wrong with the entries of one operation, in the order they were read in.

    ``pointer``: what the log says of the last one, or one that was kept elsewhere. ``running``: an attempt is under
    way, so that a lock without a release at the end is none that was left behind.
    """
    found = [*_links(entries), *_lifecycle(entries), *_locks(entries, running)]
    last = entries[-1] if entries else None
    if pointer is not None and (last is None or last.pointer != pointer):
        operation, number = ("", 0) if last is None else (last.operation, last.number)
        said = "nothing is there" if last is None else f"the last is {last.pointer[:20]}…"
        found.append(Problem("head", operation, number, f"the log says that the last entry is {pointer[:20]}…; {said}"))
    return found


def _links(entries: Sequence[Entry]) -> Iterable[Problem]:
    before: Entry | None = None
    for entry in entries:
        problem = _numbering(before, entry)
        if problem is not None:
            yield Problem(problem[0], entry.operation, entry.number, problem[1])
        elif before is not None and entry.previous != before.hash:
            yield Problem("tampered", entry.operation, entry.number, "it does not follow from the entry before it")
        parts = (entry.operation, entry.number, entry.kind, entry.attempt, entry.fence, entry.at, entry.detail)
        if seal(*parts, entry.payload_hash, entry.previous) != entry.hash:
            yield Problem(
                "tampered",
                entry.operation,
                entry.number,
                "its hash is not the hash of what it says",
            )
        if entry.payload is not None and sha256(entry.payload).hexdigest() != entry.payload_hash:
            yield Problem("payload", entry.operation, entry.number, "what is kept of it is not what was hashed")
        before = entry


def _numbering(before: Entry | None, entry: Entry) -> tuple[str, str] | None:
    if before is None:
        if entry.number == 1:
            return None if entry.previous == "" else ("tampered", "it is the first and claims one before it")
        if entry.kind == "archived":
            return None
        return "missing", f"the chain begins with entry {entry.number}, and nothing says that those before are archived"
    if entry.operation != before.operation:
        return "foreign", f"it is of operation {entry.operation[:12]}…, in the chain of {before.operation[:12]}…"
    if entry.number > before.number + 1:
        return "missing", f"entries {before.number + 1} to {entry.number - 1} are not there"
    if entry.number <= before.number:
        return "reordered", f"it comes after entry {before.number}"
    return None


def _lifecycle(entries: Sequence[Entry]) -> Iterable[Problem]:
    """What no run of the lifecycle writes, be the chain as sound as it may."""
    open_attempt: int | None = None
    latest = 0
    for entry in entries:
        told = None
        if entry.kind not in KINDS:
            told = f"there is no entry of kind {entry.kind!r}"
        elif entry.kind == "claimed":
            if entry.attempt <= latest:
                told = f"attempt {entry.attempt} is claimed after attempt {latest}"
            open_attempt = latest = max(latest, entry.attempt)
        elif entry.kind == "lock_acquired" and entry.attempt == latest:
            open_attempt = latest  # one that has ended is taken up again, to be undone
        elif entry.kind == "archived":
            latest, open_attempt = max(latest, entry.attempt), None
        elif entry.kind in ("success", "failure"):
            if open_attempt != entry.attempt:
                told = f"{entry.kind} of attempt {entry.attempt}, which is not under way"
            open_attempt = None
        elif entry.kind in ("effect_started", "checkpoint", "postcondition") and open_attempt != entry.attempt:
            told = f"{entry.kind} of attempt {entry.attempt}, which is not under way"
        elif entry.kind in ENDS:
            open_attempt = None
        if told is not None:
            yield Problem("impossible", entry.operation, entry.number, told)


def _locks(entries: Sequence[Entry], running: bool) -> Iterable[Problem]:
    held: Entry | None = None
    for entry in entries:
        if entry.kind == "lock_acquired":
            if held is not None:
                yield _unpaired(held, "acquired, and never released before it was acquired again")
            held = entry
        elif entry.kind == "lock_released":
            if held is None:
                yield _unpaired(entry, "released, and not acquired before")
            held = None
    if held is not None and not running:
        yield _unpaired(held, "acquired, and never released: whoever had it died, or lost the database")


def _unpaired(entry: Entry, told: str) -> Problem:
    return Problem("unpaired", entry.operation, entry.number, f"the lock of attempt {entry.attempt} was {told}")


def _sealed(part: str | None) -> bytes:
    if part is None:
        return b"-,"
    body = part.encode()
    return b"%d:%s," % (len(body), body)
