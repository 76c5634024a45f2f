"""holdfast policy: the policy of datasets that is stored in the database."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

import holdfast
from holdfast.cli import completion
from holdfast.cli.app import actor_option, fail, json_option, limit_option, listing_options, open_client, reason_option


@click.group()
def policy() -> None:
    """Store rules for datasets in the database.

    Operations follow the stored policy whether their clients know it or not. On PostgreSQL the database itself refuses
    what it forbids. A client's own policy adds to it.

    \b
    Examples:
      holdfast policy apply policy.toml --reason "agreed on Monday" --dry-run
      holdfast policy show
    """


@policy.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Show the changes without making them.")
@json_option
@reason_option
@actor_option
@click.pass_context
def apply(context: click.Context, file: str, dry_run: bool, as_json: bool, reason: str, actor: str) -> None:
    """Store the policy of a file in the place of the stored one.

    FILE is TOML with tables such as [datasets."burials*"]; an empty table [datasets] stores no rules. This is the
    audited command `holdfast do policy.apply`. Exit code 1 when nothing would change.

    \b
    Example:
      holdfast policy apply policy.toml --reason "agreed on Monday"
    """
    from holdfast.cli import output
    from holdfast.cli.do import run_governed

    datasets = json.dumps(_read_datasets(file))
    with open_client(context) as client:
        outcome = run_governed(
            client, "policy.apply", {"datasets": datasets}, actor=actor, reason=reason, dry_run=dry_run
        )
        stored = client.policies.get()
    version = None if stored is None else stored.version
    if as_json:
        output.print_json({"version": version, "changes": outcome.changes, "dry_run": dry_run})
        return
    for line in outcome.changes:
        click.echo(output.clean(line))
    if dry_run:
        click.echo("dry run: nothing was changed", err=True)
    else:
        click.echo(f"version {version} is in force; recorded: {output.clean(actor)}: {output.clean(reason)}")


@policy.command()
@click.argument("version", type=int, required=False, shell_complete=completion.policy_versions)
@json_option
@click.pass_context
def show(context: click.Context, version: int | None, as_json: bool) -> None:
    """Show the stored policy, or an earlier VERSION.

    It is printed as a file that `apply` takes. Exit code 1 when there is none.

    \b
    Example:
      holdfast policy show > policy.toml
    """
    from holdfast.cli import output

    with open_client(context) as client:
        record = client.policies.get(version)
    if record is None:
        fail("no policy is stored" if version is None else f"there is no version {version} of the policy")
    if as_json:
        output.print_json(asdict(record))
        return
    at = output.format_time(record.applied_at)
    click.echo(
        f"# version {record.version}, applied {at} by {output.clean(record.actor)}: {output.clean(record.reason)}"
    )
    click.echo("\n[datasets]" if not record.datasets else "", nl=not record.datasets)
    for pattern, settings in record.datasets.items():
        click.echo(f"\n[datasets.{json.dumps(pattern)}]")
        for name, value in settings.items():
            click.echo(f"{name} = {json.dumps(value)}")


@policy.command()
@limit_option(100)
@listing_options
@click.pass_context
def history(context: click.Context, limit: int, as_json: bool, wide: bool) -> None:
    """List the versions of the stored policy, the latest first.

    \b
    Example:
      holdfast policy history
    """
    from holdfast.cli import output

    with open_client(context) as client:
        records = client.policies.list(limit=limit)
    if as_json:
        output.print_json([asdict(record) for record in records])
    elif records:
        columns = (
            output.Column("version"), output.Column("applied (UTC)"), output.Column("actor", 8),
            output.Column("reason", 16), output.Column("datasets", 16),
        )  # fmt: skip
        rows = [
            (record.version, output.format_time(record.applied_at), record.actor, record.reason,
             ", ".join(record.datasets))
            for record in records
        ]  # fmt: skip
        output.print_table(columns, rows, wide=wide)
    else:
        click.echo("no policy is stored", err=True)


def _read_datasets(file: str) -> dict[str, Any]:
    """UsageError that lists everything that is wrong with the file."""
    import tomllib
    from pathlib import Path

    try:
        holdfast.governance.Policy.read(file)
        tables: dict[str, Any] = tomllib.loads(Path(file).read_text(encoding="utf-8"))["datasets"]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return tables
