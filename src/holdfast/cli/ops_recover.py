"""holdfast ops recover, complete, reset and rollback: finish or undo operations that a crashed owner left partial."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import completion
from holdfast.cli.app import actor_option, listing_options, open_client, reason_option
from holdfast.cli.operation_key import resolve_key

if TYPE_CHECKING:
    from holdfast import Client


_register_option = click.option("--with", "register", metavar="MODULE:FUNCTION",
                                help="Function that registers rollback and verify functions.")  # fmt: skip


@click.command()
@_register_option
@listing_options
@click.pass_context
def recover(context: click.Context, register: str | None, as_json: bool, wide: bool) -> None:
    """Finish or roll back interrupted operations.

    Uses the rollback and verify functions that --with registers. Lists each operation with its new status and the
    reason: success, undone, or partial if it needs a decision, such as `complete`, `reset` or `rollback`. Exit code 1
    when interrupted operations remain.

    \b
    Example:
      holdfast ops recover --with shop.operations:register
    """
    from holdfast.cli import output

    with open_client(context) as client:
        _register(client, register)
        records = client.operations.recover()
        left = client.operations.list(status="partial", limit=10_000)
    if as_json:
        output.print_json([asdict(record) for record in records])
    elif records:
        columns = (
            output.Column("operation", 16), output.Column("status"), output.Column("why", 24),
            output.Column("key", first=12),
        )  # fmt: skip
        rows = [(record.label, output.state(record.status), record.reason, record.key) for record in records]
        output.print_table(columns, rows, wide=wide)
    recovered = sum(record.status != "partial" for record in records)
    click.echo(f"{recovered} recovered, {len(left)} still interrupted", err=True)
    sys.exit(1 if left else 0)


@click.command()
@click.argument("key", shell_complete=completion.operation_keys)
@click.option("--result", metavar="JSON", default="null", show_default=True,
              help="What the operation returned: later callers get it.")  # fmt: skip
@reason_option
@actor_option
@click.pass_context
def complete(context: click.Context, key: str, result: str, reason: str, actor: str) -> None:
    """Record that an interrupted operation did happen.

    For an operation that is partial, or failed after its effect may have started, when you have found out that it was
    done. This is the audited command `holdfast do operation.complete`. Exit code 1 when there is no such operation, it
    is running, has succeeded already, or left no effect.

    \b
    Example:
      holdfast ops complete charge:42 --result '{"id": 7}' --reason "the bank has booked it"
    """
    run_and_report(context, "operation.complete", {"key": key, "result": result}, actor, reason)


@click.command()
@click.argument("key", shell_complete=completion.operation_keys)
@reason_option
@actor_option
@click.pass_context
def reset(context: click.Context, key: str, reason: str, actor: str) -> None:
    """Allow an operation to run again, as if it were new.

    Its log entries stay. This is the audited command `holdfast do operation.reset`.

    Exit code 1 when there is no such operation, or when it is running.

    \b
    Example:
      holdfast ops reset charge:42 --reason "the bank never received it"
    """
    run_and_report(context, "operation.reset", {"key": key}, actor, reason)


@click.command()
@click.argument("key", shell_complete=completion.operation_keys)
@_register_option
@reason_option
@actor_option
@click.pass_context
def rollback(context: click.Context, key: str, register: str | None, reason: str, actor: str) -> None:
    """Undo an operation with its registered rollback function.

    KEY may also be a pointer into the log, as printed by `holdfast ops show`: then the operation is undone only if that
    attempt is still the latest. This is the audited command `holdfast do operation.rollback`.

    Exit code 1 when the operation was not undone.

    \b
    Example:
      holdfast ops rollback publish:7 --with shop.operations:register --reason "wrong prices"
    """
    run_and_report(context, "operation.rollback", {"key": key}, actor, reason, register)


def run_and_report(
    context: click.Context, command: str, parameters: dict[str, Any], actor: str, reason: str,
    register: str | None = None,
) -> None:  # fmt: skip
    """Run a governed command and print its changes. ``register``: the value of --with. A parameter ``key`` may be the
    prefix of one."""
    from holdfast.cli import output
    from holdfast.cli.do import run_governed

    with open_client(context) as client:
        _register(client, register)
        if "key" in parameters:
            parameters["key"] = resolve_key(client, parameters["key"])
        outcome = run_governed(client, command, parameters, actor=actor, reason=reason)
    for line in outcome.changes:
        click.echo(output.clean(line))
    click.echo(f"{command} done; recorded: {output.clean(actor)}: {output.clean(reason)}")


def _register(client: Client, where: str | None) -> None:
    """Call MODULE:FUNCTION with the client: rollbacks and probes are functions of the user's program, and this is
    another process. Raises UsageError if there is no such function."""
    if where is None:
        return
    from importlib import import_module

    module, colon, name = where.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(import_module(module), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"--with {where}: {error}") from None
    if not callable(function):
        raise click.UsageError(f"--with {where}: must be MODULE:FUNCTION, a function that takes the client")
    function(client)
