"""holdfast audit: what operators did, with actor, reason and outcome."""

from __future__ import annotations

from dataclasses import asdict

import click

from holdfast.cli.app import limit_option, listing_options, open_client


@click.command()
@click.option("--action", metavar="NAME", help="Only this action, such as lease.release or gate.open.")
@click.option("--actor", metavar="WHO", help="Only the actions of this actor.")
@limit_option(20)
@listing_options
@click.pass_context
def audit(context: click.Context, action: str | None, actor: str | None, limit: int, as_json: bool, wide: bool) -> None:
    """List what operators did, the latest first.

    Shows the entries of the audit log: the commands of `holdfast do` and of the commands that stand for one of them,
    and the windows in which gates were open. An entry is written before the action begins. One whose outcome is `not
    recorded` is still running, or its process died.

    \b
    Examples:
      holdfast audit
      holdfast audit --action lease.release --limit 100
      holdfast audit --json | jq '.[] | select(.outcome == null)'
    """
    from holdfast.cli import output

    with open_client(context) as client:
        entries = client.audit.list(action=action, actor=actor, limit=limit)
    if as_json:
        output.print_json([asdict(entry) for entry in entries])
    elif entries:
        columns = (
            output.Column("at (UTC)"), output.Column("actor", 8), output.Column("action", 13),
            output.Column("subject", 12), output.Column("outcome", 16), output.Column("reason", 24),
            output.Column("entry"), output.Column("fence"),
        )  # fmt: skip
        rows = [
            (output.format_time(entry.at), entry.actor, entry.action, entry.subject,
             output.state(entry.outcome or "not recorded"), entry.reason, entry.id, entry.fence)
            for entry in entries
        ]  # fmt: skip
        output.print_table(columns, rows, wide=wide)
    else:
        click.echo("no such entry is in the audit log" if action or actor else "the audit log is empty", err=True)
