"""The end of an operation's chain, as whoever extends it knows it: entries wait here to be written together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

_to_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: dumps() would, every time

Phrase = tuple[str, str]
"""What is hashed of an entry, as ``wal.seal`` says, but for what ties it to its chain; and what is written."""


class Written(NamedTuple):
    """What is to be written, and what the end of the chain has to be for it."""

    expected: str | None
    pointer: str
    number: int
    entries: str


class Chain:
    __slots__ = ("_given", "_hash", "_linked", "_mark", "_named", "_number", "_pointer", "_waiting")

    def __init__(self, operation: str, pointer: str | None) -> None:
        number, _, self._hash = (pointer or "0:").partition(":")
        self._named, self._pointer, self._number = named(operation), pointer, int(number)
        self._waiting: list[Phrase] = []
        self._mark: int | None = None

    @property
    def next(self) -> int:
        """The number of the entry that is added next."""
        return self._number + len(self._waiting) + 1

    def add(
        self, kind: str, attempt: int, fence: int, at: float, detail: Mapping[str, Any] | str | None = None,
        payload_hash: str | None = None,
    ) -> None:  # fmt: skip
        self._waiting.append(phrase(self.next, kind, attempt, fence, at, detail, payload_hash))

    def put(self, entry: Phrase) -> None:
        """One that is with_placeholders already, for many chains."""
        self._waiting.append(entry)

    def mark(self) -> None:
        self._mark = len(self._waiting)

    def take_back(self) -> None:
        """What was added since the mark, if there is one, and is not written after all."""
        del self._waiting[len(self._waiting) if self._mark is None else self._mark :]

    def waiting(self) -> Written:
        """All that was added since the last time it was written. It is hashed here, and not before."""
        self._given = self._number + len(self._waiting)
        self._linked, entries = link(self._named, self._hash, self._waiting)
        return Written(self._pointer, f"{self._given}:{self._linked}", self._number + 1, entries)

    def written(self) -> None:
        """What ``waiting`` gave the last time; what was added since goes on waiting."""
        del self._waiting[: self._given - self._number]
        self._number, self._hash, self._pointer = self._given, self._linked, f"{self._given}:{self._linked}"


def named(operation: str) -> str:
    """What is hashed first of every entry of an operation."""
    return f"{len(operation.encode())}:{operation},"


def link(named: str, previous: str, entries: Sequence[Phrase]) -> tuple[str, str]:
    """Tie entries to the one with that hash: the hash of the last, and all of them as ``wal.dump`` writes them."""
    found = previous
    for sealed, _ in entries:
        found = sha256(f"{named}{sealed}{len(found)}:{found},".encode()).hexdigest()
    return found, f'["{previous}",{"".join([told for _, told in entries])}"{found}"]'


def phrase(
    number: int, kind: str, attempt: int, fence: int, at: float, detail: Mapping[str, Any] | str | None = None,
    payload_hash: str | None = None,
) -> Phrase:  # fmt: skip
    """``at``: seconds since 1970, by the database's clock. A detail that is a text is JSON already. All of it is ASCII,
    and only the detail has anything in it that must be quoted; every operation waits for it, so it is put together by
    hand."""
    told = detail if isinstance(detail, str) else _to_json(detail) if detail else "{}"
    sealed, written = _head(number, kind, attempt, fence)
    when = str(int(at * 1_000_000))
    hashed, kept = "-", "null"
    if payload_hash is not None:
        hashed, kept = f"{len(payload_hash)}:{payload_hash}", f'"{payload_hash}"'
    return (
        f"{sealed}{len(when)}:{when},{len(told)}:{told},{hashed},",
        f"{written}{when},{quoted(told)},{kept}],",
    )


@lru_cache
def _head(number: int, kind: str, attempt: int, fence: int) -> Phrase:
    """The same for most operations that are done one after the other."""
    parts = (str(number), kind, str(attempt), str(fence))
    return "".join([f"{len(part)}:{part}," for part in parts]), f'[{number},"{kind}",{attempt},{fence},'
