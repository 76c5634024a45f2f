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
            ctx.fail("put -- before the command: holdfast run [OPTIONS] NAME -- COMMAND...")
        argv_length = len(args) - end - 1
        rest = super().parse_args(ctx, args)
        if len(ctx.params["argv"]) > argv_length:
            ctx.fail("only one NAME may stand before --; quote a name that contains spaces")
        return rest


def _complete_argv(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file") if context.meta["has_separator"] else CompletionItem("--")]


def _click_option(option: RunOption) -> click.Option:
    if option.type is bool:
        return click.Option([option.flag], is_flag=True, help=option.help)
    kind = click.Choice(option.choices) if option.choices else option.type
    return click.Option(
        [option.flag], type=kind, default=option.default, show_default=option.default is not None,
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
    """Run COMMAND while holding the lease NAME; exit with 75 when another process holds it.

    The lease is renewed while the command runs, and released when the command and its whole process group have ended.
    If the lease is taken, stderr says by whom and until when. By default `run` does not wait.

    \b
    Examples
      Once at a time, on all machines that share the database:
        holdfast run nightly-import -- ./import.sh --all
      From cron, where it is no error that the last run has not ended:
        */5 * * * *  holdfast run --skip --at-least 60 sweep -- python sweep.py
      Replicas that deploy together: one migrates, the others wait:
        holdfast run --wait --ttl 60 migrate -- alembic upgrade head
      Wait for at most a minute:
        holdfast run --timeout 60 backup -- pg_dump -f app.dump app
      A pipeline needs a shell:
        holdfast run report -- sh -c 'make-report | mail -s report team'
      Keep the password out of the process list:
        HOLDFAST_URL=postgresql://app:secret@db/app holdfast run sweep -- ./sweep
    \b
    Exit codes
      the exit code of the command; 128 + n when signal n ended it
      75   another process holds the lease (0 with --skip)
      126  the command cannot be executed
      127  the command was not found
      128 + n  signal n ended holdfast while it waited for the lease
      137  with --guard: the timer of the kernel ended holdfast (128 + 9)
      1    the database is unreachable or refused the request; or the lease or
           the watchdog was lost, and the command then exited with 0
      2    wrong usage
    \b
    Process group
      The command runs in a new process group, with the terminal and the standard
      streams of holdfast. INT, TERM, HUP, QUIT, USR1, USR2, ALRM, WINCH, TSTP and
      CONT are passed on to the group. After TERM the command may take its time.
      With --guard, ALRM ends holdfast and the command.
    \b
    The whole group is ended
      when the lease is lost (forced release, or the database does not answer):
      TERM, then KILL, before the TTL ends;
      when the command has ended and has left processes behind;
      when holdfast is killed (the lease is then released), or is stopped until
      the TTL has almost ended (Ctrl-Z stops both: continue them earlier);
      with --guard, when the watchdog has died, the process that does all this.
      A process that leaves the group, such as a daemon, is not ended.
    \b
    Environment of the command
      HOLDFAST_URL     the database, with its password
      HOLDFAST_SCHEMA  the schema of its tables
      HOLDFAST_LEASE   the name of the lease
      HOLDFAST_TOKEN   the secret that proves who holds the lease
      HOLDFAST_FENCE   a number that rises with every acquisition
      In Python, holdfast.inherited(client) returns a grant made from them, which
      protects the transactions of the command.
    """
    if (conflict := find_conflict(values)) is not None:
        raise click.UsageError(conflict)
    for option in ("url", "schema"):
        if values[option] is None:  # given before the word run, or not at all
            values[option] = context.obj[option]
    values["argv"] = list(values["argv"])
    sys.exit(run_under_lease(**values))
