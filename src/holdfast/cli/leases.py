"""holdfast ls, history, release: who holds what, who held it before, and taking one away."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.app import Seconds, acting, connected

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from holdfast import Client

MOST = 10_000
Held = list[dict[str, Any]]
TITLES = ("lease", "holder", "host", "pid", "age", "left", "fence")
OWN = ("@", "holdfast:")
"""What the names of holdfast's own leases begin with: gates, slots, the one that governed commands run under."""
PAST_TITLES = ("lease", "holder", "ended (UTC)", "held for", "how", "fence", "by", "reason")


@click.command()
@click.option("--watch", is_flag=True, help="Go on looking, until Ctrl-C.")
@click.option("--every", type=Seconds(0.1, 3600), default=1.0, show_default=True, metavar="S",
              help="Seconds between two looks of --watch.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def ls(context: click.Context, watch: bool, every: float, as_json: bool) -> None:
    """Show who holds which lease, and for how long.

    Age, and the time left if nothing renews it, are by the database's clock. With --watch a terminal shows a live view;
    in a pipe the list is printed anew whenever a lease changes hands, with --json as one line.

    \b
    Examples:
      holdfast ls
      holdfast ls --watch
      holdfast ls --json | jq -r '.[] | select(.remaining < 5) | .name'
    """
    from holdfast.cli import output

    with connected(context) as client:
        if watch:
            from holdfast.cli import watch_mode

            watch_mode.watch(watch_mode.View(lambda: _held(client), _listing, _who, _count), every, as_json)
            return
        held = _held(client)
    if as_json:
        click.echo(output.for_programs(held))
    elif held:
        console = output.console()
        output.show(console, _listing(console, held))
        if any(each["name"].startswith(OWN) for each in held):
            click.echo("names that begin with @ or holdfast: are holdfast's own, such as gates and slots", err=True)
    else:
        click.echo("no lease is held", err=True)


@click.command()
@click.argument("name", required=False)
@click.option("--most", type=click.IntRange(1, MOST), default=20, show_default=True, metavar="N",
              help="Show at most so many.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Those of holdfast's own leases, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def history(context: click.Context, name: str | None, most: int, everything: bool, as_json: bool) -> None:
    """Show who held leases before, the latest first.

    The grants that have ended, of the lease NAME or of all but holdfast's own, whose names begin with @ or holdfast:;
    every governed command has two of them. Those that an operator took away are shown always.

    How a grant ended: released, expired (its holder stopped renewing it), session_lost, reentered (by the same holder)
    or forced (taken away by an operator, with who and why). The newest 10,000 are kept.

    \b
    Examples:
      holdfast history nightly-import
      holdfast history --most 1000 --json | jq '.[] | select(.outcome == "forced")'
    """
    from holdfast.cli import output

    with connected(context) as client:
        whole = name is not None or everything
        past = client.leases.history(name, most=most) if whole else _users(client, most)
    if as_json:
        names = ("name", "holder", "host", "pid", "fence", "acquired_at", "ended_at", "outcome", "actor", "reason")
        click.echo(output.for_programs([{key: getattr(each, key) for key in names} for each in past]))
    elif past:
        rows = [
            (each.name, each.holder, output.moment(each.ended_at),
             output.span((each.ended_at - each.acquired_at).total_seconds()),
             each.outcome, each.fence, each.actor, each.reason)
            for each in past
        ]  # fmt: skip
        console = output.console()
        output.show(console, output.listing(console, PAST_TITLES, rows))
    else:
        click.echo("no grant has ended yet" if name is None else f"no grant of lease {name!r} has ended yet", err=True)


@click.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Take it away from whoever holds it.")
@click.option("--reason", metavar="TEXT", help="Why, for the record. Needed with --force.")
@acting
@click.pass_context
def release(context: click.Context, name: str, force: bool, reason: str | None, actor: str) -> None:
    """Take the lease NAME away from its holder.

    Its holder cannot commit a protected transaction from this moment on, and learns of it with its next heartbeat;
    until then it may still be at work. Who took it away and why is kept in `holdfast history`. This is the governed
    command `holdfast do lease.release`: one at a time, and on the record.

    Exit code 1 when nobody holds it.

    \b
    Example:
      holdfast release nightly-import --force --reason "its machine is being replaced"
    """
    if not force:
        raise click.UsageError(
            f"lease {name!r} is its holder's to release, who may still be at work. "
            "To take it away nevertheless, add --force and --reason."
        )
    if not reason:
        raise click.UsageError("--force needs --reason: it is kept in the history of the lease")
    from holdfast.cli import output
    from holdfast.cli.do import governed

    with connected(context) as client:
        governed(client, "lease.release", {"name": name}, actor=actor, reason=reason)
        past = client.leases.history(name, most=20)
    ours = ("forced", actor, reason)
    record = next((each for each in past if (each.outcome, each.actor, each.reason) == ours), None)
    told = "its record is in the history"
    if record is not None:
        held = f"held by {output.clean(record.holder)} with fence {record.fence}"
        told = f"{held}; recorded: {record.actor}: {record.reason}"
    click.echo(f"released lease {name!r}, {told}")


def _users(client: Client, most: int) -> list[Any]:
    """As many as were asked for of what is not holdfast's own doing, if there are so many."""
    asked = most
    while True:
        past = client.leases.history(most=asked)
        found = [each for each in past if each.outcome == "forced" or not each.name.startswith(OWN)]
        if len(found) >= most or len(past) < asked or asked == MOST:
            return found[:most]
        asked = min(asked * 10, MOST)


def _held(client: Client) -> Held:
    """What the database knows, and by its clock: how old each lease is, how long it has left."""
    return [
        {
            "name": each.name,
            "holder": each.holder,
            "host": each.host,
            "pid": each.pid,
            "fence": each.fence,
            "acquired_at": each.acquired_at,
            "expires_at": each.expires_at,
            "age": round((each.expires_at - each.acquired_at - timedelta(seconds=each.remaining)).total_seconds(), 3),
            "remaining": round(each.remaining, 3),
            "info": dict(each.info),
        }
        for each in client.leases.list()
    ]


def _listing(console: Console, held: Held) -> list[Text]:
    from holdfast.cli import output

    rows = [
        (each["name"], each["holder"], each["host"], each["pid"], output.span(each["age"]),
         output.span(each["remaining"]), each["fence"])
        for each in held
    ]  # fmt: skip
    return output.listing(console, TITLES, rows)


def _who(held: Held) -> object:
    return [(each["name"], each["holder"], each["fence"]) for each in held]


def _count(held: Held) -> str:
    return "no lease is held" if not held else f"{len(held)} lease{'s' if len(held) > 1 else ''}"
