"""What commands print: columns where they fit, else a block for each row; plain text in a pipe, never markup.

It imports rich, so commands import it when they run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_GAP = "  "
_NARROWEST = 24
"""Columns that a wrapped text needs beside its head; with fewer it goes below."""


def make_console() -> Console:
    """A console for stdout. It has colours on a terminal only, and not with NO_COLOR; it escapes characters that the
    encoding lacks; it uses COLUMNS if that is a width."""
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdecimal() or int(columns) == 0:
        os.environ.pop("COLUMNS", None)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False, markup=False, emoji=False)


def line_width(console: Console) -> int | None:
    """None in a pipe without COLUMNS: lines may have any length."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def clean(value: object) -> str:
    """One line that cannot move the cursor: unprintable characters, as in a holder's label, are escaped."""
    if value is None or value == "":
        return "-"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))


def format_duration(seconds: float) -> str:
    """A duration in its two largest units."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02} {smaller}"
    return f"{whole} s"


def format_time(when: datetime) -> str:
    """A time in UTC, to the second."""
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """JSON in ASCII, which every terminal can show. Times are ISO 8601 in UTC."""

    def default(other: object) -> str:
        if isinstance(other, datetime):
            return other.astimezone(UTC).isoformat(timespec="milliseconds")
        raise TypeError(f"no JSON for {type(other).__name__}")

    return json.dumps(value, indent=indent, default=default)


def print_json(value: Any) -> None:
    click.echo(to_json(value))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    console = make_console()
    print_lines(console, render_table(console, titles, rows))


def render_table(console: Console, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[Text]:
    """The lines of a table: columns with a heading, or a block for each row if those would be too wide. The first
    column names a row."""
    cells = [[clean(value) for value in row] for row in rows]
    room = line_width(console)
    widths = [max(map(cell_len, column)) for column in zip(titles, *cells, strict=True)]
    if room is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > room:
        return list(_blocks(console, titles, cells))
    head = Text(_columns(titles, widths), "bold")
    return [head, *(Text(_columns(row, widths)) for row in cells)]


def wrap(console: Console, head: Text, text: str) -> list[Text]:
    """``text`` beside ``head``, wrapped below its own first word; or below the head, where that leaves too little
    room."""
    room = line_width(console)
    if room is None:
        return [Text.assemble(head, text)]
    if room - head.cell_len < _NARROWEST:
        above = head.wrap(console, room, overflow="fold") if head.plain.strip() else ()
        wrapped = Text(text).wrap(console, max(room - len(_GAP), 1), overflow="fold")
        return [*above, *(Text.assemble(_GAP, line) for line in wrapped)]
    wrapped = Text(text).wrap(console, room - head.cell_len, overflow="fold")
    below = " " * head.cell_len
    return [Text.assemble(below if number else head, line) for number, line in enumerate(wrapped)]


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)


def _columns(row: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()


def _blocks(console: Console, titles: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[Text]:
    label_width = max(map(cell_len, titles[1:]))
    for number, (name, *values) in enumerate(cells):
        if number:
            yield Text("")
        for line in wrap(console, Text(""), name):
            line.stylize("bold")
            yield line
        for title, value in zip(titles[1:], values, strict=True):
            yield from wrap(console, Text(f"{_GAP}{title:<{label_width}}{_GAP}"), value)
