"""A listing: once, or again and again with --watch. A terminal then shows a live view; a pipe gets each change."""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Console
from rich.text import Text

import holdfast
from holdfast.cli import output

Records = list[Any]
Rows = list[tuple[object, ...]]


@dataclass(frozen=True)
class View:
    """What is fetched, and how it is shown."""

    fetch: Callable[[], Records]
    columns: Sequence[output.Column]
    rows: Callable[[Records], Rows]
    identity: Callable[[Records], object]
    """A pipe gets the records again when this differs. It leaves out ages and times."""
    count: Callable[[Records], str]
    """The title of a live view; without records, all that is said."""
    as_json: Callable[[Records], Records] = list


def show(view: View, *, watch: bool, every: float, as_json: bool, wide: bool) -> Records:
    """Print the records and return them. With ``watch``, return nothing: on Ctrl-C, or when the reader of the pipe has
    closed it. Raises EngineError if the first fetch fails."""
    if watch:
        _watch(view, every, as_json, wide)
        return []
    records = view.fetch()
    if as_json:
        output.print_json(view.as_json(records))
    elif records:
        output.print_table(view.columns, view.rows(records), wide=wide)
    else:
        click.echo(view.count(records), err=True)
    return records


def _watch(view: View, every: float, as_json: bool, wide: bool) -> None:
    console = output.make_console()
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # exits through Live, which shows the cursor
    try:
        if console.is_terminal and not as_json:
            _show_live(console, view, every, wide)
        else:
            _print_changes(console, view, every, as_json, wide)
    except KeyboardInterrupt:
        pass


def _fetch_repeatedly(view: View, every: float) -> Iterator[tuple[Records, str | None]]:
    """The latest records, and the error of the last fetch. Only the first fetch raises: later ones are retried, because
    the database may fail over."""
    records, problem = view.fetch(), None
    while True:
        yield records, problem
        if not _wait(every):
            return
        try:
            records, problem = view.fetch(), None
        except holdfast.EngineError as error:
            problem = str(error)


def _wait(seconds: float) -> bool:
    """Wait, and return whether stdout is still read. A reader such as ``head`` may close the pipe long before the next
    change would be written to it."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors and hang-ups are reported without being asked for
    except (AttributeError, OSError):  # not on Windows
        time.sleep(seconds)
        return True
    return not poll.poll(seconds * 1000)


def _show_live(console: Console, view: View, every: float, wide: bool) -> None:
    from rich.console import Group
    from rich.live import Live

    fetched_at = datetime.now(UTC)
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        for records, problem in _fetch_repeatedly(view, every):
            fetched_at = fetched_at if problem else datetime.now(UTC)
            lines = []
            if records:
                table = output.render_table(console, view.columns, view.rows(records), wide=wide)
                lines = [*table.lines, *([Text(table.note, "dim")] if table.hidden else [])]
            title = f"{view.count(records)} at {output.format_time(fetched_at)} UTC"
            below = output.wrap(console, Text(""), output.clean(problem)) if problem else []
            live.update(Group(Text(title, "dim"), *lines, *below), refresh=True)


def _print_changes(console: Console, view: View, every: float, as_json: bool, wide: bool) -> None:
    printed: object = None
    had_problem = False
    for records, problem in _fetch_repeatedly(view, every):
        if problem and not had_problem:
            click.echo(f"holdfast: {output.clean(problem)}; retrying every {every:g} s", err=True)
        had_problem = problem is not None
        identity = view.identity(records)
        if identity == printed:
            continue
        printed = identity
        if as_json:
            click.echo(output.to_json(view.as_json(records), indent=None))
        else:
            title = Text(f"{output.format_time(datetime.now(UTC))} UTC: {view.count(records)}")
            output.print_lines(console, [title])
            if records:
                output.print_table(view.columns, view.rows(records), wide=wide)
            output.print_lines(console, [Text("")])
