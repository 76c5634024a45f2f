"""The end of an operation's chain, as whoever extends it knows it: entries wait here to be written together."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
        self._waiting: list[list[Any]] = []

    def add(
        self, kind: str, attempt: int, fence: int, at: float, detail: Mapping[str, Any] | None = None,
        payload_hash: str | None = None,
    ) -> None:  # fmt: skip
        """``at``: seconds since 1970, by the database's clock."""
        number, when, told = self._number + 1, int(at * 1_000_000), _to_json(detail) if detail else "{}"
        found = seal(self._operation, number, kind, attempt, fence, when, told, payload_hash, self._hash)
        self._waiting.append([number, kind, attempt, fence, when, told, payload_hash, self._hash, found])
        self._number, self._hash = number, found

    def waiting(self) -> Written:
        """All that was added since the last time it was written."""
        return Written(self._pointer, f"{self._number}:{self._hash}", self._waiting[0][0], _to_json(self._waiting))

    def written(self) -> None:
        self._pointer, self._waiting = f"{self._number}:{self._hash}", []
