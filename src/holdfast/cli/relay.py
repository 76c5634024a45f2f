"""holdfast relay: run a relay, list relays and their lag, and the events that a sink refused."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from holdfast.cli import completion
from holdfast.cli.app import Integer, Seconds, actor_option, limit_option, listing_options, open_client, reason_option


@click.group()
def relay() -> None:
    """Publish operation events (lineage) to other systems.

    \b
    Examples:
      holdfast relay run catalogue jsonl:lineage.jsonl
      holdfast relay ls
      holdfast relay parked catalogue
    """


@relay.command()
@click.argument("name", shell_complete=completion.relays)
@click.argument("sink")
@click.option("--once", is_flag=True, help="Publish the pending events, then exit. For cron.")
@click.option("--tries", type=Integer(1, 1000), default=5, show_default=True, metavar="N",
              help="Park an event that the sink refused N times while it accepted others.")  # fmt: skip
@click.option("--poll", type=Seconds(0.001), default=1.0, show_default=True, metavar="S",
              help="Seconds between two polls of the log.")  # fmt: skip
@click.pass_context
def run(context: click.Context, name: str, sink: str, once: bool, tries: int, poll: float) -> None:
    """Run a relay until it is interrupted.

    If several processes run the same relay, one publishes and the others stand by.

    \b
    SINK is one of
      jsonl:FILE, prov:FILE, openlineage:FILE   FILE may be - for stdout
      openlineage:URL                           an OpenLineage server
      graph:URL                                 Neo4j
      MODULE:NAME                               your sink, or its factory

    Exit code 1 with --once when the sink is down, or when another process runs the relay.

    \b
    Examples:
      holdfast relay run catalogue jsonl:lineage.jsonl
      holdfast relay run catalogue shop.lineage:sink --once
    """
    from holdfast.lineage.sinks import open_sink

    sys.path.append("")  # at the end, so that no module of this folder replaces an installed one
    with open_client(context) as client:
        worker = client.relay(name, open_sink(sink), tries=tries, poll=poll)
        if once:
            click.echo(f"{worker.step()} events published", err=True)
        else:
            worker.run(signals=True)


@relay.command()
@listing_options
@click.pass_context
def ls(context: click.Context, as_json: bool, wide: bool) -> None:
    """List the relays: who runs each, and how far behind it is.

    \b
    Example:
      holdfast relay ls --json | jq '.[] | select(.lag > 60)'
    """
    from holdfast.cli import output

    with open_client(context) as client:
        records = client.relays.list()
    if as_json:
        output.print_json([asdict(record) for record in records])
    elif records:
        columns = (
            output.Column("relay", 12), output.Column("runs at", 12), output.Column("pending"), output.Column("lag"),
            output.Column("parked"), output.Column("problem", 20), output.Column("published"),
        )  # fmt: skip
        rows = [
            (record.name, record.holder, record.entries, output.format_duration(record.lag), record.parked,
             record.problem, record.told)
            for record in records
        ]  # fmt: skip
        output.print_table(columns, rows, wide=wide)
    else:
        click.echo("there are no relays", err=True)


@relay.command()
@click.argument("name", shell_complete=completion.relays)
@limit_option(20)
@listing_options
@click.pass_context
def parked(context: click.Context, name: str, limit: int, as_json: bool, wide: bool) -> None:
    """List events that the sink refused, the oldest first.

    An event is parked when the sink refused it --tries times while it accepted others.

    \b
    Example:
      holdfast relay parked catalogue --json | jq '.[].event'
    """
    from holdfast.cli import output

    with open_client(context) as client:
        records = client.relays.parked(name, limit=limit)
    if as_json:
        output.print_json([{**asdict(record), "event": record.event.as_dict()} for record in records])
    elif records:
        columns = (
            output.Column("event"), output.Column("operation", 12), output.Column("problem", 20),
            output.Column("tries"), output.Column("retry"), output.Column("type"), output.Column("parked (UTC)"),
            output.Column("dataset", 8),
        )  # fmt: skip
        rows = [
            (record.id, record.event.label, record.problem, record.tries, "yes" if record.again else "no",
             record.event.type, output.format_time(record.parked_at), record.event.dataset)
            for record in records
        ]  # fmt: skip
        output.print_table(columns, rows, wide=wide)
    else:
        click.echo(f"relay {name!r} has no parked events", err=True)


@relay.command()
@click.argument("name", shell_complete=completion.relays)
@click.argument("event", required=False)
@click.pass_context
def retry(context: click.Context, name: str, event: str | None) -> None:
    """Publish parked events again: EVENT, or all.

    The process that runs the relay publishes them first. Exit code 1 when no such event is parked.

    \b
    Example:
      holdfast relay retry catalogue
    """
    with open_client(context) as client:
        count = client.relays.retry(name, event)
    nothing = f"relay {name!r} has no parked event {event!r}" if event else f"relay {name!r} has no parked events"
    click.echo(f"{count} events will be published again" if count else nothing, err=True)
    sys.exit(0 if count else 1)


@relay.command()
@click.argument("name", shell_complete=completion.relays)
@reason_option
@actor_option
@click.pass_context
def rm(context: click.Context, name: str, reason: str, actor: str) -> None:
    """Remove a relay that no process runs any more.

    Its unpublished events then no longer prevent the log from being archived. Exit code 1 when there is no such relay,
    or when it is running: stop it first.

    \b
    Example:
      holdfast relay rm old-catalogue --reason "moved to the new one"
    """
    with open_client(context) as client:
        removed = client.relays.remove(name, actor=actor, reason=reason)
    click.echo("removed" if removed else f"holdfast: there is no relay {name!r}", err=True)
    sys.exit(0 if removed else 1)
