"""The click application: its commands are imported when they are called for."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

import click

import holdfast
from holdfast.cli import settings

if TYPE_CHECKING:
    from typing import Any

    from holdfast import Client

COMMANDS = {
    "check": "holdfast.cli.check:check",
    "commands": "holdfast.cli.do:commands",
    "do": "holdfast.cli.do:do",
    "doctor": "holdfast.cli.doctor:doctor",
    "driver": "holdfast.cli.driver:driver",
    "history": "holdfast.cli.leases:history",
    "locks": "holdfast.cli.locks:locks",
    "ls": "holdfast.cli.leases:ls",
    "migrate": "holdfast.cli.migrate:migrate",
    "ops": "holdfast.cli.ops:ops",
    "relay": "holdfast.cli.relay:relay",
    "release": "holdfast.cli.leases:release",
    "reviews": "holdfast.cli.reviews:reviews",
    "run": "holdfast.cli.run_command:run",
    "serve": "holdfast.cli.serve:serve",
    "version": "holdfast.cli.version:version",
}


class Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--url", metavar="URL", help="The database: postgresql://… or sqlite:///file.db. Else HOLDFAST_URL.")
@click.option("--schema", metavar="NAME", help="Where its tables are (SQLite: their prefix). Default: holdfast.")
@click.version_option(holdfast.__version__, prog_name="holdfast")
@click.pass_context
def app(context: click.Context, url: str | None, schema: str | None) -> None:
    """Leases and locks on the database you already have.

    The database is --url, else HOLDFAST_URL, else `url` in ./holdfast.toml, else ./holdfast.db.

    \b
    Exit codes: 0 done, 1 refused or unreachable, 2 called wrongly, 75 somebody else has it.

    \b
    Examples:
      holdfast run nightly-import -- ./import.sh
      holdfast ls --watch
      HOLDFAST_URL=postgresql://db1/app holdfast doctor
    """
    context.obj = {"url": url, "schema": schema}


@contextmanager
def connected(context: click.Context) -> Iterator[Client]:
    """A client for one command; a user's mistake is one line on stderr, never a traceback."""
    try:
        url, schema = settings.database(context.obj["url"], context.obj["schema"])
        with holdfast.Client(url, schema=schema, policy=settings.policy()) as client:
            yield client
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except holdfast.HoldfastError as error:
        click.echo(f"holdfast: {error}", err=True)
        sys.exit(1)


def myself() -> str:
    """Who is at the keyboard, for the record."""
    import getpass
    import os
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as containers have them
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Seconds(click.FloatRange):
    """NaN is in no range, although it is neither below nor above it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


ACTOR: dict[str, Any] = {
    "metavar": "WHO", "default": myself, "help": "Who you are, for the record. Default: user@host.",
}  # fmt: skip
"""Of --actor. One that is given and empty is a mistake, and not us."""
acting = click.option("--actor", **ACTOR)
