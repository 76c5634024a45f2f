"""holdfast ls, history, release: the leases that are held, the grants that have ended, and a forced release."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import completion
from holdfast.cli.app import actor_option, limit_option, listing_options, open_client, suggestion, watch_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast import Client, LeaseRecord, LockRecord
    from holdfast.cli.output import Column
    from holdfast.cli.watch_mode import View
    from holdfast.records import HistoryRecord

Rows = list[dict[str, Any]]
HISTORY_LIMIT = 10_000
"""Ended grants that the database keeps."""
OWN_PREFIXES = ("@", "holdfast:")
"""Of the names of holdfast's own leases: gates, slots, and the lease that governed commands run under."""


@click.command()
@watch_options
@listing_options
@click.pass_context
def ls(context: click.Context, /, **options: Any) -> None:
    """List held leases, with holder and remaining time.

    Age and remaining time are measured by the database's clock; `waiting` is the number of processes that wait for the
    lease. With --watch a terminal shows a live view; a pipe gets the list again whenever a lease changes hands, with
    --json as one line.

    \b
    Examples:
      holdfast ls
      holdfast ls --watch
      holdfast ls --json | jq -r '.[] | select(.remaining < 5) | .name'
    """
    from holdfast.cli.watch_mode import show

    with open_client(context) as client:
        rows = show(view(lambda: [*map(describe, client.leases.list())]), **options)
        if not options["as_json"]:
            for line in _open_transactions(client):
                click.echo(line, err=True)
    if not options["as_json"] and any(row["name"].startswith(OWN_PREFIXES) for row in rows):
        click.echo("names that begin with @ or holdfast: belong to holdfast itself, such as gates and slots", err=True)


@click.command()
@click.argument("name", required=False, shell_complete=completion.known_leases)
@limit_option(20)
@click.option("--all", "everything", is_flag=True, help="Include holdfast's own leases.")
@listing_options
@click.pass_context
def history(context: click.Context, name: str | None, limit: int, everything: bool, as_json: bool, wide: bool) -> None:
    """List past holders of leases, the latest first.

    Shows ended grants of the lease NAME, or of all leases except holdfast's own, whose names begin with @ or holdfast:
    (--all includes them). Forced releases are always shown. The database keeps the newest 10,000 grants.

    \b
    A grant ends as
      released      by its holder
      expired       its holder stopped renewing it
      session_lost  its holder's database session ended
      reentered     the same holder acquired the lease again
      forced        by an operator, with actor and reason

    \b
    Examples:
      holdfast history nightly-import
      holdfast history --limit 1000 --json | jq '.[] | select(.outcome == "forced")'
    """
    from holdfast.cli import output

    with open_client(context) as client:
        shows_all = name is not None or everything
        grants = client.leases.history(name, limit=limit) if shows_all else _users_history(client, limit)
        similar = "" if grants or name is None else _suggest_lease(client, name)
    if as_json:
        fields = (
            "name",
            "holder",
            "role",
            "host",
            "pid",
            "fence",
            "acquired_at",
            "ended_at",
            "outcome",
            "actor",
            "reason",
        )
        output.print_json([{field: getattr(grant, field) for field in fields} for grant in grants])
    elif grants:
        output.print_table(*history_table(grants), wide=wide)
    else:
        click.echo(f"lease {name!r} has no ended grants{similar}" if name else "no grant has ended yet", err=True)


@click.command()
@click.argument("name", shell_complete=completion.held_leases)
@click.option("--force", is_flag=True, help="Required, because the holder may still be running.")
@click.option("--reason", metavar="TEXT", help="Reason, for the audit log. Required.")
@actor_option
@click.pass_context
def release(context: click.Context, name: str, force: bool, reason: str | None, actor: str) -> None:
    """Release a lease that another process holds.

    The old holder can no longer commit a protected transaction. It notices at its next heartbeat, and may keep working
    until then. `holdfast history` shows actor and reason. This is the audited command `holdfast do lease.release`.

    Exit code 1 when the lease is not held, 2 without --force and --reason.

    \b
    Example:
      holdfast release nightly-import --force --reason "host is being replaced"
    """
    if not force:
        raise click.UsageError(
            f"lease {name!r} belongs to its holder, which may still be running. "
            "To release it anyway, add --force and --reason."
        )
    if not reason:
        raise click.UsageError("--force needs --reason: the history of the lease shows it")
    from holdfast.cli import output
    from holdfast.cli.do import run_governed

    with open_client(context) as client:
        run_governed(client, "lease.release", {"name": name}, actor=actor, reason=reason)
        grants = client.leases.history(name, limit=20)
    released = ("forced", actor, reason)
    grant = next((grant for grant in grants if (grant.outcome, grant.actor, grant.reason) == released), None)
    description = "see 'holdfast history'"
    if grant is not None:
        holder = f"held by {output.clean(grant.holder)} with fence {grant.fence}"
        description = f"{holder}; recorded: {grant.actor}: {grant.reason}"
    click.echo(f"released lease {name!r}, {description}")


def _suggest_lease(client: Client, name: str) -> str:
    """A question after a full stop, unless the lease is held or no name is similar."""
    held = {lease.name for lease in client.leases.list()}
    ended = {grant.name for grant in client.leases.history(limit=HISTORY_LIMIT)}
    question = "" if name in held else suggestion(name, sorted(held | ended))
    return question and f".{question}"


def _users_history(client: Client, limit: int) -> list[Any]:
    """The latest ``limit`` grants that were forced away, or are not of holdfast's own leases."""
    fetched = limit
    while True:
        grants = client.leases.history(limit=fetched)
        shown = [grant for grant in grants if grant.outcome == "forced" or not grant.name.startswith(OWN_PREFIXES)]
        if len(shown) >= limit or len(grants) < fetched or fetched == HISTORY_LIMIT:
            return shown[:limit]
        fetched = min(fetched * 10, HISTORY_LIMIT)


def _open_transactions(client: Client) -> Iterator[str]:
    """A line for each session whose open transaction has held a lease for more than a second. None for a role that may
    not list locks."""
    from holdfast import HoldfastError
    from holdfast.cli.output import clean, format_duration

    locks: list[LockRecord] = []
    with suppress(HoldfastError):
        locks = client.locks.list()
    for lock in locks:
        what = lock.name or ""
        if what.startswith(("transaction under ", "acquire of ")) and (lock.duration is None or lock.duration > 1):
            age = "" if lock.duration is None else f" for {format_duration(lock.duration)}"
            who = clean(", ".join(filter(None, (lock.role, lock.application_name))))
            yield (
                f"session {lock.pid} ({who}) has an open {clean(what)}{age}: "
                f"end it with 'holdfast locks end {lock.pid} --reason …'"
            )


def describe(lease: LeaseRecord) -> dict[str, Any]:
    """A lease in JSON, with age and remaining time by the database's clock."""
    return {
        "name": lease.name,
        "kind": lease.kind,
        "holder": lease.holder,
        "host": lease.host,
        "pid": lease.pid,
        "fence": lease.fence,
        "acquired_at": lease.acquired_at,
        "expires_at": lease.expires_at,
        "age": round((lease.expires_at - lease.acquired_at - timedelta(seconds=lease.remaining)).total_seconds(), 3),
        "remaining": round(lease.remaining, 3),
        "waiting": lease.waiting,
        "info": dict(lease.info),
    }


def time_left(row: dict[str, Any]) -> object:
    """Of a row of ``describe``."""
    from holdfast.cli.output import duration
    from holdfast.dashboard.formats import ends_with_process

    return "while it runs" if ends_with_process(row["info"]) else duration(row["remaining"])


def view(fetch: Callable[[], Rows]) -> View:
    """A listing of leases, each as ``describe`` returns it."""
    from holdfast.cli.output import Column
    from holdfast.cli.watch_mode import View

    columns = (
        Column("lease", 16), Column("holder", 12), Column("age"), Column("left"), Column("waiting"), Column("host", 20),
        Column("pid"), Column("fence"), Column("kind"),
    )  # fmt: skip
    return View(fetch, columns, _rows, _identity, _count)


def _rows(rows: Rows) -> list[tuple[object, ...]]:
    from holdfast.cli.output import duration, waiting

    return [
        (row["name"], row["holder"], duration(row["age"]), time_left(row),
         waiting(row["waiting"]), row["host"], row["pid"], row["fence"], row["kind"])
        for row in rows
    ]  # fmt: skip


def history_table(grants: list[HistoryRecord]) -> tuple[list[Column], list[tuple[object, ...]]]:
    """The columns and rows of ended grants."""
    from holdfast.cli.output import Column, duration, format_time, state

    columns = [
        Column("lease", 14), Column("how"), Column("holder", 12), Column("ended (UTC)"), Column("held for"),
        Column("by", 12), Column("reason", 24), Column("fence"),
    ]  # fmt: skip
    return columns, [
        (grant.name, state(grant.outcome), grant.holder, format_time(grant.ended_at),
         duration((grant.ended_at - grant.acquired_at).total_seconds()), grant.actor, grant.reason, grant.fence)
        for grant in grants
    ]  # fmt: skip


def _identity(rows: Rows) -> object:
    return [(row["name"], row["holder"], row["fence"]) for row in rows]


def _count(rows: Rows) -> str:
    return "no lease is held" if not rows else f"{len(rows)} lease{'s' if len(rows) > 1 else ''}"
