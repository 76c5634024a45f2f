"""holdfast explain: what a name is in this database, and why it is in the state that it is in."""

from __future__ import annotations

import sys

import click

from holdfast.cli import completion
from holdfast.cli.app import open_client


@click.command()
@click.argument("name", shell_complete=completion.known_leases)
@click.pass_context
def explain(context: click.Context, name: str) -> None:
    """Explain a name: who holds it, who waits, how it ended.

    NAME is that of a lease, a lock, a schedule, a slot pool or a relay, or the key of an operation.

    Exit code 1 when nothing in the database has this name.

    \b
    Examples:
      holdfast explain nightly-import
      holdfast explain "load parcels"
    """
    import asyncio

    from holdfast.cli import output
    from holdfast.dashboard.explanation import explain as build
    from holdfast.dashboard.source import PageSource
    from holdfast.dashboard.things import gather_evidence

    with open_client(context) as client:
        findings = build(asyncio.run(gather_evidence(PageSource(client), name)))
    for finding in findings:
        click.echo(finding.what)
        for sentence in finding.sentences:
            click.echo(f"  {output.clean(sentence)}")
    if not findings:
        click.echo(f"holdfast: nothing in this database has the name {name!r}", err=True)
        sys.exit(1)
