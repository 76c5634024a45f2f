"""holdfast top: what happens in a database, in full screen."""

from __future__ import annotations

import os
import sys

import click

from holdfast.cli.app import Seconds, actor_option, open_client


@click.command()
@click.option(
    "--every", type=Seconds(0.1, 3600), default=1.0, show_default=True, metavar="S",
    help="Refresh interval, in seconds.",
)  # fmt: skip
@click.option("--operate", is_flag=True, help="Let the key x release leases and slots, with a reason.")
@actor_option
@click.pass_context
def top(context: click.Context, every: float, operate: bool, actor: str) -> None:
    """Watch the database in full screen: leases, locks and more.

    Shows leaders with standbys, leases, locks, slots, operations and schedules. The keys 1 to 6 show one of these
    alone, / filters, s sorts, enter shows all of one row, ? lists the keys, q quits. A database that is lost is
    reported; the view goes on when it is back.

    Exit code 2 without a terminal.

    \b
    Examples:
      holdfast top
      holdfast top --operate --actor jane
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise click.UsageError(
            "top needs a terminal with cursor movement. In a pipe use 'holdfast ls --watch', or 'holdfast ls --json'"
        )
    for name in ("COLUMNS", "LINES"):  # the size when the shell started
        os.environ.pop(name, None)
    from holdfast.cli import output, settings
    from holdfast.cli.full_screen import FullScreen
    from holdfast.cli.top_sections import Sections
    from holdfast.cli.top_view import TopView

    with open_client(context) as client:
        sections = Sections(client, settings.pools())
        view = TopView(sections, sections.read(), every=every, actor=actor if operate else None)
        with FullScreen(output.make_console()) as screen:
            code = view.run(screen)
    sys.exit(code)
