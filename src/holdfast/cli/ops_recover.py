"""holdfast ops recover, reset and rollback: mending what was left half done, under governance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.app import acting, connected

if TYPE_CHECKING:
    from holdfast import Client

_registering = click.option("--with", "register", metavar="MODULE:FUNCTION",
                            help="Called with the client first: it registers rollbacks and probes.")  # fmt: skip


def recorded(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--reason", metavar="TEXT", required=True, help="Why, for the record.")(acting(command))


@click.command()
@_registering
@click.pass_context
def recover(context: click.Context, register: str | None) -> None:
    """Finish or roll back what was left half done.

    As far as the functions for it are registered. Exit code 1 when something is left that needs somebody to look at it.

    \b
    Example:
      holdfast ops recover --with shop.operations:register
    """
    from holdfast.cli import output

    with connected(context) as client:
        _register(client, register)
        outcomes = client.operations.recover()
        left = client.operations.list(status="partial", most=10_000)
    for key, outcome in outcomes.items():
        click.echo(f"{output.clean(key)}: {output.clean(outcome)}")
    click.echo(f"{len(outcomes)} recovered, {len(left)} left", err=True)
    sys.exit(1 if left else 0)


@click.command()
@click.argument("key")
@recorded
@click.pass_context
def reset(context: click.Context, key: str, reason: str, actor: str) -> None:
    """Let an operation be tried again, as if it were new.

    Its history stays, and says who reset it and why. This is the governed command `holdfast do operation.reset`. Exit
    code 1 when there is no such operation, or somebody is at it.

    \b
    Example:
      holdfast ops reset charge:42 --reason "the bank says that it never arrived"
    """
    govern(context, "operation.reset", {"key": key}, actor, reason)


@click.command()
@click.argument("key")
@_registering
@recorded
@click.pass_context
def rollback(context: click.Context, key: str, register: str | None, reason: str, actor: str) -> None:
    """Undo an operation, with the function that was registered for it.

    KEY may also be the pointer into the log that `holdfast ops show` has shown: then it is undone only if that attempt
    still stands. This is the governed command `holdfast do operation.rollback`. Exit code 1 when it was not undone.

    \b
    Example:
      holdfast ops rollback publish:7 --with shop.operations:register --reason "wrong prices"
    """
    govern(context, "operation.rollback", {"key": key}, actor, reason, register)


def govern(
    context: click.Context, command: str, given: dict[str, Any], actor: str, reason: str,
    register: str | None = None,
) -> None:  # fmt: skip
    """Run a governed command under a name of its own."""
    from holdfast.cli import output
    from holdfast.cli.do import governed

    with connected(context) as client:
        _register(client, register)
        outcome = governed(client, command, given, actor=actor, reason=reason)
    for line in outcome.changes:
        click.echo(output.clean(line))
    click.echo(f"{command} done; recorded: {output.clean(actor)}: {output.clean(reason)}")


def _register(client: Client, where: str | None) -> None:
    """Call the user's function that says what undoes what: it is theirs, and this is another process."""
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
        raise click.UsageError(f"--with {where}: say MODULE:FUNCTION, a function that is called with the client")
    function(client)
