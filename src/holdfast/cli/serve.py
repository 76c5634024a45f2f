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
@click.option(
    "--host", metavar="ADDRESS", help="Address to listen on. Default: 127.0.0.1. Other than loopback needs tokens."
)
@click.option("--port", metavar="N", help="Port to listen on. Default: 7411; 0 picks a free one.")
@click.option(
    "--advertise", metavar="URL", help="URL under which other replicas reach this one. Default: --host and --port."
)
@click.option(
    "--entrance", metavar="URL", help="URL under which sandboxes reach a replica. Default: the one that created them."
)
@click.option(
    "--redirect", is_flag=True, help="Redirect requests that another replica has to answer. Default: send them on."
)
@click.option("--hosts", metavar="NAME", multiple=True, help="Extra Host header to accept; may be repeated.")
@click.option(
    "--tokens-file", metavar="FILE", help="File with lines of NAME SCOPE SECRET; SCOPE: report, read, operate."
)
@click.option("--key-file", metavar="FILE", help="Key that seals secrets in the database, the same for all replicas.")
@click.option(
    "--writes", metavar="N", help="Write rate limit per token, in requests per second. Default: 1000; 0: none."
)
@click.option("--driver", metavar="URL", help="The driver: unix:/… or http://…. Default: serve starts one.")
@click.option(
    "--driver-folder", metavar="PATH", help="Folder of the driver that serve starts. Default: holdfast-driver."
)
@click.option(
    "--end-sandboxes", is_flag=True, help="End its sandboxes when that driver ends. Default: they keep running."
)
@click.option(
    "--pools",
    metavar="NAME=N",
    multiple=True,
    help="A pool and its number of slots; may be repeated. Default: default=8.",
)
@click.option(
    "--stop-delay", metavar="S", help="Seconds from an agent's stop until its command is complete. Default: 5."
)
@click.option(
    "--command-limit", metavar="S", help="End an agent's command after S seconds without activity. Default: 1800."
)
@click.option("--agent-silence", metavar="S", help="End an agent after S seconds without activity. Default: 86400.")
@click.option("--transcripts", metavar="PATH", help="Folder from which agents' transcripts are read.")
@click.option("--agent-config", metavar="PATH", help="Folder of the agents' settings files.")
@click.option("--summariser", metavar="MODULE:FUNCTION", help="Function that summarises the turns of a command.")
@click.option("--relay", metavar="NAME=SINK", help="Run this relay of lineage; SINK as in: holdfast relay run.")
@click.option("--webhook", metavar="URL", help="POST each new problem there, and its end.")
@click.option(
    "--webhook-secret-file",
    metavar="FILE",
    help="File with the secret that signs these messages. Default: HOLDFAST_WEBHOOK_SECRET.",
)
@click.option("--stop-within", metavar="S", help="Maximum time to shut down, in seconds. Default: 20.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
@click.pass_context
def serve(context: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Run a replica of the gateway: sandboxes and agents over HTTP.

    Without arguments it uses the SQLite file holdfast.db in the working folder (and prints its path), starts a driver,
    and listens on loopback. In production, run it on several machines with one PostgreSQL database.

    Prints one line on stdout when it listens, and logs to stderr. It runs in the foreground until TERM or INT (exit
    code 0; a second signal exits immediately with code 1). USR1 drains it: another replica leads, and it reports that
    it is not ready.

    Every option can also be set by a variable (HOLDFAST_STOP_WITHIN=30) or in [gateway] of holdfast.toml
    (stop_within = 30).

    Exit code 1 when it cannot listen, or when the database or the driver does not answer; 2 on wrong settings; 75 when
    another process uses the same SQLite file, 70 when that is no longer certain.

    \b
    Examples:
      holdfast serve
      holdfast serve --port 0 --json
      HOLDFAST_URL=postgresql://db1/app holdfast serve --host 0.0.0.0 --tokens-file tokens --hosts holdfast.example
    """
    try:
        url, schema = cli_settings.database(context.obj["url"], context.obj["schema"], default_file="holdfast.db")
        from holdfast.gateway.server import StartRefused, run
        from holdfast.gateway.settings import load

        table = cli_settings.gateway()
        for name in ("tokens_file", "key_file", "webhook_secret_file"):
            if path := flags.get(name) or os.environ.get(f"HOLDFAST_{name.upper()}") or table.get(name):
                cli_settings.warn_if_readable(str(path))
        settings = replace(load(url, schema, flags, os.environ, table), policy=cli_settings.policy())
    except ImportError as error:
        raise click.UsageError(
            f"serve needs the server extra: pip install 'holdfast[server]' ({error.name} is missing)"
        ) from None
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
