"""holdfast ops: list and replay operations, verify their log, recover those that were left partial."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import completion
from holdfast.cli.app import fail, json_option, limit_option, listing_options, open_client
from holdfast.cli.operation_key import resolve_key
from holdfast.cli.ops_export import export
from holdfast.cli.ops_recover import complete, recover, reset, rollback

if TYPE_CHECKING:
    from holdfast import Client, OperationRecord
    from holdfast.cli.output import Column
    from holdfast.records import LogEntry

STATUSES = ("success", "failure", "partial", "undone", "running")
FIELDS = (
    "key", "label", "status", "attempt", "failures", "fence", "pipeline", "task", "dataset", "operation", "result_hash",
    "error", "pointer", "run", "rollback", "effect_started", "created_at", "updated_at", "expires_at",
)  # fmt: skip
MAX_RESULT = 400
"""Characters of a result on a terminal."""

_since_option = click.option("--since", type=click.FloatRange(0, min_open=True), metavar="S",
                             help="Only operations that changed in the last S seconds.")  # fmt: skip


@click.group()
def ops() -> None:
    """Inspect operations, verify their log, repair interrupted ones.

    KEY is the text key of an operation, or its digest of 64 hex digits, or at least the first 4 of these digits, if no
    other operation begins with them.

    \b
    Examples:
      holdfast ops ls --status partial
      holdfast ops show charge:42
      holdfast ops verify && holdfast ops health --strict
    """


@ops.command()
@click.option(
    "--status",
    type=click.Choice(STATUSES),
    help="Only operations with this status. partial: interrupted, its process died.",
)
@click.option("--dataset", metavar="NAME", shell_complete=completion.datasets, help="Only operations on this dataset.")
@limit_option(20)
@listing_options
@click.pass_context
def ls(context: click.Context, status: str | None, dataset: str | None, limit: int, as_json: bool, wide: bool) -> None:
    """List operations, the latest first.

    \b
    Examples:
      holdfast ops ls --dataset parcels
      holdfast ops ls --status partial --json | jq -r '.[].key'
    """
    from holdfast.cli import output

    with open_client(context) as client:
        records = client.operations.list(status=status, dataset=dataset, limit=limit)
    if as_json:
        output.print_json([_as_json(record) for record in records])
    elif records:
        output.print_table(*operations_table(records), wide=wide)
    else:
        click.echo("there are no operations" if status is None else f"no operation is {status}", err=True)


@ops.command()
@click.argument("key", required=False, shell_complete=completion.operation_keys)
@click.option("--run", metavar="ID", help="The operation with this run in lineage, and only the entries of that run.")
@listing_options
@click.pass_context
def show(context: click.Context, key: str | None, run: str | None, as_json: bool, wide: bool) -> None:
    """Show one operation with its result and all its log entries.

    Give KEY, or with --run the runId of an OpenLineage event. A long result is cut off on a terminal; --json prints all
    of it. Exit code 1 when there is no such operation.

    \b
    Examples:
      holdfast ops show charge:42
      holdfast ops show --run 91c2a4f0-77ab-8d11-8c55-0f3a9be2d604
    """
    from holdfast.cli import output

    if (key is None) == (run is None):
        raise click.UsageError("give either KEY or --run ID")
    with open_client(context) as client:
        record = _require(client, resolve_key(client, key)) if key is not None else _require_run(client, run)
        entries = [entry for entry in client.operations.history(record.key) if run in (None, entry.run)]
        [state] = client.operations.replay(record.key)
    if as_json:
        entry_rows = [{**asdict(entry), "at": _to_datetime(entry.at), "run": entry.run} for entry in entries]
        for row in entry_rows:
            del row["payload"], row["operation"]
        output.print_json({**_as_json(record), "result": _result(state), "kept": state.kept, "entries": entry_rows})
        return
    output.print_fields(operation_fields(record, state))
    click.echo()
    output.print_table(*entries_table(entries), wide=wide)


@ops.command()
@click.argument("key", required=False, shell_complete=completion.operation_keys)
@_since_option
@listing_options
@click.pass_context
def replay(context: click.Context, key: str | None, since: float | None, as_json: bool, wide: bool) -> None:
    """Recompute every operation's state from the log. Nothing is executed.

    Exit code 1 when there is no operation KEY.

    \b
    Examples:
      holdfast ops replay charge:42
      holdfast ops replay --since 86400 --json
    """
    from holdfast.cli import output

    with open_client(context) as client:
        key = None if key is None else resolve_key(client, key)
        states = client.operations.replay(key, since=_seconds_ago(since))
        if key is not None and not states:
            _require(client, key)
    if as_json:
        output.print_json(
            [{**asdict(state), "at": _to_datetime(state.at), "result": _result(state)} for state in states]
        )
    elif states:
        columns = (
            output.Column("operation", first=12), output.Column("status"), output.Column("attempt"),
            output.Column("effect"), output.Column("error", 24), output.Column("entries"), output.Column("result"),
        )  # fmt: skip
        rows = [
            (state.operation, output.state(state.status), state.attempt, "yes" if state.effect_started else "no",
             state.error, state.number, state.result_hash and state.result_hash[:12])
            for state in states
        ]  # fmt: skip
        output.print_table(columns, rows, wide=wide)
    else:
        click.echo(f"no operation changed in the last {since:g} s" if since else "the log is empty", err=True)


@ops.command()
@click.argument("key", required=False, shell_complete=completion.operation_keys)
@_since_option
@click.option("--archive", "archives", type=click.File(), multiple=True, metavar="FILE",
              help="Archive to verify with the log; may be repeated, the oldest first.")  # fmt: skip
@click.option("--lineage", is_flag=False, flag_value="", metavar="[FILE]",
              help="Compare published lineage (JSON lines) with the log instead.")  # fmt: skip
@click.option("--relay", metavar="NAME", shell_complete=completion.relays,
              help="Relay that published it. Without a file: its parked and pending events.")  # fmt: skip
@json_option
@click.pass_context
def verify(
    context: click.Context, key: str | None, since: float | None, archives: tuple[Any, ...], lineage: str | None,
    relay: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Verify that the log, or published lineage, was not changed.

    Every entry contains the hash of the entry before it, so changed, removed, added and moved entries are found. An
    operation that was removed completely is found only with --archive or --lineage.

    With --lineage FILE: finds published events that are missing, changed, unknown to the log, or out of order within
    their dataset. With --lineage or --relay and no file: lists the events that are parked or not yet published.

    Exit code 1 when something was changed, or when there is no operation KEY. Events that are not yet published, and
    locks that a crash left unreleased, are listed with exit code 0.

    \b
    Examples:
      holdfast ops verify
      holdfast ops verify --archive 2026-10.jsonl --json
      holdfast ops verify --lineage
      holdfast ops verify --lineage lineage.jsonl --relay catalogue
    """
    from holdfast.cli import output

    checks_lineage = lineage is not None or relay is not None
    if checks_lineage and (key is not None or since is not None or archives):
        raise click.UsageError("--lineage and --relay check the whole log: omit KEY, --since and --archive")
    with open_client(context) as client:
        try:
            if checks_lineage:
                with click.open_file(lineage) if lineage else nullcontext() as file:
                    report = client.relays.verify(file, relay=relay)
            else:
                key = None if key is None else resolve_key(client, key)
                lines = [line for archive in archives for line in archive]
                report = client.operations.verify(key, since=_seconds_ago(since), archives=lines)
        except OSError as error:
            raise click.UsageError(
                f"{error.filename or 'the file'} cannot be read: {error.strerror or error}"
            ) from None
        except UnicodeDecodeError:
            raise click.UsageError(f"{lineage or 'the archive'} is not text in UTF-8") from None
        except LookupError as error:
            raise click.UsageError(str(error)) from None
        if key is not None and not report.operations and not report.problems:
            _require(client, key)
    if as_json:
        problems = [{**problem._asdict(), "broken": problem.broken} for problem in report.problems]
        summary = {"passed": report.passed, "operations": report.operations, "entries": report.entries}
        output.print_json({**summary, "problems": problems})
    else:
        for problem in report.problems:
            click.echo(f"{problem.operation} entry {problem.number}: {problem.what}: {output.clean(problem.told)}")
        verdict = "sound" if report.passed else f"{len(report.broken)} problems"
        what = "events" if checks_lineage else "entries"
        click.echo(f"{report.operations} operations, {report.entries} {what}: {verdict}")
    sys.exit(0 if report.passed else 1)


@ops.command()
@click.option("--stale", type=click.FloatRange(0), default=3600.0, show_default=True, metavar="S",
              help="Seconds after which an interrupted operation fails the check.")  # fmt: skip
@click.option("--strict", is_flag=True, help="Exit with 1 also on a warning.")
@json_option
@click.pass_context
def health(context: click.Context, stale: float, strict: bool, as_json: bool) -> None:
    """Check the health of the log, for monitoring.

    Checks indexes, interrupted operations, claims without an owner, open reviews, growth, unpublished lineage, and the
    hash chains of the latest operations.

    Exit code 1 when a check fails; with --strict, also when one warns.

    \b
    Example:
      holdfast ops health --strict
    """
    from holdfast.cli.doctor import report

    with open_client(context) as client:
        examination = client.operations.health(stale=stale)
    report(context, examination, strict=strict, as_json=as_json)


for _command in (complete, export, recover, reset, rollback):
    ops.add_command(_command)


def operations_table(records: list[OperationRecord]) -> tuple[list[Column], list[tuple[object, ...]]]:
    """The columns and rows of operations."""
    from holdfast.cli.output import Column, format_time, state

    columns = [
        Column("operation", 16), Column("status"), Column("key", first=12), Column("attempt"), Column("updated (UTC)"),
        Column("error", 24), Column("dataset", 8),
    ]  # fmt: skip
    return columns, [
        (record.label, state(record.status), record.key, record.attempt, format_time(record.updated_at),
         _error_text(record), record.dataset)
        for record in records
    ]  # fmt: skip


def operation_fields(record: OperationRecord, replayed: Any) -> list[tuple[str, object]]:
    """The fields of an operation, with the result that its log has."""
    from holdfast.cli.output import state

    fields = {**{name: getattr(record, name) for name in FIELDS}, "status": state(record.status)}
    fields |= {"error": _error_text(record), "result": _result_text(record, replayed)}
    return [(name.replace("_", " "), value) for name, value in fields.items() if value is not None]


def entries_table(entries: list[LogEntry]) -> tuple[list[Column], list[tuple[object, ...]]]:
    """The columns and rows of an operation's log."""
    from holdfast.cli.output import Column, format_time, state

    columns = [
        Column("entry"), Column("at (UTC)"), Column("kind"), Column("attempt"), Column("detail", 24), Column("fence"),
    ]  # fmt: skip
    return columns, [
        (entry.number, format_time(_to_datetime(entry.at)), state(entry.kind), entry.attempt,
         entry.detail.removeprefix("{}"), entry.fence)
        for entry in entries
    ]  # fmt: skip


def _require(client: Client, key: str) -> Any:
    """The record of the operation. Exits with 1 if there is none."""
    record = client.operations.get(key)
    if record is None:
        fail(f"there is no operation {key!r}")
    return record


def _require_run(client: Client, run: Any) -> Any:
    try:
        return client.operations.find_run(run)
    except LookupError as error:
        fail(str(error))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _as_json(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in FIELDS}


def _result(state: Any) -> Any:
    """The result in JSON, bytes in hex; None if the log does not keep it."""
    value = state.value if state.kept else None
    return value.hex() if isinstance(value, bytes) else value


def _result_text(record: Any, state: Any) -> str | None:
    from holdfast.cli import output

    if record.status != "success":
        return None
    if state.result_hash != record.result_hash:
        return "unknown: its entries name another one; run holdfast ops verify"
    if not state.kept:
        return "not kept"
    value = state.value
    text = f"0x{value.hex()}" if isinstance(value, bytes) else output.to_json(value, indent=None)
    is_long = sys.stdout.isatty() and len(text) > MAX_RESULT
    return f"{text[:MAX_RESULT]}… ({len(text)} characters; --json prints all)" if is_long else text


def _error_text(record: Any) -> str | None:
    return None if not record.error else f"{record.error.get('type')}: {record.error.get('message')}"


def _to_datetime(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1_000_000, UTC)


def _seconds_ago(seconds: float | None) -> datetime | None:
    try:
        return None if seconds is None else datetime.now(UTC) - timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        raise click.UsageError(
            f"--since {seconds:g} is too large: it must be a number of seconds since a date in the calendar"
        ) from None
