"""The command line. Each command imports what it needs when it runs, so that starting is cheap.

Exit codes: 0 done, 1 the database refused or could not be reached, 2 the command was called wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

import holdfast

if TYPE_CHECKING:
    from holdfast import Client

DEFAULT_URL = "sqlite:///holdfast.db"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "HOLDFAST"})
@click.option("--url", envvar="HOLDFAST_URL", help=f"The database; HOLDFAST_URL, else {DEFAULT_URL} in this folder.")
@click.option("--schema", default="holdfast", show_default=True, help="Where the tables are (SQLite: their prefix).")
@click.version_option(holdfast.__version__, prog_name="holdfast")
@click.pass_context
def main(context: click.Context, url: str | None, schema: str) -> None:
    """Leases on the database you already have."""
    context.obj = {"url": url, "schema": schema}


@contextmanager
def connected(context: click.Context) -> Iterator[Client]:
    """A client for one command; a mistake of the user's is one line on stderr, never a traceback."""
    url = context.obj["url"]
    if not url:
        url = DEFAULT_URL
        click.echo(f"holdfast: no --url and no HOLDFAST_URL, so {Path.cwd().name}/holdfast.db it is", err=True)
    try:
        with holdfast.Client(url, schema=context.obj["schema"]) as client:
            yield client
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except holdfast.HoldfastError as error:
        click.echo(f"holdfast: {error}", err=True)
        sys.exit(1)


from holdfast.cli import migrate  # noqa: E402 - registers its commands with main

__all__ = ["connected", "main", "migrate"]
