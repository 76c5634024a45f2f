"""The end of an operation's chain, as whoever extends it knows it: entries wait here to be written together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from holdfast.core.wal import seal

_to_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: dumps() would, every time


class Written(NamedTuple):
    """What is to be written, and what the end of the chain has to be for it."""

    expected: str | None
    pointer: str
    number: int
    entries: str


class Chain:
    def __init__(self, operation: str, pointer: str | None) -> None:
        self._operation, self._pointer = operation, pointer
        number, _, self._hash = (pointer or "0:").partition(":")
        self._number = int(number)
        self._waiting: list[str] = []
        self._first = self._number + 1
        self._mark: tuple[int, str, int] | None = None

    @property
    def pointer(self) -> str:
        return f"{self._number}:{self._hash}"

    def add(
        self, kind: str, attempt: int, fence: int, at: float, detail: Mapping[str, Any] | str | None = None,
        payload_hash: str | None = None,
    ) -> None:  # fmt: skip
        """``at``: seconds since 1970, by the database's clock. A detail that is a text is JSON already. The rest is put
        together here, because every operation waits for it: only the detail has anything in it that must be quoted."""
        number, when = self._number + 1, int(at * 1_000_000)
        told = detail if isinstance(detail, str) else _to_json(detail) if detail else "{}"
        found = seal(self._operation, number, kind, attempt, fence, when, told, payload_hash, self._hash)
        hashed = "null" if payload_hash is None else quoted(payload_hash)
        self._waiting.append(
            f'[{number},"{kind}",{attempt},{fence},{when},{quoted(told)},{hashed},"{self._hash}","{found}"]'
        )
        self._number, self._hash = number, found

    def mark(self) -> None:
        self._mark = self._number, self._hash, len(self._waiting)

    def take_back(self) -> None:
        """What was added since the mark, if there is one, and is not written after all."""
        if self._mark is not None:
            self._number, self._hash, kept = self._mark
            del self._waiting[kept:]

    def waiting(self) -> Written:
        """All that was added since the last time it was written."""
        return Written(self._pointer, self.pointer, self._first, f"[{','.join(self._waiting)}]")

    def written(self) -> None:
        self._pointer, self._waiting, self._first = self.pointer, [], self._number + 1


class Opening:
    """How chains begin that are begun together: what is the same in all of them is put together once."""

    def __init__(self, notes: Sequence[tuple[str, Mapping[str, Any] | None]], fence: int, at: float) -> None:
        when = int(at * 1_000_000)
        self._notes = []
        for number, (kind, detail) in enumerate(notes, 1):
            parts = (str(number), kind, "1", str(fence), str(when), _to_json(detail or {}))
            sealed = "".join([f"{len(part)}:{part}," for part in parts])
            self._notes.append((sealed, f'[{number},"{kind}",1,{fence},{when},{quoted(parts[-1])},null,"'))

    def chain(self, operation: str) -> tuple[Chain, str]:
        """Of an operation in its first attempt, and what is to be written of it: for the rest, the chain counts that as
        written already. The same as one by one with ``add``."""
        found, texts, name = "", [], f"{len(operation.encode())}:{operation},"
        for sealed, told in self._notes:
            before = found
            found = sha256(f"{name}{sealed}-,{len(before)}:{before},".encode()).hexdigest()
            texts.append(f'{told}{before}","{found}"]')
        return Chain(operation, f"{len(texts)}:{found}"), f"[{','.join(texts)}]"
