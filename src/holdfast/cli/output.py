"""What commands print: tables of one line a row, fields of one record; plain text in a pipe, never markup.

On a terminal the columns of a table share the width of the line:

    a short column, such as a pid, a time or a state    keeps its width
    a text                                              is shortened in the middle, down to ``Column.least`` cells
    the rightmost columns                               are hidden while the others do not fit

It imports rich, so commands import it when they run.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any, NamedTuple

import click
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_GAP = "  "
_NARROWEST = 24
"""Columns that a wrapped text needs beside its head; with fewer it goes below."""
_STYLES = {
    "partial": "yellow", "waits": "yellow", "open": "yellow", "full": "yellow", "unknown": "yellow",
    "not": "yellow",
    "failure": "red", "lost": "red", "session_lost": "red", "expired": "red", "forced": "red", "rejected": "red",
    "refused": "red", "failed": "red",
    "released": "dim", "reentered": "dim", "undone": "dim", "reset": "dim", "done": "dim", "closed": "dim",
}  # fmt: skip
"""By the word for a state: what needs attention, what went wrong, what has ended."""


class Column(NamedTuple):
    title: str
    least: int | None = None
    """The cells that it needs at least when it is shortened; None: it is never shortened."""
    first: int | None = None
    """Show only so many characters on a terminal: the beginning of a digest is enough to name it."""


class Table(NamedTuple):
    lines: list[Text]
    hidden: list[str]
    """The titles of columns that did not fit."""

    @property
    def note(self) -> str:
        return f"hidden: {', '.join(self.hidden)}; see --wide"


class Cell(NamedTuple):
    value: object
    style: str = ""
    order: object = None
    """What `holdfast top` sorts by. None: the value."""


def state(value: object, word: str | None = None) -> Cell:
    """A cell with the style of its state, which is its first word unless ``word`` names another one."""
    return Cell(value, _STYLES.get(word or re.split("[ :,]", str(value))[0], ""))


def waiting(count: int) -> Cell:
    """How many processes wait."""
    return state(count, "waits" if count else "")


def duration(seconds: float | None) -> Cell:
    return Cell(None if seconds is None else format_duration(seconds), order=seconds)


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


def clean(value: object, *, ascii_only: bool = False) -> str:
    """One line that cannot move the cursor: unprintable characters, as in a holder's label, are escaped."""
    if value is None or value == "":
        return "-"
    text = str(value)
    if text.isprintable() and (text.isascii() or not ascii_only):
        return text
    return "".join(_pieces(text, ascii_only))


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


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[object]], *, wide: bool = False) -> None:
    """One line a row. On stderr: which columns did not fit."""
    console = make_console()
    table = render_table(console, columns, rows, wide=wide)
    print_lines(console, table.lines)
    if table.hidden:
        click.secho(table.note, dim=True, err=True)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """The fields of one record: a name and a value a line. Long values are wrapped."""
    console = make_console()
    print_lines(console, render_fields(console, fields))


def render_fields(console: Console, fields: Iterable[tuple[str, object]]) -> list[Text]:
    cells = [("what", Cell("value", "bold")), *((name, _as_cell(value)) for name, value in fields)]
    width = max(cell_len(name) for name, _ in cells)
    heads = [Text(f"{name:<{width}}{_GAP}", "" if number else "bold") for number, (name, _) in enumerate(cells)]
    texts = [Text(clean(cell.value), cell.style) for _, cell in cells]
    return [line for head, text in zip(heads, texts, strict=True) for line in wrap(console, head, text)]


def render_table(
    console: Console,
    columns: Sequence[Column],
    rows: Iterable[Sequence[object]],
    *,
    wide: bool = False,
    margin: int = 0,
) -> Table:
    """Columns with a heading. In a pipe and with ``wide`` they are as wide as their content; else they fit the line
    without ``margin`` cells."""
    width = None if wide else line_width(console)
    room = None if width is None else max(width - margin, 1)
    ascii_only = console.options.ascii_only
    heading = [Cell(column.title, "bold") for column in columns]
    lines = [heading, *([_as_cell(value) for value in row] for row in rows)]
    texts = [[clean(cell.value, ascii_only=ascii_only) for cell in line] for line in lines]
    if room is not None:
        for row in texts[1:]:
            row[:] = [text[: column.first] for column, text in zip(columns, row, strict=True)]
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    if room is not None:
        least = [
            width if column.least is None else min(width, max(column.least, cell_len(column.title)))
            for column, width in zip(columns, widths, strict=True)
        ]
        widths = distribute(widths, least, room)
    rendered = []
    for cells, row in zip(lines, texts, strict=True):
        line = Text()
        for cell, whole, width in zip(cells, row, widths, strict=False):
            text = whole if cell_len(whole) <= width else shorten(str(cell.value), width, ascii_only=ascii_only)
            line.append(_GAP if line else "").append(text, cell.style).append(" " * (width - cell_len(text)))
        rendered.append(line)
    return Table(rendered, [column.title for column in columns[len(widths) :]])


def distribute(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """The widths of the columns that are shown in ``room`` cells. The rightmost columns are hidden until the ``least``
    widths of the others fit. The rest of the room is shared: the narrowest column grows first, and none beyond its
    content. The first column is always shown."""
    shown = len(widths)
    while shown > 1 and sum(least[:shown]) + len(_GAP) * (shown - 1) > room:
        shown -= 1
    result = list(least[:shown])
    spare = room - sum(result) - len(_GAP) * (shown - 1)
    if spare < 0:
        return [room]
    while spare > 0 and (growing := [number for number in range(shown) if result[number] < widths[number]]):
        result[min(growing, key=result.__getitem__)] += 1
        spare -= 1
    return result


def shorten(text: str, width: int, *, ascii_only: bool = False) -> str:
    """The beginning and the end of a text that is too wide, with an ellipsis between them, in ``width`` cells."""
    pieces, ellipsis = _pieces(text, ascii_only), ("..." if ascii_only else "…")[:width]
    room = width - len(ellipsis)
    head = _take(pieces, (room + 1) // 2)
    tail = _take(pieces[::-1], room - cell_len("".join(head)))
    return "".join((*head, ellipsis, *tail[::-1]))


def wrap(console: Console, head: Text, text: str | Text) -> list[Text]:
    """``text`` beside ``head``, wrapped below its own first word; or below the head, where that leaves too little
    room."""
    room, text = line_width(console), Text(text) if isinstance(text, str) else text
    if room is None:
        return [Text.assemble(head, text)]
    if room - head.cell_len < _NARROWEST:
        above = head.wrap(console, room, overflow="fold") if head.plain.strip() else ()
        wrapped = text.wrap(console, max(room - len(_GAP), 1), overflow="fold")
        return [*above, *(Text.assemble(_GAP, line) for line in wrapped)]
    wrapped = text.wrap(console, room - head.cell_len, overflow="fold")
    below = " " * head.cell_len
    return [Text.assemble(below if number else head, line) for number, line in enumerate(wrapped)]


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)


def _as_cell(value: object) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)


def _pieces(text: str, ascii_only: bool) -> list[str]:
    """What a text is made of and must not be cut: a character with its combining marks, or the escape of one that
    cannot be printed."""
    pieces: list[str] = []
    for character in text:
        if not character.isprintable() or (ascii_only and not character.isascii()):
            pieces.append(ascii(character)[1:-1])
        elif pieces and cell_len(character) == 0:
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def _take(pieces: Sequence[str], room: int) -> list[str]:
    """As many of the first pieces as fit."""
    taken: list[str] = []
    for piece in pieces:
        room -= cell_len(piece)
        if room < 0:
            break
        taken.append(piece)
    return taken
