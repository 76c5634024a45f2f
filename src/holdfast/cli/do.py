"""holdfast do and commands: what operators may do to others' work, by somebody, for a reason, on the record."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.app import ACTOR, connected

if TYPE_CHECKING:
    from holdfast import Client
    from holdfast.commands import Command, Outcome, Parameter


class Governed(click.Group):
    """Its commands are those that are declared in holdfast.commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from holdfast import commands as operator

        return list(operator.commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from holdfast import commands as operator

        declared = operator.commands().get(cmd_name)
        return None if declared is None else _made(declared)


@click.group(cls=Governed)
def do() -> None:
    """Run a governed command.

    Each needs a reason, runs while nobody else runs one, inside the window of its gate, and leaves an entry in the
    table `audit`: who, why, what, how it ended. Exit code 1 when it is refused.

    \b
    Examples:
      holdfast do lease.release nightly-import --reason "its machine is gone" --dry-run
      holdfast do gate.open dot_config --for 600 --reason "new addresses"
    """


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def commands(context: click.Context, as_json: bool) -> None:
    """Show the governed commands, or prove that all of them are.

    \b
    Examples:
      holdfast commands
      holdfast commands check
    """
    if context.invoked_subcommand is not None:
        return
    from holdfast import commands as operator
    from holdfast.cli import output

    declared = operator.commands().values()
    if as_json:
        click.echo(output.for_programs([_for_programs(each) for each in declared]))
        return
    rows = [
        (each.name, " ".join(each.parameters), each.gate, "yes" if each.destructive else "no", each.summary)
        for each in declared
    ]
    console = output.console()
    output.show(console, output.listing(console, ("command", "parameters", "gate", "destructive", "what for"), rows))


@commands.command("check")
def check() -> None:
    """Prove that no command bypasses the rules.

    Each is called without actor, without reason, outside a run and in a forged one, and must refuse. How it is made is
    looked at: it tells what it changes before it does, and has no way to the database but the one that is governed.
    What it declares is run with a probe in its place, on a database of its own: under the runtime lease, with its gate
    open, on the record. Nothing of the command itself is run.

    \b
    Example:
      holdfast commands check
    """
    from holdfast import commands as operator

    found = operator.check()
    for name, problems in found.items():
        click.echo(f"{name}: {'; '.join(problems) or 'governed'}")
    if any(found.values()):
        sys.exit(1)


def governed(
    client: Client, name: str, parameters: dict[str, Any], *, actor: str, reason: str, **options: bool
) -> Outcome:
    """Also for commands of the command line that are one of these under an older name."""
    from holdfast import commands as operator
    from holdfast.cli import output

    outcome = operator.run(client, name, parameters, actor=actor, reason=reason, **options)
    if outcome.doubt is not None:
        click.echo(f"holdfast: it is done, and afterwards: {output.clean(outcome.doubt)}", err=True)
    return outcome


def _checked(declared: Parameter, context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Under the name that it has here, which is not always that of the parameter."""
    try:
        return value if value is None else declared.check(option.opts[0], value)
    except ValueError as error:
        raise click.UsageError(str(error), context) from None


def _made(declared: Command) -> click.Command:
    @click.pass_context
    def call(context: click.Context, /, reason: str, actor: str, dry_run: bool, **given: Any) -> None:
        from holdfast.cli import output

        glass = given.pop("break_glass", False)
        with connected(context) as client:
            outcome = governed(
                client, declared.name, given, actor=actor, reason=reason, dry_run=dry_run, break_glass=glass
            )
        for line in outcome.changes:
            click.echo(output.clean(line))
        if dry_run:
            click.echo("nothing was changed: a dry run", err=True)
        else:
            done = f"{declared.name} done under fence {outcome.fence}"
            click.echo(f"{done}; recorded: {output.clean(actor)}: {output.clean(reason)}")

    parameters: list[click.Parameter] = []
    for name, each in declared.parameters.items():
        if each.optional or each.option:
            option = [f"--{each.option or name}", name]
            text = f"{each.help[0].upper()}{each.help[1:]}."
            needed: dict[str, Any] = {"default": each.default} if each.optional else {"required": True}
            if each.secret:
                needed |= {"envvar": each.secret, "show_envvar": True}
            needed["callback"] = partial(_checked, each)
            parameters.append(click.Option(option, type=each.kind, help=text, **needed))
        else:
            parameters.append(click.Argument([name], type=each.kind))
    parameters += [
        click.Option(["--reason"], metavar="TEXT", required=True, help="Why, for the record."),
        click.Option(["--actor"], **ACTOR),
        click.Option(["--dry-run"], is_flag=True, help="Only show what would change."),
    ]
    if declared.name == "lease.release":
        text = "Without the runtime lease: to release that lease itself, or a gate's."
        parameters.append(click.Option(["--break-glass"], is_flag=True, help=text))
    named = "\n".join(
        f"  {name.upper()}: {each.help}" for name, each in declared.parameters.items() if not each.optional
    )
    about = f"{declared.summary}\n\n\b\n{named}" if named else declared.summary
    return click.Command(declared.name, params=parameters, callback=call, help=about, short_help=declared.summary)


def _for_programs(declared: Command) -> dict[str, Any]:
    return {
        "name": declared.name,
        "summary": declared.summary,
        "gate": declared.gate,
        "destructive": declared.destructive,
        "parameters": {
            name: {"help": each.help, "type": each.kind.__name__, "optional": each.optional, "default": each.default}
            for name, each in declared.parameters.items()
        },
    }
