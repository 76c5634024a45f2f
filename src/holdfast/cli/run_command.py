"""`holdfast run` as a click command: help, completion and messages for mistakes."""

from __future__ import annotations

import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from holdfast.cli import completion
from holdfast.cli.run import run_under_lease
from holdfast.cli.run_options import OPTIONS, RunOption, find_conflict


class RunCommand(click.Command):
    """Options and the name of the lease stand before the first ``--``. What follows it is the command's, unparsed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["has_separator"] = "--" in args
        if ctx.resilient_parsing or not {"-h", "--help"}.isdisjoint(args[:end]):
            return super().parse_args(ctx, args)
        if "--" not in args:
            ctx.fail("the command begins after --: holdfast run [OPTIONS] NAME -- COMMAND...")
        argv_length = len(args) - end - 1
        rest = super().parse_args(ctx, args)
        if len(ctx.params["argv"]) > argv_length:
            ctx.fail("only the name of the lease stands before --; quote a name with spaces")
        return rest


def _complete_argv(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file") if context.meta["has_separator"] else CompletionItem("--")]


def _click_option(option: RunOption) -> click.Option:
    if option.type is bool:
        return click.Option([option.flag], is_flag=True, help=option.help)
    return click.Option(
        [option.flag], type=option.type, default=option.default, show_default=option.default is not None,
        metavar=option.metavar, help=option.help,
    )  # fmt: skip


@click.command(
    cls=RunCommand,
    short_help="Run a command while holding a lease.",
    options_metavar="[OPTIONS]",
    params=[
        *map(_click_option, OPTIONS),
        click.Argument(["name"], shell_complete=completion.known_leases),
        click.Argument(
            ["argv"],
            metavar="-- COMMAND...",
            nargs=-1,
            required=True,
            type=click.UNPROCESSED,
            shell_complete=_complete_argv,
        ),
    ],
)
@click.pass_context
def run(context: click.Context, /, **values: Any) -> None:
    """Run COMMAND while holding the lease NAME; exit with 75 when another holder has it.

    The lease is renewed while the command runs, and released when its whole process group has ended. If the lease is
    taken, stderr says by whom and until when. By default `run` does not wait.

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
      with --guard, when its watchdog is gone, the process that does this.
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
      75   another holder has the lease (0 with --skip)
      126  the command cannot be executed
      127  the command was not found
      128 + n  signal n came while holdfast waited for the lease
      137  with --guard, the kernel's timer ended holdfast (128 + 9)
      1    the database cannot be reached, or refuses; or the lease or the
           watchdog was lost and the command, told to end, did so with 0
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
    if (conflict := find_conflict(values)) is not None:
        raise click.UsageError(conflict)
    for option in ("url", "schema"):
        if values[option] is None:  # given before the word run, or not at all
            values[option] = context.obj[option]
    values["argv"] = list(values["argv"])
    sys.exit(run_under_lease(**values))
