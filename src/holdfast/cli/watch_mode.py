"""--watch: a listing again and again, live on a terminal, in a pipe whenever it says something new."""

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

Found = list[Any]


@dataclass(frozen=True)
class View:
    """What to look at, and how to show it. ``gist`` is what must differ for a pipe to be told anew."""

    look: Callable[[], Found]
    listing: Callable[[Console, Found], list[Text]]
    gist: Callable[[Found], object]
    count: Callable[[Found], str]
    for_programs: Callable[[Found], Found] = list


def watch(view: View, every: float, as_json: bool) -> None:
    """Until Ctrl-C."""
    console = output.console()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the cursor comes back
    try:
        if console.is_terminal and not as_json:
            _live(console, view, every)
        else:
            _changes(console, view, every, as_json)
    except KeyboardInterrupt:
        pass


def _looks(view: View, every: float) -> Iterator[tuple[Found, str | None]]:
    """Once it has answered, a database that is away is waited for: it may fail over."""
    found, problem = view.look(), None
    while True:
        yield found, problem
        if not _is_read(every):
            return
        try:
            found, problem = view.look(), None
        except holdfast.EngineError as error:
            problem = str(error)


def _is_read(seconds: float) -> bool:
    """Whether somebody is still there to read after that time. Whoever reads a pipe may have had enough, as ``head``,
    and nothing would tell us before the next change, which may be tomorrow."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors and hanging up are told in any case
    except (AttributeError, OSError):  # not on Windows
        time.sleep(seconds)
        return True
    return not poll.poll(seconds * 1000)


def _live(console: Console, view: View, every: float) -> None:
    from rich.console import Group
    from rich.live import Live

    seen = datetime.now(UTC)
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        for found, problem in _looks(view, every):
            seen = seen if problem else datetime.now(UTC)
            lines = view.listing(console, found) if found else []
            title = f"{view.count(found)} at {output.moment(seen)} UTC"
            below = output.hanging(console, Text(""), output.clean(problem)) if problem else []
            live.update(Group(Text(title, "dim"), *lines, *below), refresh=True)


def _changes(console: Console, view: View, every: float, as_json: bool) -> None:
    known: object = None
    trouble = False
    for found, problem in _looks(view, every):
        if problem and not trouble:
            click.echo(f"holdfast: {output.clean(problem)}; looking again every {every:g} s", err=True)
        trouble = problem is not None
        gist = view.gist(found)
        if gist == known:
            continue
        known = gist
        if as_json:
            click.echo(output.for_programs(view.for_programs(found), indent=None))
        else:
            title = Text(f"{output.moment(datetime.now(UTC))} UTC: {view.count(found)}")
            output.show(console, [title, *(view.listing(console, found) if found else []), Text("")])
