"""``holdfast do`` runs governed commands, which need an actor and a reason and leave an audit entry; ``holdfast
commands`` lists and checks them."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import completion
from holdfast.cli.app import ACTOR, REASON, SuggestingGroup, listing_options, open_client

if TYPE_CHECKING:
    from holdfast import Client
    from holdfast.commands import Command, CommandOutcome, Parameter


_COMPLETIONS = {
    ("gate.close", "name"): completion.open_gates,
    ("leader.resign", "name"): completion.electors,
    ("lease.release", "name"): completion.held_leases,
    ("lease.wipe", "guard"): completion.held_leases,
    ("lock.end", "pid"): completion.lock_sessions,
    ("operation.replay", "key"): completion.operation_keys,
    ("operation.reset", "key"): completion.operation_keys,
    ("operation.rollback", "key"): completion.operation_keys,
    ("review.approve", "number"): completion.open_reviews,
    ("review.reject", "number"): completion.open_reviews,
    ("session.cancel", "id"): completion.sessions,
    ("slot.release", "pool"): completion.slot_pools,
    ("slot.release", "slot"): completion.slots,
}
"""By command and parameter."""


class GovernedGroup(SuggestingGroup):
    """Its commands are those that are declared in holdfast.commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from holdfast import commands as governed

        return list(governed.commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from holdfast import commands as governed

        command = governed.commands().get(cmd_name)
        return None if command is None else _click_command(command)


@click.group(cls=GovernedGroup)
def do() -> None:
    """Run an audited operator command.

    Each command needs --reason, and writes actor, reason, changes and outcome to the audit log. Commands run one at a
    time; the gate of a command is open only while the command runs.

    Exit code 1 when the command is refused or fails. --dry-run shows what it would change.

    \b
    Examples:
      holdfast do lease.release nightly-import --reason "host is gone" --dry-run
      holdfast do gate.open dot_config --for 600 --reason "new addresses"
    """


@click.group(invoke_without_command=True)
@listing_options
@click.pass_context
def commands(context: click.Context, as_json: bool, wide: bool) -> None:
    """List the audited operator commands, or check their rules.

    \b
    Examples:
      holdfast commands
      holdfast commands check
    """
    if context.invoked_subcommand is not None:
        return
    from holdfast import commands as governed
    from holdfast.cli import output

    declared = governed.commands().values()
    if as_json:
        output.print_json([_as_json(command) for command in declared])
        return
    columns = (
        output.Column("command"), output.Column("parameters", 10), output.Column("description", 24),
        output.Column("gate"), output.Column("destructive"),
    )  # fmt: skip
    rows = [
        (command.name, " ".join(command.parameters), command.summary, command.gate,
         "yes" if command.destructive else "no")
        for command in declared
    ]  # fmt: skip
    output.print_table(columns, rows, wide=wide)


@commands.command("check")
def check() -> None:
    """Check that no command bypasses the rules.

    Calls each command without actor, without reason and outside a run: it must refuse. Inspects its code: it must list
    its changes before it makes them, and use only the client that it is given. Runs it on a temporary database, with a
    probe in place of its code: it must hold the runtime lease, have its gate open and leave an audit entry. The code of
    the command is never run.

    Exit code 1 when a command bypasses a rule.

    \b
    Example:
      holdfast commands check
    """
    from holdfast import commands as governed

    problems_by_name = governed.check()
    for name, problems in problems_by_name.items():
        click.echo(f"{name}: {'; '.join(problems) or 'governed'}")
    if any(problems_by_name.values()):
        sys.exit(1)


def run_governed(
    client: Client, name: str, parameters: dict[str, Any], *, actor: str, reason: str, **options: bool
) -> CommandOutcome:
    """Run a governed command; other commands of the command line, which have shorter names for one, call this, too.
    ``doubt``, an error that came after the change, is printed to stderr."""
    from holdfast import commands as governed
    from holdfast.cli import output

    outcome = governed.run(client, name, parameters, actor=actor, reason=reason, **options)
    if outcome.doubt is not None:
        click.echo(
            f"holdfast: the change was made, but then an error occurred: {output.clean(outcome.doubt)}", err=True
        )
    return outcome


def _click_command(command: Command) -> click.Command:
    @click.pass_context
    def call(context: click.Context, /, reason: str, actor: str, dry_run: bool, **values: Any) -> None:
        from holdfast.cli import output

        break_glass = values.pop("break_glass", False)
        for name, variable in secrets.items():
            if variable not in os.environ:
                raise click.UsageError(f"{variable} is not set: {command.parameters[name].help}", context)
            values[name] = os.environ[variable]
        with open_client(context, creates=True) as client:
            outcome = run_governed(
                client, command.name, values, actor=actor, reason=reason, dry_run=dry_run, break_glass=break_glass
            )
        for line in outcome.changes:
            click.echo(output.clean(line))
        if dry_run:
            click.echo("dry run: nothing was changed", err=True)
        else:
            done = f"{command.name} done under fence {outcome.fence}"
            click.echo(f"{done}; recorded: {output.clean(actor)}: {output.clean(reason)}")

    secrets = {name: parameter.secret for name, parameter in command.parameters.items() if parameter.secret}
    parameters = [_click_parameter(command, name) for name in command.parameters if name not in secrets]
    parameters += [
        click.Option(["--reason"], **REASON),
        click.Option(["--actor"], **ACTOR),
        click.Option(["--dry-run"], is_flag=True, help="Show the changes without making them."),
    ]
    if command.name == "lease.release":
        text = "Run without the runtime lease, to release that lease itself or the lease of a gate."
        parameters.append(click.Option(["--break-glass"], is_flag=True, help=text))
    arguments = "\n".join(
        f"  {parameter.secret or name.upper()}: {parameter.help}"
        for name, parameter in command.parameters.items()
        if parameter.secret or (not parameter.optional and not parameter.option)
    )
    text = f"{command.summary}\n\n\b\n{arguments}" if arguments else command.summary
    return click.Command(command.name, params=parameters, callback=call, help=text, short_help=command.summary)


def _click_parameter(command: Command, name: str) -> click.Parameter:
    parameter = command.parameters[name]
    if not parameter.optional and not parameter.option:
        return click.Argument([name], type=parameter.kind, shell_complete=_COMPLETIONS.get((command.name, name)))
    settings: dict[str, Any] = {"required": True}
    if parameter.optional:
        settings = {"default": parameter.default, "show_default": True}
    text = f"{parameter.help[0].upper()}{parameter.help[1:]}."
    return click.Option(
        [f"--{parameter.option or name}", name], type=parameter.kind, help=text,
        callback=partial(_check_option, parameter), **settings,
    )  # fmt: skip


def _check_option(parameter: Parameter, context: click.Context, option: click.Parameter, value: Any) -> Any:
    """A wrong value is reported under the name of the option, which may differ from the parameter's."""
    try:
        return value if value is None else parameter.check(option.opts[0], value)
    except ValueError as error:
        raise click.UsageError(str(error), context) from None


def _as_json(command: Command) -> dict[str, Any]:
    return {
        "name": command.name,
        "summary": command.summary,
        "gate": command.gate,
        "destructive": command.destructive,
        "parameters": {
            name: {
                "help": parameter.help,
                "type": parameter.kind.__name__,
                "optional": parameter.optional,
                "default": parameter.default,
            }
            for name, parameter in command.parameters.items()
        },
    }
