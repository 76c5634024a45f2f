"""The log of changes, as values: what a watch tells, and the cursors that say where in it one is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from holdfast.errors import CursorExpired

BATCH = 500
"""Changes that a watch reads at a time."""

Row = Mapping[str, Any]
_NUMBER = r"[0-9]{1,18}"
_SNAPSHOT = rf"{_NUMBER}:{_NUMBER}:(?:{_NUMBER}(?:,{_NUMBER})*)?"


class Change(NamedTuple):
    """One write, as ``watch`` tells it: which object, not what is in it, which may have changed again since."""

    type: str
    id: str
    kind: Literal["created", "updated", "deleted"]
    version: int
    cursor: str
    """Watch from here to learn of everything after this change."""


class Position(NamedTuple):
    """A cursor, taken apart. On SQLite a place in the log; on PostgreSQL an epoch and a snapshot, and where a batch was
    not read to its end, the snapshot that ends it and the last place read."""

    since: str
    epoch: str | None = None
    until: str | None = None
    after: int | None = None

    @classmethod
    def parse(cls, cursor: object, dialect: str) -> Position:
        if not isinstance(cursor, str):
            raise TypeError(f"since must be a str, not {type(cursor).__name__}")
        if dialect == "sqlite" and re.fullmatch(_NUMBER, cursor):
            return cls(cursor)
        found = re.fullmatch(rf"({_NUMBER})/({_SNAPSHOT})(?:/({_SNAPSHOT})/({_NUMBER}))?", cursor)
        if dialect == "sqlite" or found is None or not all(map(_is_snapshot, found.group(2, 3))):
            raise ValueError(f"since must be the cursor of a change, or one from objects.cursor(), not {cursor[:80]!r}")
        epoch, since, until, after = found.groups()
        return cls(since, epoch, until, None if after is None else int(after))

    def parameters(self) -> dict[str, Any]:
        since = int(self.since) if self.epoch is None else self.since
        return {"since": since, "epoch": self.epoch, "until": self.until, "after": self.after}

    def read(self, rows: Sequence[Row], most: int) -> tuple[list[Change], Position]:
        """The changes in a batch, each with its cursor, and where the next batch begins."""
        if any(row["expired"] for row in rows):
            raise CursorExpired(
                f"the changes since {self} are not all kept any more: list the objects, and watch from objects.cursor()"
            )
        told, until = [row for row in rows if row["version"] is not None], str(rows[0]["snapshot"])
        after = [self._after(until, row["place"]) for row in told]
        end = self._after(until, None) if len(told) < most else after[-1]
        changes = [
            Change(row["type"], row["id"], row["kind"], row["version"], str(place))
            for row, place in zip(told, after, strict=True)
        ]
        return changes, end

    def _after(self, until: str, place: int | None) -> Position:
        if self.epoch is None:
            return Position(until if place is None else str(place))
        return Position(until, self.epoch) if place is None else self._replace(until=until, after=place)

    def __str__(self) -> str:
        if self.epoch is None:
            return self.since
        inside = "" if self.after is None else f"/{self.until}/{self.after}"
        return f"{self.epoch}/{self.since}{inside}"


def _is_snapshot(text: str | None) -> bool:
    """As a server writes them, which would refuse any other; a cursor need not have two."""
    low, high, *between = map(int, re.findall(_NUMBER, text or "1:1:"))
    return 1 <= low <= high and between == sorted({each for each in between if low <= each < high})
