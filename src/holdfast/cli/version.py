"""holdfast version: what is installed here."""

from __future__ import annotations

import json
import platform

import click

import holdfast
from holdfast.cli.app import json_option


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Show the versions of holdfast and its dependencies.

    Does not connect to a database.

    \b
    Example:
      holdfast version --json | jq -r .holdfast
    """
    import sqlite3

    versions: dict[str, str | None] = {
        "holdfast": holdfast.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "psycopg": None,
        "libpq": None,
    }
    try:
        import psycopg

        versions["psycopg"], versions["libpq"] = psycopg.__version__, psycopg.pq.version_pretty(psycopg.pq.version())
    except ImportError:
        pass
    if as_json:
        click.echo(json.dumps(versions, indent=2))
        return
    for name, number in versions.items():
        if number is not None:
            click.echo(f"{name:<9}{number}")
    if versions["psycopg"] is None:
        click.echo("psycopg  not installed; PostgreSQL needs it: pip install 'holdfast[postgres]'")
