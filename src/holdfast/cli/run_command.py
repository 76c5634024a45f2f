"""holdfast run, for click: help, completion, and the words for a mistake."""

from __future__ import annotations

import sys
from typing import Any

import click

from holdfast.cli.run import exclusive, run_here


class _Run(click.Command):
    """What stands before the first ``--`` is ours, what stands behind it is the command's and read by nobody."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or not {"-h", "--help"}.isdisjoint(args[: _cut(args)]):
            return super().parse_args(ctx, args)
        if "--" not in args:
            ctx.fail("the command begins after --: holdfast run [OPTIONS] NAME -- COMMAND...")
        given = len(args) - _cut(args) - 1
        rest = super().parse_args(ctx, args)
        if len(ctx.params["argv"]) > given:
            ctx.fail("only the name of the lease stands before --; quote a name with spaces")
        return rest


def _cut(args: list[str]) -> int:
    return args.index("--") if "--" in args else len(args)


@click.command(cls=_Run, short_help="Run a command while holding a lease.", options_metavar="[OPTIONS]")
@click.option("--ttl", type=float, default=30.0, show_default=True, help="Seconds the lease outlives a dead holder.")
@click.option("--timeout", type=float, metavar="S", help="Wait at most so many seconds for the lease.")
@click.option("--wait", is_flag=True, help="Wait for it as long as it takes.")
@click.option("--skip", is_flag=True, help="When somebody has it, do nothing and exit with 0.")
@click.option(
    "--guard",
    is_flag=True,
    help="Fail closed even if holdfast and its watcher are stopped together: the kernel's timer ends holdfast, and "
    "with it the command, before the TTL is over.",
)
@click.option(
    "--heartbeat", type=float, metavar="S", help="With --guard: renew it so often. Default: a third of --ttl."
)
@click.option("--strict", is_flag=True, help="With --guard: the first heartbeat that fails is the end.")
@click.option("--wipe-on-start", is_flag=True, help="With --guard: take all other leases away first, once it is ours.")
@click.option(
    "--holder",
    metavar="LABEL",
    help="Who we are. A run of the same holder takes the lease over at once, and the earlier one is ended: give it to "
    "what replaces itself. Default: host, pid and a nonce, so that nobody does.",
)
@click.option("--url", metavar="URL", help="The database, as before the word run.")
@click.option("--schema", metavar="NAME", help="Where its tables are, as before the word run.")
@click.argument("name")
@click.argument("argv", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, /, url: str | None, schema: str | None, **wanted: Any) -> None:
    """Run COMMAND while holding the lease NAME; exit with 75 when somebody else has it.

    The lease is renewed for as long as the command runs, and released when nothing of it is left. On stderr is said
    who holds it and until when if it is not to be had; by default it is not waited for.

    \b
    The command
      runs in a process group of its own, in the foreground if holdfast is, with
      the terminal, standard input and output that holdfast has. The signals INT,
      TERM, HUP, QUIT, USR1, USR2, ALRM, WINCH, TSTP and CONT are passed on to
      the group; a TERM waits for the command to finish in its own time. With
      --guard an ALRM ends holdfast, and with it the command.
    \b
    The whole group is ended
      when the lease is lost (forced away, or the database does not answer):
      TERM, then KILL, before the TTL is over;
      when the command itself has ended and left something running;
      when holdfast is killed, or stopped for longer than the lease can be
      trusted: Ctrl-Z stops both, so come back within the TTL;
      with --guard, when the process that watches over holdfast is gone.
      A program that leaves the group, as a daemon does, is out of reach.
    \b
    Environment of the command
      HOLDFAST_URL    the database; the secret part of it, too
      HOLDFAST_SCHEMA where its tables are
      HOLDFAST_LEASE  the name
      HOLDFAST_TOKEN  the proof of holding it: a secret
      HOLDFAST_FENCE  a number that rises with every acquisition
      holdfast.inherited(client) in Python makes a grant of them, to protect
      the command's own transactions.
    \b
    Exit codes
      the command's own; 128 + n when signal n ended it
      75   somebody else has the lease (0 with --skip)
      126  the command cannot be executed
      127  the command was not found
      128 + n  signal n came while holdfast waited for the lease
      137  with --guard, the kernel's timer ended holdfast (128 + 9)
      1    the database cannot be reached, or refuses; or the lease or the
           watcher was lost and the command, told to end, did so with 0
      2    called wrongly
    \b
    Examples
      Once at a time, over all machines that share the database:
        holdfast run nightly-import -- ./import.sh --all
      From cron, where it is no error that the last one still runs:
        */5 * * * *  holdfast run --skip sweep -- python sweep.py
      Replicas that deploy together, one migrates and the others wait:
        holdfast run --wait --ttl 60 migrate -- alembic upgrade head
      At most a minute of waiting, then say who has it:
        holdfast run --timeout 60 backup -- pg_dump -f app.dump app
      A pipeline, with a shell of its own:
        holdfast run report -- sh -c 'make-report | mail -s report team'
      The password stays out of the process list:
        HOLDFAST_URL=postgresql://app:secret@db/app holdfast run sweep -- ./sweep
    """
    if (problem := exclusive(**wanted)) is not None:
        raise click.UsageError(problem)
    wanted["argv"] = list(wanted["argv"])
    before = context.obj
    sys.exit(
        run_here(
            url=before["url"] if url is None else url,
            schema=before["schema"] if schema is None else schema,
            **wanted,
        )
    )
