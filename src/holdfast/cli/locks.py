"""holdfast locks: who holds which lock, who waits for whom, and ending a session that is stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.app import Seconds, acting, connected

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Found = list[Any]
TITLES = ("lock", "pid", "application", "state", "mode", "granted", "for", "blocked by")
FIELDS = (
    "pid", "application_name", "state", "query_start", "namespace", "entity_id", "name", "mode", "granted", "duration",
    "blocked_by",
)  # fmt: skip


@click.group(invoke_without_command=True)
@click.option("--watch", is_flag=True, help="Go on looking, until Ctrl-C.")
@click.option("--every", type=Seconds(0.1, 3600), default=1.0, show_default=True, metavar="S",
              help="Seconds between two looks of --watch.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def locks(context: click.Context, watch: bool, every: float, as_json: bool) -> None:
    """Show who holds which advisory lock, and who waits for whom.

    Of everybody in the database, be it holdfast or not: those that hold, and after them those that wait for the same
    lock, with the pids of the sessions they wait for. A lock by (namespace, number) shows both, one by name its name;
    what other programs lock are numbers. The pids are those of server sessions, on SQLite of processes.

    \b
    Examples:
      holdfast locks
      holdfast locks --watch
      holdfast locks --json | jq '.[] | select(.granted | not) | {pid, name, blocked_by}'
      holdfast locks break 4242 --reason "its host is gone"
    """
    if context.invoked_subcommand is not None:
        return
    from holdfast.cli import output

    with connected(context) as client:
        if watch:
            from holdfast.cli import watch_mode

            view = watch_mode.View(client.locks.list, _listing, _gist, _count, _for_programs)
            watch_mode.watch(view, every, as_json)
            return
        found = client.locks.list()
    if as_json:
        click.echo(output.for_programs(_for_programs(found)))
    elif found:
        console = output.console()
        output.show(console, _listing(console, found))
    else:
        click.echo(_count(found), err=True)


@locks.command("break")
@click.argument("pid", type=click.IntRange(1, 2**31 - 1))
@click.option("--reason", metavar="TEXT", required=True, help="Why, for the record.")
@acting
@click.pass_context
def break_(context: click.Context, pid: int, reason: str, actor: str) -> None:
    """End the database session PID, and free its locks.

    Only a session that holds or waits for an advisory lock. Its transaction is rolled back, and its program sees the
    connection break; a holder that uses holdfast learns at once that its locks are lost, and may still be at work.

    Who asked, why, what the session held and how it ended is written to the table `audit`, before anything is done.
    This is the governed command `holdfast do lock.break`: one at a time. Exit code 1 when the session is not ended.

    \b
    Example:
      holdfast locks break 4242 --reason "its host is gone"
    """
    from holdfast.cli import output
    from holdfast.cli.do import governed

    with connected(context) as client:
        had = [each for each in client.locks.list() if each.pid == pid]
        governed(client, "lock.break", {"pid": pid}, actor=actor, reason=reason)
    parts = []
    for word, granted in (("held", True), ("waited for", False)):
        if names := [output.clean(each.label) for each in had if each.granted is granted]:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"{word} {', '.join(names[:5])}{more}")
    which = f", which {' and '.join(parts)}" if parts else ""
    click.echo(f"ended session {pid}{which}; recorded: {output.clean(actor)}: {output.clean(reason)}")


def _for_programs(found: Found) -> list[dict[str, Any]]:
    rows = [{key: getattr(each, key) for key in FIELDS} for each in found]
    for row in rows:
        row["duration"] = None if row["duration"] is None else round(row["duration"], 3)
    return rows


def _listing(console: Console, found: Found) -> list[Text]:
    from holdfast.cli import output

    rows = [
        (each.label, each.pid, each.application_name, each.state, each.mode, "yes" if each.granted else "waits",
         None if each.duration is None else output.span(each.duration), ", ".join(map(str, each.blocked_by)))
        for each in found
    ]  # fmt: skip
    return output.listing(console, TITLES, rows)


def _gist(found: Found) -> object:
    return [(each.label, each.pid, each.granted, each.blocked_by) for each in found]


def _count(found: Found) -> str:
    if not found:
        return "no lock is held"
    waiting = sum(not each.granted for each in found)
    held = len(found) - waiting
    return f"{held} lock{'s' if held != 1 else ''} held" + (f", {waiting} waiting" if waiting else "")
