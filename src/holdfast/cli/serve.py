"""holdfast serve: a replica of the gateway."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

import holdfast
from holdfast.cli import settings as cli_settings


@click.command()
@click.option("--host", metavar="ADDRESS", help="Where to listen. Default: 127.0.0.1. Elsewhere only with tokens.")
@click.option("--port", metavar="N", help="Default: 7411; 0 picks one.")
@click.option("--advertise", metavar="URL", help="Where other replicas reach this one. Default: made of the two above.")
@click.option("--entrance", metavar="URL", help="Where sandboxes find some replica. Default: the one that made them.")
@click.option(
    "--hosts", metavar="NAME", multiple=True, help="A name it is asked for by, beside localhost and addresses."
)
@click.option("--tokens-file", metavar="FILE", help="Lines of NAME SCOPE SECRET, SCOPE is read or operate.")
@click.option("--writes", metavar="N", help="Requests a second and token that change something. Default: 1000; 0: any.")
@click.option("--driver", metavar="URL", help="The driver: unix:/… or http://…. Default: one is started beside.")
@click.option("--driver-folder", metavar="PATH", help="Of the driver beside. Default: holdfast-driver.")
@click.option("--end-sandboxes", is_flag=True, help="End what runs with the driver beside; else it goes on.")
@click.option("--pools", metavar="NAME=N", multiple=True, help="A pool and its slots. Default: default=8.")
@click.option("--stop-delay", metavar="S", help="From an agent's stop until its command is complete. Default: 5.")
@click.option("--command-limit", metavar="S", help="Of silence, until an agent's command is over. Default: 1800.")
@click.option("--agent-silence", metavar="S", help="Of silence, until an agent has ended. Default: 86400.")
@click.option("--transcripts", metavar="PATH", help="The folder below which transcripts of agents are read.")
@click.option("--agent-config", metavar="PATH", help="The folder of settings that are edited for agents.")
@click.option("--summariser", metavar="MODULE:FUNCTION", help="Makes a text of the turns of a command.")
@click.option("--stop-within", metavar="S", help="Seconds to end in when told to. Default: 20.")
@click.option("--json", "as_json", is_flag=True, help="Say where it listens as a JSON object.")
@click.pass_context
def serve(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Run a replica of the gateway: sandboxes and agents over HTTP.

    One command on a laptop: a file as the database, a driver beside, on loopback. The same command N times against one
    PostgreSQL in production. A line on stdout says where it listens, once it does; what happens is told on stderr. It
    runs in the foreground until TERM or INT (exit code 0; told twice, 1 at once). On USR1 it lets another replica lead
    and is not ready any more: for a while before it is ended.

    Everything can be said by HOLDFAST_* and in [gateway] of holdfast.toml as well, e.g. HOLDFAST_STOP_WITHIN=30. What
    that file declares of datasets holds for the commands of operators, too.

    \b
    Examples:
      holdfast serve
      holdfast serve --port 0 --json
      HOLDFAST_URL=postgresql://db1/app holdfast serve --host 0.0.0.0 --tokens-file tokens --hosts holdfast.example
    """
    try:
        url, schema = cli_settings.database(context.obj["url"], context.obj["schema"])
        from holdfast.gateway.server import StartRefused, run
        from holdfast.gateway.settings import load

        settings = replace(load(url, schema, flags, os.environ, cli_settings.gateway()), policy=cli_settings.policy())
    except ImportError as error:
        raise click.UsageError(f"the gateway needs more: pip install 'holdfast[server]' ({error.name})") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None

    def report_ready(listener: Mapping[str, Any]) -> None:
        line = json.dumps({"kind": "ready", **listener})
        print(line if as_json else f"holdfast gateway: listening on {listener['address']}", flush=True)

    try:
        sys.exit(run(settings, report_ready))
    except (StartRefused, holdfast.HoldfastError) as error:
        click.echo(f"holdfast: {error}", err=True)
        sys.exit(getattr(error, "code", 1))
