"""The view of `holdfast top`: it turns keys into what is shown. A thread of its own asks the database, so keys are
answered while the database is not.

It writes nothing, but with an ``actor`` it runs the governed command that releases the selected row.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

import holdfast
from holdfast.cli import output
from holdfast.cli.full_screen import ENDED, HUNG_UP, INTERRUPTED, FullScreen
from holdfast.cli.top_sections import Cells, Details, Reading, Row, Section, Sections

_MARGIN = 2
"""Cells before a row, for the mark of the selected one."""
_SILENCE = 3.0
"""Seconds without an answer after which the view says so."""
_KEYS = (
    ("up down", "select a row; also k j, page up, page down, home, end"),
    ("enter", "all of the selected row: its fields, and what became of it before"),
    ("esc", "back; clear the filter"),
    ("1 … 6, tab", "one section alone, the next one; 0 shows all"),
    ("/", "filter: show the rows that have all these words, in any case"),
    ("s  r", "sort the section of the selected row by the next column; reverse it"),
    ("a", "show holdfast's own leases and locks as well"),
    ("x", "release the selected lease or slot, with a reason (--operate)"),
    ("q", "quit; also Ctrl-C"),
)

Job = Callable[[], Callable[[], None]]
"""What the thread runs; it returns what then changes the view, in the view's own thread."""


class TopView:
    def __init__(self, sections: Sections, reading: Reading, *, every: float, actor: str | None) -> None:
        self._sections, self._reading, self._every, self._actor = sections, reading, every, actor
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._asked_at: float | None = None
        """When the database was asked what it has not answered yet."""
        self._only: int | None = None
        self._sort: dict[str, tuple[int, bool]] = {}
        """By section: the column, and whether it is reversed."""
        self._filter = ""
        self._selected: tuple[str, object] | None = None
        self._top = 0
        """The first line of the body that is shown."""
        self._details: Details | None = None
        self._shows_help = False
        self._input: str | None = None
        """What is being typed: a filter, or the reason of a release."""
        self._releasing: Row | None = None
        self._message: Text | None = None
        self._height = 1

    def run(self, screen: FullScreen) -> int:
        """Show it until it is left. Returns the exit code."""
        threading.Thread(target=self._work, args=(screen,), name="holdfast-top", daemon=True).start()
        while True:
            while not self._results.empty():
                self._results.get()()
            screen.show(self._render(screen.console))
            for event in screen.read(timeout=1.0):
                if event in (ENDED, HUNG_UP):
                    return 128 + (15 if event == ENDED else 1)
                if event == INTERRUPTED or (event == "q" and self._input is None):
                    return 0
                self._press(event)

    # The thread that asks the database

    def _work(self, screen: FullScreen) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._every)
            except queue.Empty:
                job = self._read
            self._asked_at = time.monotonic()
            try:
                result = job()
            except (holdfast.HoldfastError, LookupError, ValueError) as error:
                result = self._report_later(output.clean(error), "red")
            except BaseException as error:
                result = _raise(error)
            self._asked_at = None
            self._results.put(result)
            screen.wake()

    def _read(self) -> Callable[[], None]:
        try:
            reading = self._sections.read()
        except holdfast.HoldfastError as error:
            problem = output.clean(error)
            return lambda: setattr(self, "_reading", replace(self._reading, problem=problem))
        return lambda: setattr(self, "_reading", reading)

    def _open(self, row: Row) -> Callable[[], None]:
        details = row.details()

        def show() -> None:
            self._details, self._top = details, 0

        return show

    def _release(self, row: Row, reason: str) -> Callable[[], None]:
        from holdfast import commands as governed

        release, client = row.release, self._sections.client
        assert release is not None
        assert self._actor is not None
        current = client.leases.get(release.lease)
        if current is None or current.fence != release.fence:
            by_whom = "it is free" if current is None else f"{current.holder} holds it"
            return self._report_later(f"nothing was released: {release.lease!r} has changed hands, {by_whom}", "yellow")
        outcome = governed.run(client, release.command, release.parameters, actor=self._actor, reason=reason)
        self._jobs.put(self._read)
        doubt = f"; but then: {outcome.doubt}" if outcome.doubt else ""
        done = f"released {release.description}; recorded: {self._actor}: {reason}{doubt}"
        return self._report_later(output.clean(done), "yellow" if doubt else "green")

    def _report_later(self, message: str, style: str) -> Callable[[], None]:
        return lambda: self._report(message, style)

    # Keys

    def _press(self, key: str) -> None:
        if self._input is not None:
            self._type(key)
            return
        self._message = None
        if self._shows_help:
            self._shows_help = False
        elif self._details is not None:
            self._press_in_details(key)
        else:
            self._press_in_list(key)

    def _press_in_details(self, key: str) -> None:
        if key in ("escape", "enter", "left", "backspace"):
            self._details, self._top = None, 0
        elif key == "?":
            self._shows_help = True
        else:
            self._top = max(0, self._top + _steps(key, self._height))

    def _press_in_list(self, key: str) -> None:
        rows = self._rows(self._shown())
        row = next((row for section, row in rows if self._is_selected(section, row)), None)
        if steps := _steps(key, self._height):
            self._select(rows, steps)
        elif key in ("enter", "right") and row is not None:
            self._jobs.put(lambda: self._open(row))
        elif key == "/":
            self._input = self._filter
        elif key == "escape":
            self._filter = ""
        elif key in "0123456" and len(key) == 1:
            self._only = int(key) - 1 if key != "0" else None
        elif key in ("tab", "back tab"):
            steps = 1 if key == "tab" else -1
            number = (0 if self._only is None else self._only + 1) + steps
            number %= len(Sections.TITLES) + 1
            self._only = None if number == 0 else number - 1
        elif key in ("s", "r") and self._selected is not None:
            self._change_order(self._selected[0], reverse=key == "r")
        elif key == "a":
            self._sections.shows_all = not self._sections.shows_all
            self._jobs.put(self._read)
        elif key == "?":
            self._shows_help = True
        elif key == "x":
            self._begin_release(row)

    def _begin_release(self, row: Row | None) -> None:
        if self._actor is None:
            self._report("holdfast top --operate releases leases and slots; this one only watches", "yellow")
        elif row is None or row.release is None:
            self._report("select a lease or a slot: nothing else is released here", "yellow")
        else:
            self._releasing, self._input = row, ""

    def _type(self, key: str) -> None:
        assert self._input is not None
        if key == "enter":
            self._end_input()
        elif key == "escape":
            if self._releasing is None:
                self._filter = ""
            self._input = self._releasing = None
        else:
            if key == "backspace":
                self._input = self._input[:-1]
            elif key == "erase":
                self._input = ""
            elif len(key) == 1 and key.isprintable():
                self._input += key
            if self._releasing is None:
                self._filter = self._input

    def _end_input(self) -> None:
        row, reason = self._releasing, (self._input or "").strip()
        self._input = self._releasing = None
        if row is None:
            return
        if not reason:
            self._report("nothing was released: a release needs a reason, for the audit log", "yellow")
            return
        self._report("releasing …", "dim")
        self._jobs.put(lambda: self._release(row, reason))

    def _report(self, message: str, style: str) -> None:
        self._message = Text(message, style)

    def _select(self, rows: Sequence[tuple[Section, Row]], steps: int) -> None:
        if rows:
            number = next((n for n, (section, row) in enumerate(rows) if self._is_selected(section, row)), 0)
            section, row = rows[min(max(number + steps, 0), len(rows) - 1)]
            self._selected = (section.title, row.identity)

    def _is_selected(self, section: Section, row: Row) -> bool:
        return self._selected == (section.title, row.identity)

    def _change_order(self, title: str, *, reverse: bool) -> None:
        section = next(section for section in self._reading.sections if section.title == title)
        column, is_reversed = self._sort.get(title, (-1, False))
        if reverse:
            self._sort[title] = (max(column, 0), not is_reversed)
        elif column + 1 < len(section.columns):
            self._sort[title] = (column + 1, False)
        else:
            self._sort.pop(title, None)

    # What is shown

    def _shown(self) -> list[Section]:
        """The sections with the rows that pass the filter, in their order."""
        sections = self._reading.sections
        chosen = sections if self._only is None else sections[self._only : self._only + 1]
        words = self._filter.casefold().split()
        return [
            replace(section, rows=self._ordered(section.title, _filtered(section.rows, words))) for section in chosen
        ]

    def _rows(self, sections: Sequence[Section]) -> list[tuple[Section, Row]]:
        """The rows, one of which is selected: the first, if what was selected is not among them."""
        rows = [(section, row) for section in sections for row in section.rows]
        if not any(self._is_selected(section, row) for section, row in rows):
            self._select(rows, 0)
        return rows

    def _ordered(self, title: str, rows: list[Row]) -> list[Row]:
        if title not in self._sort:
            return rows
        column, is_reversed = self._sort[title]
        trees: list[list[Row]] = []
        for row in rows:
            if row.depth and trees:
                trees[-1].append(row)
            else:
                trees.append([row])
        trees.sort(key=lambda tree: _order(tree[0].cells[column]), reverse=is_reversed)
        return [row for tree in trees for row in tree]

    def _render(self, console: Console) -> list[Text]:
        head = self._render_head(console)
        foot = self._render_foot(console)
        self._height = max(console.height - len(head) - len(foot), 1)
        if self._shows_help:
            body = output.render_fields(console, _KEYS)[1:]
        elif self._details is not None:
            body = _render_details(console, self._details)
            self._top = min(self._top, max(len(body) - self._height, 0))
            body = body[self._top :]
        else:
            body = self._render_list(console)
        body = body[: self._height]
        return [*head, *body, *[Text()] * (self._height - len(body)), *foot]

    def _render_head(self, console: Console) -> list[Text]:
        reading = self._reading
        title = Text.assemble(("holdfast top", "bold"), ("  at ", "dim"), f"{output.format_time(reading.at)} UTC")
        lines = [title]
        asked_at = self._asked_at
        silence = 0.0 if asked_at is None else time.monotonic() - asked_at
        if reading.problem is not None:
            lines += output.wrap(console, Text("lost  ", "bold red"), Text(reading.problem, "red"))[:2]
        elif silence > _SILENCE:
            lines.append(Text(f"the database has not answered for {silence:.0f} s", "yellow"))
        tabs = [("0", "All", self._only is None)]
        tabs += [
            (str(number), f"{section.title} {len(section.rows)}", self._only == number - 1)
            for number, section in enumerate(reading.sections, 1)
        ]
        line = Text()
        for key, label, is_chosen in tabs:
            tab = Text.assemble((key, "dim"), " ", (label, "reverse" if is_chosen else ""))
            if line and line.cell_len + 2 + tab.cell_len > console.width:
                lines.append(line)
                line = Text()
            line = Text.assemble(line, "  ", tab) if line else tab
        return [*lines, line]

    def _render_foot(self, console: Console) -> list[Text]:
        if self._releasing is not None:
            assert self._releasing.release is not None
            question = f"release {output.clean(self._releasing.release.description)}? It may still be running. Reason: "
            return output.wrap(console, Text(), Text.assemble((question, "yellow"), self._input or "", ("_", "blink")))
        if self._input is not None:
            return [Text.assemble(("/", "bold"), self._input, ("_", "blink"))]
        if self._message is not None:
            return output.wrap(console, Text(), self._message)
        if self._details is not None:
            return [Text("esc back  up down scroll  ? help  q quit", "dim")]
        applied = Text.assemble(("filter ", "yellow"), self._filter, "  ") if self._filter else Text()
        keys = "enter details  / filter  s sort  ? help  q quit" + ("  x release" if self._actor else "")
        return [Text.assemble(applied, (keys, "dim"))]

    def _render_list(self, console: Console) -> list[Text]:
        sections = self._shown()
        rows = self._rows(sections)
        layout: list[tuple[Section, Row | Text | None]] = []  # None: the heading of the columns
        for section in sections:
            title = output.wrap(console, Text(f"{section.title}  ", "bold"), Text(section.summary, "dim"))
            layout += [(section, line) for line in ([Text(), *title] if layout else title)]
            if section.rows:
                layout += [(section, None), *((section, row) for row in section.rows)]
        if not rows and self._filter:
            hint = Text(f"no row has {output.clean(self._filter)!r}: esc clears the filter", "yellow")
            layout.append((sections[-1], hint))
        chosen = [
            n for n, (section, line) in enumerate(layout) if isinstance(line, Row) and self._is_selected(section, line)
        ]
        selected = chosen[0] if chosen else 0
        first = 0 if rows and self._is_selected(*rows[0]) else selected
        self._top = max(min(self._top, first), selected - self._height + 1, 0)
        if self._top == selected and isinstance(layout[selected][1], Row):
            self._top -= 1
        window = layout[self._top : self._top + self._height]
        section, line = window[0]
        if isinstance(line, Row):  # the heading of its columns stays in view
            window[0] = (section, None)
        return self._render_window(console, window)

    def _render_window(self, console: Console, window: Sequence[tuple[Section, Row | Text | None]]) -> list[Text]:
        """Only these lines, because there may be thousands of rows: their columns are as wide as these rows need."""
        tables = {}
        for section in {section.title: section for section, _ in window}.values():
            shown = [line.cells for other, line in window if other is section and isinstance(line, Row)]
            table = output.render_table(console, self._marked(section, console), shown, margin=_MARGIN)
            tables[section.title] = iter(table.lines)
        headings = {title: next(lines) for title, lines in tables.items()}
        rendered = []
        for section, line in window:
            if isinstance(line, Text):
                rendered.append(line)
            elif line is None:
                headings[section.title].stylize("dim")
                rendered.append(Text.assemble("  ", headings[section.title]))
            else:
                mark, style = ("> ", "reverse") if self._is_selected(section, line) else ("  ", "")
                rendered.append(Text.assemble(mark, next(tables[section.title]), style=style))
        return rendered

    def _marked(self, section: Section, console: Console) -> list[output.Column]:
        """The columns, with a mark on the one that the rows are sorted by."""
        columns = list(section.columns)
        if section.title in self._sort and columns:
            number, is_reversed = self._sort[section.title]
            up, down = ("^", "v") if console.options.ascii_only else ("▲", "▼")
            title = f"{columns[number].title} {down if is_reversed else up}"
            columns[number] = columns[number]._replace(title=title)
        return columns


def _render_details(console: Console, details: Details) -> list[Text]:
    lines = [Text(output.clean(details.title), "bold"), *output.render_fields(console, details.fields)[1:]]
    for title, columns, rows in details.tables:
        lines += [Text(), Text(title, "bold")]
        lines += output.render_table(console, columns, rows).lines if rows else [Text("none", "dim")]
    return lines


def _filtered(rows: Sequence[Row], words: Sequence[str]) -> list[Row]:
    return [row for row in rows if all(word in _text(row.cells) for word in words)] if words else list(rows)


def _text(cells: Cells) -> str:
    return " ".join(str(_value(cell)) for cell in cells).casefold()


def _value(cell: object) -> object:
    return cell.value if isinstance(cell, output.Cell) else cell


def _order(cell: object) -> tuple[int, Any]:
    """Numbers before texts, and what is missing last."""
    value = cell.order if isinstance(cell, output.Cell) and cell.order is not None else _value(cell)
    if value is None or value == "":
        return 2, 0
    return (0, value) if isinstance(value, int | float) else (1, str(value).casefold())


def _steps(key: str, page: int) -> int:
    """By how many rows a key moves."""
    moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, "home": -(10**6), "end": 10**6}
    return moves.get(key, 0)


def _raise(error: BaseException) -> Callable[[], None]:
    def reraise() -> None:
        raise error

    return reraise
