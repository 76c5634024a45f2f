"""Which row is meant, as values: names checked before they are quoted into a statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.names import check_name

LONGEST = 63
"""Bytes of a name in PostgreSQL, which would cut a longer one off without a word, and find another table."""


class RowKey(NamedTuple):
    """One row: ``table`` is its name, or schema and name; ``columns`` and ``values`` are its key."""

    table: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def check(cls, table: object, key: Mapping[str, Any]) -> RowKey:
        parts = tuple(table.split(".")) if isinstance(table, str) else table
        if not isinstance(parts, tuple) or not 1 <= len(parts) <= 2:
            raise ValueError(f"table must be 'name', 'schema.name' or ('schema', 'name'), not {table!r:.80}")
        if not key:
            raise ValueError(f"row_lock needs the row's key as well: row_lock(conn, {table!r:.80}, id=7)")
        for column, value in key.items():
            if value is None:
                raise ValueError(f"no row has {column}=None for its key: NULL equals nothing")
        names = [_identifier(part, "table") for part in parts], [_identifier(column, "column") for column in key]
        return cls(tuple(names[0]), tuple(names[1]), tuple(key.values()))

    def __str__(self) -> str:
        key = ", ".join(f"{column}={value!r:.60}" for column, value in zip(self.columns, self.values, strict=True))
        return f"{'.'.join(self.table)} with {key}"

    def only(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The one row there is."""
        if not rows:
            raise LookupError(f"there is no row in {self}: insert it, commit, then lock it")
        if len(rows) > 1:
            raise ValueError(f"there are several rows in {self}: give the whole key, so that one row is locked")
        return rows[0]


def quoted(*names: str) -> str:
    """As both dialects write names, whatever is in them."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def _identifier(name: object, what: str) -> str:
    text = check_name(name, what, LONGEST)
    if len(text.encode()) > LONGEST:
        raise ValueError(f"{what} must have at most {LONGEST} bytes, not {len(text.encode())}: {text!r}")
    return text
