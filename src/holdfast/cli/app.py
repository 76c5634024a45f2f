"""The click application, and what its commands share: the client, options, types. Commands are imported when used."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

import holdfast
from holdfast.cli import FAILED, settings

if TYPE_CHECKING:
    from holdfast import Client

DATABASE = "holdfast.database"
"""In the meta of a context: the URL and the schema of ``open_client``."""
Function = TypeVar("Function", bound=Callable[..., Any])

GROUPS = {
    "Run work": {
        "run": "holdfast.cli.run_command:run",
        "once": "holdfast.cli.once:once",
        "schedules": "holdfast.cli.schedules:schedules",
    },
    "Leases and locks": {
        "top": "holdfast.cli.top:top",
        "ls": "holdfast.cli.leases:ls",
        "history": "holdfast.cli.leases:history",
        "release": "holdfast.cli.leases:release",
        "locks": "holdfast.cli.locks:locks",
        "slots": "holdfast.cli.slots:slots",
        "gates": "holdfast.cli.gates:gates",
    },
    "Operations": {
        "ops": "holdfast.cli.ops:ops",
        "reviews": "holdfast.cli.reviews:reviews",
        "policy": "holdfast.cli.policy:policy",
        "relay": "holdfast.cli.relay:relay",
    },
    "Overview": {
        "dashboard": "holdfast.cli.dashboard:dashboard",
        "explain": "holdfast.cli.explain:explain",
    },
    "Database": {
        "migrate": "holdfast.cli.migrate:migrate",
        "doctor": "holdfast.cli.doctor:doctor",
        "check": "holdfast.cli.check:check",
    },
    "Operator commands": {
        "do": "holdfast.cli.do:do",
        "commands": "holdfast.cli.do:commands",
        "audit": "holdfast.cli.audit:audit",
    },
    "Services": {
        "serve": "holdfast.cli.serve:serve",
        "driver": "holdfast.cli.driver:driver",
    },
    "Installation": {
        "version": "holdfast.cli.version:version",
        "completion": "holdfast.cli.shells:completion",
    },
}
"""Commands as the help lists them, each with the module and the name of its function."""
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}


class SuggestingGroup(click.Group):
    """Names a similar command when a command does not exist, as click does for groups with fixed commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}.{suggestion(name, names)}")
        return super().resolve_command(ctx, args)


def suggestion(name: str, names: Iterable[str]) -> str:
    """A question with the name that is most similar to ``name``, after a space; an empty text if none is."""
    from difflib import get_close_matches

    matches = get_close_matches(name, names, 1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


class LazyGroup(SuggestingGroup):
    """Imports the module of a command when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            commands = ((name, self.get_command(ctx, name)) for name in names)
            rows = [
                (name.ljust(width), each.get_short_help_str(formatter.width - width - 6))
                for name, each in commands
                if each
            ]
            with formatter.section(title):
                formatter.write_dl(rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--url", metavar="URL", help="Database: postgresql://… or sqlite:///file.db. Default: HOLDFAST_URL.")
@click.option("--schema", metavar="NAME", help="Schema of the tables; on SQLite, their prefix. Default: holdfast.")
@click.version_option(holdfast.__version__, prog_name="holdfast")
@click.pass_context
def app(context: click.Context, url: str | None, schema: str | None) -> None:
    """Leases, locks and run-once operations on the database you already have.

    The database is the first of these that is set: --url, HOLDFAST_URL, `url` in ./holdfast.toml. `holdfast COMMAND
    --help` shows the options and examples of a command.

    \b
    Exit codes:
      0   success
      1   refused, not found, or the database is unreachable
      2   wrong usage
      75  run: another process holds the lease

    \b
    Examples:
      holdfast run nightly-import -- ./import.sh
      holdfast ls --watch
      HOLDFAST_URL=postgresql://db1/app holdfast doctor
    """
    context.obj = {"url": url, "schema": schema}


@contextmanager
def open_client(context: click.Context, *, creates: bool = False) -> Iterator[Client]:
    """A client for one command. Errors of the user and of the database become one line on stderr and exit.
    ``creates``: whether the command may create an SQLite file."""
    try:
        url, schema = settings.database(context.obj["url"], context.obj["schema"], creates=creates)
        context.meta[DATABASE] = url, schema
        with holdfast.Client(url, schema=schema, policy=settings.policy()) as client:
            yield client
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except holdfast.HoldfastError as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Print one line on stderr and exit with 1."""
    click.echo(f"holdfast: {message}", err=True)
    sys.exit(FAILED)


class Integer(click.IntRange):
    """An IntRange that calls a wrong value "not a valid integer"; click says "integer range"."""

    name = "integer"


class Seconds(click.FloatRange):
    """A range that NaN is not in: FloatRange accepts it, because it is neither below nor above a bound."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


def _current_user() -> str:
    import getpass
    import os
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


ACTOR: dict[str, Any] = {
    "metavar": "WHO", "default": _current_user, "help": "Your name, for the audit log. Default: user@host.",
}  # fmt: skip
REASON: dict[str, Any] = {"metavar": "TEXT", "required": True, "help": "Reason, for the audit log."}
actor_option = click.option("--actor", **ACTOR)
reason_option = click.option("--reason", **REASON)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def listing_options(command: Function) -> Function:
    """--json and --wide."""
    wide = click.option("--wide", is_flag=True, help="Show all columns and whole values.")
    return json_option(wide(command))


def limit_option(default: int) -> Callable[[Function], Function]:
    """--limit: how many rows a listing shows."""
    return click.option(
        "--limit", type=Integer(1, 10_000), default=default, show_default=True, metavar="N",
        help="Maximum number of rows.",
    )  # fmt: skip


def watch_options(command: Function) -> Function:
    """--watch and --every."""
    every = click.option(
        "--every", type=Seconds(0.1, 3600), default=1.0, show_default=True, metavar="S",
        help="Refresh interval of --watch, in seconds.",
    )  # fmt: skip
    return click.option("--watch", is_flag=True, help="Refresh the list until Ctrl-C.")(every(command))
