"""holdfast migrate: create, upgrade and remove the tables."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import click

from holdfast.cli.app import Integer, actor_option, json_option, open_client, reason_option


@click.group(invoke_without_command=True)
@click.pass_context
def migrate(context: click.Context) -> None:
    """Create, upgrade or remove the tables. Without a subcommand: up.

    On PostgreSQL, run this once per release; the role that runs it owns the tables. An SQLite file is migrated when it
    is opened.

    \b
    Examples:
      holdfast --url postgresql://owner@db1/app migrate
      holdfast migrate status
    """
    if context.invoked_subcommand is None:
        context.invoke(up)


@migrate.command()
@click.option(
    "--reason", metavar="TEXT", default="needed by this version of holdfast", help="Reason, for the audit log."
)
@actor_option
@click.pass_context
def up(context: click.Context, reason: str, actor: str) -> None:
    """Apply the missing migrations.

    Safe to repeat, and to run on many machines at once. This is the audited command `holdfast do schema.migrate`.

    Exit code 1 when the schema belongs to a later version of holdfast, or when the role may not change it.

    \b
    Example:
      holdfast --url postgresql://owner@db1/app migrate up
    """
    from holdfast.cli.do import run_governed

    with open_client(context, creates=True) as client:
        changes = []
        if client.migrations.version() < client.migrations.scripts()[-1].version:
            changes = run_governed(client, "schema.migrate", {}, actor=actor, reason=reason).changes
    for line in changes or ["nothing to do: the schema is up to date"]:
        click.echo(line)


@migrate.command()
@click.option("--to", type=Integer(min=0), required=True, help="Version to return to; 0 removes everything.")
@reason_option
@actor_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_context
def down(context: click.Context, to: int, reason: str, actor: str, yes: bool) -> None:
    """Revert migrations, and delete the data in their tables.

    This is the audited command `holdfast do schema.revert`. Below version 5 the audit log itself is deleted; stderr
    then lists the migrations that were reverted. Exit code 1 when you do not confirm.

    \b
    Example:
      holdfast --url postgresql://owner@db1/app migrate down --to 0 --reason "no longer needed"
    """
    from holdfast.cli.do import run_governed

    try:
        if not yes:
            click.confirm(f"This deletes all tables above version {to}, with their data. Continue?", abort=True)
    except click.Abort:
        raise click.ClickException("nothing was removed: not confirmed (--yes skips the question)") from None
    with open_client(context) as client:
        changes = []
        if client.migrations.version() > to:
            changes = run_governed(client, "schema.revert", {"to": to}, actor=actor, reason=reason).changes
    for line in changes or ["nothing to do"]:
        click.echo(line)


@migrate.command()
@json_option
@click.pass_context
def status(context: click.Context, as_json: bool) -> None:
    """List the migrations, with the time when each was applied.

    Exit code 1 when a migration is missing, or when the schema belongs to a later version of holdfast.

    \b
    Example:
      holdfast migrate status --json | jq '.[] | select(.applied_at == null)'
    """
    with open_client(context) as client:
        rows = [
            {
                "version": migration.version,
                "name": migration.name,
                "applied_at": None if when is None else datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds"),
            }
            for migration, when in client.migrations.status()
        ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            click.echo(f"{row['version']:04} {row['name']:<20} {row['applied_at'] or 'missing'}")
    if any(row["applied_at"] is None for row in rows):
        context.exit(1)


@migrate.command("print")
@click.option("--down", "downwards", is_flag=True, help="Print the SQL that reverts all migrations.")
@click.pass_context
def print_(context: click.Context, downwards: bool) -> None:
    """Print the SQL of all migrations, to review it or run it elsewhere.

    Does not connect to a database.

    \b
    Example:
      holdfast --url postgresql://db1/app migrate print | psql -f - postgresql://owner@db1/app
    """
    with open_client(context) as client:
        click.echo(client.migrations.text(down=downwards))
