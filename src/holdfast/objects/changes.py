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
_CHANGE = rf"{_NUMBER}\.{_NUMBER}\.[0-9a-f]{{1,8}}"
_CURSOR = re.compile(rf"({_NUMBER})/({_SNAPSHOT})/((?:{_CHANGE})?)(?:/({_SNAPSHOT})/({_NUMBER})/({_CHANGE}))?")


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

    | engine     | text                                            | what has been read                                |
    |------------|-------------------------------------------------|---------------------------------------------------|
    | SQLite     | ``version``                                     | up to the change with this version                |
    | PostgreSQL | ``space/snapshot/change``                       | what the snapshot sees; the newest change of it   |
    | PostgreSQL | ``space/snapshot/change/snapshot/place/change`` | of the batch between the snapshots up to ``place``|

    A change in it is ``xid.version.token``. A database that has not got that change was set back since: the cursor has
    expired.
    """

    since: str
    space: str | None = None
    """Changes when a dump is restored or a database is copied: then the snapshots mean nothing."""
    newest: str | None = None
    """The newest change visible in ``since``; empty when there is none."""
    until: str | None = None
    """The snapshot that ends a batch which was not read to its end."""
    after: int | None = None
    """The last place read in that batch."""
    after_change: str | None = None
    """The change at that place."""

    @classmethod
    def parse(cls, cursor: object, dialect: str) -> Position:
        """ValueError unless it is a cursor of this engine, as the server itself would write it."""
        if not isinstance(cursor, str):
            raise TypeError(f"since must be a str, not {type(cursor).__name__}")
        if dialect == "sqlite" and re.fullmatch("[0-9]{1,19}", cursor) and int(cursor) < 1 << 63:
            return cls(cursor)
        match = _CURSOR.fullmatch(cursor)
        if dialect == "sqlite" or match is None or not all(map(_is_snapshot, match.group(2, 4))):
            raise ValueError(f"since must be the cursor of a change, or one from objects.cursor(), not {cursor[:80]!r}")
        space, since, newest, until, after, after_change = match.groups()
        return cls(since, space, newest, until, None if after is None else int(after), after_change)

    def parameters(self) -> dict[str, Any]:
        since = int(self.since) if self.space is None else self.since
        return {**self._asdict(), "since": since}

    def read(self, rows: Sequence[Row], limit: int) -> tuple[list[Change], Position]:
        """The changes in a batch of at most ``limit`` rows, each with its cursor, and where the next batch begins.

        CursorExpired when the log was trimmed beyond this position, or a restore has lost changes before it.
        """
        if any(row["expired"] for row in rows):
            raise CursorExpired(
                f"some changes since {self} have been trimmed, or lost in a restore: "
                "list the objects, and watch from objects.cursor()"
            )
        changed, until = [row for row in rows if row["version"] is not None], str(rows[0]["snapshot"])
        cursors = [self._after(until, row) for row in changed]
        end = self._end(until, rows[-1]) if len(changed) < limit else cursors[-1]
        changes = [
            Change(row["type"], row["id"], row["kind"], row["version"], str(cursor))
            for row, cursor in zip(changed, cursors, strict=True)
        ]
        return changes, end

    def _after(self, until: str, row: Row) -> Position:
        """After one change of a batch that ends with the snapshot ``until``."""
        if self.space is None:
            return Position(str(row["place"]))
        return self._replace(until=until, after=row["place"], after_change=row["change"])

    def _end(self, until: str, last: Row) -> Position:
        """After a whole batch, whose last row has no version."""
        return Position(until) if self.space is None else Position(until, self.space, last["change"])

    def __str__(self) -> str:
        if self.space is None:
            return self.since
        inside = "" if self.after is None else f"/{self.until}/{self.after}/{self.after_change}"
        return f"{self.space}/{self.since}/{self.newest}{inside}"


def _is_snapshot(text: str | None) -> bool:
    """Whether the server would accept it as a pg_snapshot. None is accepted: a cursor may have only one."""
    low, high, *running = map(int, re.findall(_NUMBER, text or "1:1:"))
    return 1 <= low <= high and running == sorted({xid for xid in running if low <= xid < high})
