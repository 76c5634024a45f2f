"""holdfast ops: what became of operations, proof of it, and mending what was left half done."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.app import connected
from holdfast.cli.export import export
from holdfast.cli.ops_recover import recover, reset, rollback

if TYPE_CHECKING:
    from holdfast import Client

STATUSES = ("success", "failure", "partial", "running")
TITLES = ("operation", "status", "attempt", "dataset", "updated (UTC)", "error", "key")
STEPS = ("entry", "at (UTC)", "kind", "attempt", "fence", "detail")
FIELDS = (
    "key", "label", "status", "attempt", "failures", "fence", "pipeline", "task", "dataset", "operation", "result_hash",
    "error", "pointer", "rollback", "effect_started", "created_at", "updated_at", "expires_at",
)  # fmt: skip

_json = click.option("--json", "as_json", is_flag=True, help="For programs.")
_since = click.option("--since", type=click.FloatRange(0, min_open=True), metavar="S",
                      help="Only what was touched in the last so many seconds.")  # fmt: skip


@click.group()
def ops() -> None:
    """Look at operations, prove their log, mend what is half done.

    KEY is the text that an operation was given as its key, or the 64 digits that `holdfast ops ls` shows.

    \b
    Examples:
      holdfast ops ls --status partial
      holdfast ops show charge:42
      holdfast ops verify && holdfast ops health --strict
    """


@ops.command()
@click.option("--status", type=click.Choice(STATUSES), help="Only those; partial: left half done by somebody who died.")
@click.option("--dataset", metavar="NAME", help="Only of this dataset.")
@click.option("--most", type=click.IntRange(1, 10_000), default=20, show_default=True, metavar="N",
              help="Show at most so many.")  # fmt: skip
@_json
@click.pass_context
def ls(context: click.Context, status: str | None, dataset: str | None, most: int, as_json: bool) -> None:
    """Show operations, the latest first.

    \b
    Examples:
      holdfast ops ls --dataset parcels
      holdfast ops ls --status partial --json | jq -r '.[].key'
    """
    from holdfast.cli import output

    with connected(context) as client:
        found = client.operations.list(status=status, dataset=dataset, most=most)
    if as_json:
        click.echo(output.for_programs([_for_programs(each) for each in found]))
    elif found:
        rows = [
            (
                each.label,
                each.status,
                each.attempt,
                each.dataset,
                output.moment(each.updated_at),
                _error(each),
                each.key,
            )
            for each in found
        ]
        console = output.console()
        output.show(console, output.listing(console, TITLES, rows))
    else:
        click.echo("no operation is in the log" if status is None else f"no operation is {status}", err=True)


@ops.command()
@click.argument("key")
@_json
@click.pass_context
def show(context: click.Context, key: str, as_json: bool) -> None:
    """Show one operation, and every entry that the log has of it.

    Exit code 1 when there is no such operation.

    \b
    Example:
      holdfast ops show charge:42
    """
    from holdfast.cli import output

    with connected(context) as client:
        record = _found(client, key)
        entries = client.operations.history(key)
    if as_json:
        told = [{**asdict(each), "at": _at(each.at)} for each in entries]
        for each in told:
            del each["payload"], each["operation"]
        click.echo(output.for_programs({**_for_programs(record), "entries": told}))
        return
    console = output.console()
    facts = [(name.replace("_", " "), _error(record) if name == "error" else getattr(record, name)) for name in FIELDS]
    output.show(console, output.listing(console, ("what", "value"), [fact for fact in facts if fact[1] is not None]))
    click.echo()
    rows = [
        (each.number, output.moment(_at(each.at)), each.kind, each.attempt, each.fence, each.detail.removeprefix("{}"))
        for each in entries
    ]
    output.show(console, output.listing(console, STEPS, rows))


@ops.command()
@click.argument("key", required=False)
@_since
@_json
@click.pass_context
def replay(context: click.Context, key: str | None, since: float | None, as_json: bool) -> None:
    """Fold the log into what became of each operation. Nothing is executed.

    Exit code 1 when there is no operation KEY.

    \b
    Examples:
      holdfast ops replay charge:42
      holdfast ops replay --since 86400 --json
    """
    from holdfast.cli import output

    with connected(context) as client:
        states = client.operations.replay(key, since=_ago(since))
        if key is not None and not states:
            _found(client, key)
    if as_json:
        told = [{**asdict(each), "at": _at(each.at), "result": each.value if each.kept else None} for each in states]
        for each in told:
            each["result"] = each["result"].hex() if isinstance(each["result"], bytes) else each["result"]
        click.echo(output.for_programs(told))
    elif states:
        titles = ("operation", "status", "attempt", "entries", "effect", "result", "error")
        rows = [
            (each.operation, each.status, each.attempt, each.number, "yes" if each.effect_started else "no",
             each.result_hash and each.result_hash[:12], each.error)
            for each in states
        ]  # fmt: skip
        console = output.console()
        output.show(console, output.listing(console, titles, rows))
    else:
        click.echo("nothing was touched since then" if since else "the log is empty", err=True)


@ops.command()
@click.argument("key", required=False)
@_since
@click.option("--archive", "archives", type=click.File(), multiple=True, metavar="FILE",
              help="What was put away, to be proven with the rest. In the order it was written.")  # fmt: skip
@click.option("--lineage", is_flag=False, flag_value="", metavar="[FILE]",
              help="Compare lineage that was published with the log instead: lines of JSON.")  # fmt: skip
@click.option(
    "--relay", metavar="NAME", help="Whose lineage it is. Without a file: what it has parked, or not told yet."
)
@_json
@click.pass_context
def verify(
    context: click.Context, key: str | None, since: float | None, archives: tuple[Any, ...], lineage: str | None,
    relay: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Prove that nobody has changed the log, or what was published.

    Every entry carries the hash of the one before it. Whatever was changed, taken out, put in or moved is told, with
    exit code 1; locks that were never released, as a crash leaves them, are told as well. An operation of which nothing
    is left in the log shows only with --archive or --lineage. Exit code 1, too, when there is no operation KEY.

    With --lineage or --relay: events that are missing, unknown to the log, other than they were, or of their dataset
    out of order; what is still to be told is told as well, and is no reason for exit code 1. Without FILE, what relays
    have parked and not told yet, of NAME or of all.

    \b
    Examples:
      holdfast ops verify
      holdfast ops verify --archive 2026-10.jsonl --json
      holdfast ops verify --lineage
      holdfast ops verify --lineage lineage.jsonl --relay catalogue
    """
    from holdfast.cli import output

    of_lineage = lineage is not None or relay is not None
    if of_lineage and (key is not None or since is not None or archives):
        raise click.UsageError("--lineage and --relay are about all of the log: leave out KEY, --since and --archive")
    with connected(context) as client:
        try:
            if of_lineage:
                with click.open_file(lineage) if lineage else nullcontext() as file:
                    found = client.relays.verify(file, relay=relay)
            else:
                lines = [line for each in archives for line in each]
                found = client.operations.verify(key, since=_ago(since), archives=lines)
        except OSError as error:
            raise click.UsageError(
                f"{error.filename or 'the file'} cannot be read: {error.strerror or error}"
            ) from None
        except UnicodeDecodeError:
            raise click.UsageError(f"{lineage or 'the archive'} is not text in UTF-8") from None
        except LookupError as error:
            raise click.UsageError(str(error)) from None
        if key is not None and not found.operations and not found.problems:
            _found(client, key)
    if as_json:
        problems = [{**each._asdict(), "broken": each.broken} for each in found.problems]
        about = {"passed": found.passed, "operations": found.operations, "entries": found.entries}
        click.echo(output.for_programs({**about, "problems": problems}))
    else:
        for each in found.problems:
            click.echo(f"{each.operation} entry {each.number}: {each.what}: {output.clean(each.told)}")
        sound = "sound" if found.passed else f"{len(found.broken)} problems"
        what = "events" if of_lineage else "entries"
        click.echo(f"{found.operations} operations, {found.entries} {what}: {sound}")
    sys.exit(0 if found.passed else 1)


@ops.command()
@click.option("--stale", type=click.FloatRange(0), default=3600.0, show_default=True, metavar="S",
              help="Seconds from which something left half done is a failure.")  # fmt: skip
@click.option("--strict", is_flag=True, help="A warning is reason enough for exit code 1.")
@_json
@click.pass_context
def health(context: click.Context, stale: float, strict: bool, as_json: bool) -> None:
    """Look the log of operations over.

    For jobs that run by themselves.

    Indexes, what was left half done, claims without an owner, growth, lineage that waits, the chains of what was
    touched last.
    Exit code 1 when a check fails.

    \b
    Example:
      holdfast ops health --strict
    """
    from holdfast.cli.doctor import report

    with connected(context) as client:
        examination = client.operations.health(stale=stale)
    report(context, examination, strict=strict, as_json=as_json)


for _command in (export, recover, reset, rollback):
    ops.add_command(_command)


def _found(client: Client, key: str) -> Any:
    """Its record; the end when there is none."""
    record = client.operations.get(key)
    if record is None:
        click.echo(f"holdfast: there is no operation {key!r}", err=True)
        sys.exit(1)
    return record


def _for_programs(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in FIELDS}


def _error(record: Any) -> str | None:
    return None if not record.error else f"{record.error.get('type')}: {record.error.get('message')}"


def _at(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1_000_000, UTC)


def _ago(seconds: float | None) -> datetime | None:
    try:
        return None if seconds is None else datetime.now(UTC) - timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        raise click.UsageError(f"--since must be seconds that lie in the calendar, not {seconds:g}") from None
