"""--watch: fetch a listing again and again. A terminal shows a live view; a pipe gets the listing when it changes."""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Console
from rich.text import Text

import holdfast
from holdfast.cli import output

Records = list[Any]


@dataclass(frozen=True)
class View:
    """What is fetched, and how it is shown."""

    fetch: Callable[[], Records]
    render: Callable[[Console, Records], list[Text]]
    identity: Callable[[Records], object]
    """A pipe gets the records again when this differs. It leaves out ages and times."""
    count: Callable[[Records], str]
    as_json: Callable[[Records], Records] = list


def watch(view: View, every: float, as_json: bool) -> None:
    """Returns on Ctrl-C, or when the reader of the pipe has closed it. Raises EngineError if the first fetch fails."""
    console = output.make_console()
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # exits through Live, which shows the cursor
    try:
        if console.is_terminal and not as_json:
            _show_live(console, view, every)
        else:
            _print_changes(console, view, every, as_json)
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


def _show_live(console: Console, view: View, every: float) -> None:
    from rich.console import Group
    from rich.live import Live

    fetched_at = datetime.now(UTC)
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        for records, problem in _fetch_repeatedly(view, every):
            fetched_at = fetched_at if problem else datetime.now(UTC)
            lines = view.render(console, records) if records else []
            title = f"{view.count(records)} at {output.format_time(fetched_at)} UTC"
            below = output.wrap(console, Text(""), output.clean(problem)) if problem else []
            live.update(Group(Text(title, "dim"), *lines, *below), refresh=True)


def _print_changes(console: Console, view: View, every: float, as_json: bool) -> None:
    printed: object = None
    had_problem = False
    for records, problem in _fetch_repeatedly(view, every):
        if problem and not had_problem:
            click.echo(f"holdfast: {output.clean(problem)}; looking again every {every:g} s", err=True)
        had_problem = problem is not None
        identity = view.identity(records)
        if identity == printed:
            continue
        printed = identity
        if as_json:
            click.echo(output.to_json(view.as_json(records), indent=None))
        else:
            title = Text(f"{output.format_time(datetime.now(UTC))} UTC: {view.count(records)}")
            output.print_lines(console, [title, *(view.render(console, records) if records else []), Text("")])
