"""holdfast run, for click: help, completion, and the words for a mistake."""

from __future__ import annotations

import sys

import click

from holdfast.cli.run import run_here


@click.command()
@click.option("--ttl", type=float, default=30.0, show_default=True, help="Seconds the lease outlives a dead holder.")
@click.option("--timeout", type=float, metavar="S", help="Wait at most so many seconds for the lease.")
@click.option("--wait", is_flag=True, help="Wait for it as long as it takes.")
@click.option("--skip", is_flag=True, help="When somebody has it, do nothing and exit with 0.")
@click.option("--holder", metavar="LABEL", help="Who we are, for the people who look. Default: host, pid and a nonce.")
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context, ttl: float, timeout: float | None, wait: bool, skip: bool, holder: str | None, name: str,
    command: tuple[str, ...],
) -> None:  # fmt: skip
    """Run COMMAND while holding the lease NAME; exit with 75 when somebody else has it.

    The command runs in a process group of its own and is ended with it: when the lease is lost (TERM, then KILL,
    before its TTL is over), when holdfast is told to end, and when holdfast itself is killed. Signals are passed on.
    It finds HOLDFAST_URL, HOLDFAST_LEASE, HOLDFAST_TOKEN and HOLDFAST_FENCE in its environment, so that
    holdfast.inherited(client) in a Python program can protect its own transactions.

    \b
    Examples:
      holdfast run nightly-import -- ./import.sh --all
      holdfast run --skip sweep -- python sweep.py          # cron: quietly nothing when the last one still runs
      holdfast run --wait --ttl 60 migrate -- alembic upgrade head
    """
    if sum((timeout is not None, wait, skip)) > 1:
        raise click.UsageError("--timeout, --wait and --skip exclude each other")
    patience = None if wait else timeout or 0.0
    place = {"url": context.obj["url"], "schema": context.obj["schema"]}
    sys.exit(run_here(**place, name=name, argv=list(command), ttl=ttl, timeout=patience, skip=skip, holder=holder))
