"""holdfast version: what is installed here."""

from __future__ import annotations

import json
import platform

import click

import holdfast


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def version(as_json: bool) -> None:
    """Show the versions of holdfast and what it stands on.

    Connects to nothing.

    \b
    Example:
      holdfast version --json | jq -r .holdfast
    """
    import sqlite3

    found: dict[str, str | None] = {
        "holdfast": holdfast.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "psycopg": None,
        "libpq": None,
    }
    try:
        import psycopg

        found["psycopg"], found["libpq"] = psycopg.__version__, psycopg.pq.version_pretty(psycopg.pq.version())
    except ImportError:
        pass
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, number in found.items():
        if number is not None:
            click.echo(f"{name:<9}{number}")
    if found["psycopg"] is None:
        click.echo("psycopg  not there: for PostgreSQL, pip install 'holdfast[postgres]'")
