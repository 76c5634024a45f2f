"""What commands print: columns where they fit, else a block for each row; plain text in a pipe, never markup.

Imports rich, so it is itself imported inside the commands that print.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_GAP = "  "
_NARROWEST = 24


def console() -> Console:
    """For stdout. Colours only on a terminal, and not with NO_COLOR; what the encoding lacks is escaped. COLUMNS is
    heeded when it is a width."""
    asked = os.environ.get("COLUMNS", "")
    if not asked.isdecimal() or int(asked) == 0:
        os.environ.pop("COLUMNS", None)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False, markup=False, emoji=False)


def width(where: Console) -> int | None:
    """How much fits on a line. In a pipe a line is as long as it needs to be, unless COLUMNS says otherwise."""
    return where.width if where.is_terminal or "COLUMNS" in os.environ else None


def clean(value: object) -> str:
    """As one line that cannot move the cursor, whatever a holder called itself: unprintable characters are escaped."""
    if value is None or value == "":
        return "-"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))


def span(seconds: float) -> str:
    """A length of time, in the two units that matter."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02} {smaller}"
    return f"{whole} s"


def moment(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def for_programs(value: Any, *, indent: int | None = 2) -> str:
    """JSON, in ASCII: safe on every terminal. Times are ISO 8601 in UTC."""

    def default(other: object) -> str:
        if isinstance(other, datetime):
            return other.astimezone(UTC).isoformat(timespec="milliseconds")
        raise TypeError(f"no JSON for {type(other).__name__}")

    return json.dumps(value, indent=indent, default=default)


def listing(where: Console, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[Text]:
    """Lines: columns with a heading, or blocks if those would be too wide. The first title names a row."""
    cells = [[clean(value) for value in row] for row in rows]
    room = width(where)
    widths = [max(map(cell_len, column)) for column in zip(titles, *cells, strict=True)]
    if room is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > room:
        return list(_blocks(where, titles, cells))
    head = Text(_columns(titles, widths), "bold")
    return [head, *(Text(_columns(row, widths)) for row in cells)]


def hanging(where: Console, head: Text, text: str) -> list[Text]:
    """``text`` beside ``head``; what does not fit goes on below its own first word, or all of it below the head where
    too little room is left beside it."""
    room = width(where)
    if room is None:
        return [Text.assemble(head, text)]
    if room - head.cell_len < _NARROWEST:
        above = head.wrap(where, room, overflow="fold") if head.plain.strip() else ()
        wrapped = Text(text).wrap(where, max(room - len(_GAP), 1), overflow="fold")
        return [*above, *(Text.assemble(_GAP, line) for line in wrapped)]
    wrapped = Text(text).wrap(where, room - head.cell_len, overflow="fold")
    below = " " * head.cell_len
    return [Text.assemble(below if number else head, line) for number, line in enumerate(wrapped)]


def show(where: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        line.rstrip()
        where.print(line, soft_wrap=True)


def _columns(row: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell + " " * (room - cell_len(cell)) for cell, room in zip(row, widths, strict=True)).rstrip()


def _blocks(where: Console, titles: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[Text]:
    label = max(map(cell_len, titles[1:]))
    for number, (name, *values) in enumerate(cells):
        if number:
            yield Text("")
        for line in hanging(where, Text(""), name):
            line.stylize("bold")
            yield line
        for title, value in zip(titles[1:], values, strict=True):
            yield from hanging(where, Text(f"{_GAP}{title:<{label}}{_GAP}"), value)
