"""The change log of objects: one change as ``watch`` returns it, and the cursor that marks a place in the log. Pure."""

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
    """One write. It names the object and not its payload, which may have changed again since."""

    type: str
    id: str
    kind: Literal["created", "updated", "deleted"]
    version: int
    cursor: str
    """Watch from here to receive everything after this change."""


class Position(NamedTuple):
    """A parsed cursor.

    | engine     | text                              | what has been read                                           |
    |------------|-----------------------------------|--------------------------------------------------------------|
    | SQLite     | ``place``                         | everything up to this place                                  |
    | PostgreSQL | ``epoch/snapshot``                | everything that is visible in the snapshot                   |
    | PostgreSQL | ``epoch/snapshot/snapshot/place`` | of the batch between the snapshots everything up to ``place`` |
    """

    since: str
    epoch: str | None = None
    until: str | None = None
    """The snapshot that ends a batch which was not read to its end."""
    after: int | None = None
    """The last place read in that batch."""

    @classmethod
    def parse(cls, cursor: object, dialect: str) -> Position:
        """ValueError unless it is a cursor of this engine, as the server itself would write it."""
        if not isinstance(cursor, str):
            raise TypeError(f"since must be a str, not {type(cursor).__name__}")
        if dialect == "sqlite" and re.fullmatch(_NUMBER, cursor):
            return cls(cursor)
        match = re.fullmatch(rf"({_NUMBER})/({_SNAPSHOT})(?:/({_SNAPSHOT})/({_NUMBER}))?", cursor)
        if dialect == "sqlite" or match is None or not all(map(_is_snapshot, match.group(2, 3))):
            raise ValueError(f"since must be the cursor of a change, or one from objects.cursor(), not {cursor[:80]!r}")
        epoch, since, until, after = match.groups()
        return cls(since, epoch, until, None if after is None else int(after))

    def parameters(self) -> dict[str, Any]:
        since = int(self.since) if self.epoch is None else self.since
        return {"since": since, "epoch": self.epoch, "until": self.until, "after": self.after}

    def read(self, rows: Sequence[Row], limit: int) -> tuple[list[Change], Position]:
        """The changes in a batch of at most ``limit`` rows, each with its cursor, and where the next batch begins.

        CursorExpired when the log was trimmed beyond this position.
        """
        if any(row["expired"] for row in rows):
            raise CursorExpired(
                f"some changes since {self} have been trimmed: list the objects, and watch from objects.cursor()"
            )
        changed, until = [row for row in rows if row["version"] is not None], str(rows[0]["snapshot"])
        cursors = [self._after(until, row["place"]) for row in changed]
        end = self._after(until, None) if len(changed) < limit else cursors[-1]
        changes = [
            Change(row["type"], row["id"], row["kind"], row["version"], str(cursor))
            for row, cursor in zip(changed, cursors, strict=True)
        ]
        return changes, end

    def _after(self, until: str, place: int | None) -> Position:
        """After one change of a batch that ends with the snapshot ``until``; with None, after the whole batch."""
        if self.epoch is None:
            return Position(until if place is None else str(place))
        return Position(until, self.epoch) if place is None else self._replace(until=until, after=place)

    def __str__(self) -> str:
        if self.epoch is None:
            return self.since
        inside = "" if self.after is None else f"/{self.until}/{self.after}"
        return f"{self.epoch}/{self.since}{inside}"


def _is_snapshot(text: str | None) -> bool:
    """Whether the server would accept it as a pg_snapshot. None is accepted: a cursor may have only one."""
    low, high, *running = map(int, re.findall(_NUMBER, text or "1:1:"))
    return 1 <= low <= high and running == sorted({xid for xid in running if low <= xid < high})
