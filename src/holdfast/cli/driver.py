"""holdfast driver: the daemon that runs sandboxes as local processes, and its client."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

import holdfast
from holdfast.cli.app import Integer, Seconds, fail, json_option, listing_options
from holdfast.cli.settings import warn_if_readable

if TYPE_CHECKING:
    from holdfast.reconciler import Backend, ProcessDriver

FOLDER, SOCKET = "holdfast-driver", "driver.sock"


@click.group(invoke_without_command=True)
@click.option("--folder", metavar="PATH", envvar="HOLDFAST_DRIVER_FOLDER", default=FOLDER, show_default=True,
              help="Folder of the sandboxes' state and logs; one driver per folder.")  # fmt: skip
@click.option(
    "--socket", metavar="PATH", help="Listen on this unix socket, mode 0600. Default: driver.sock in --folder."
)
@click.option("--port", type=Integer(0, 65535), metavar="N", help="Listen on a TCP port instead; 0 picks one.")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
              help="Address for --port. An address other than loopback needs a token.")  # fmt: skip
@click.option("--token-file", type=click.File(), metavar="FILE",
              help="File whose first line is the clients' token. Default: HOLDFAST_DRIVER_TOKEN.")  # fmt: skip
@click.option("--limit", type=Integer(1, 100_000), default=1000, show_default=True, metavar="N",
              help="Maximum number of sandboxes, ended ones included.")  # fmt: skip
@click.option("--end-sandboxes", is_flag=True, help="End all sandboxes when the driver ends.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
@click.pass_context
def driver(context: click.Context, /, **options: Any) -> None:
    """Run sandboxes as local processes, controlled over a socket.

    It needs no database. Clients that may open the socket use HTTP.

    Prints one line on stdout when it listens, and logs to stderr. It runs in the foreground until TERM, INT or HUP
    (exit code 0; a second signal exits immediately with code 1). Sandboxes keep running without it, even after kill -9;
    the next driver on the same folder takes them over, and no command is run twice.

    The subcommands use the driver of --socket or --folder, given before their name, else that of HOLDFAST_DRIVER.

    \b
    Examples:
      holdfast driver
      holdfast driver --folder /var/lib/holdfast --socket /run/holdfast/driver.sock
      holdfast driver --port 7117 --token-file driver.token
      holdfast driver create web -- python -m http.server
      holdfast driver ls
      holdfast driver log web --follow
      holdfast driver rm web
    """
    if context.invoked_subcommand is not None:
        if options["port"] is not None:
            raise click.UsageError("--port starts a driver; to use one on a port, set HOLDFAST_DRIVER=http://HOST:PORT")
        context.obj["driver"] = options
        return
    from pathlib import Path

    from holdfast.driver.daemon import DriverSettings, DriverStartRefused, run

    if options["port"] is not None and options["socket"] is not None:
        raise click.UsageError("use either --socket or --port")
    file = options.pop("token_file")
    if file:
        warn_if_readable(file.name)
    token = file.readline() if file else os.environ.get("HOLDFAST_DRIVER_TOKEN")
    options["token"] = token if token is None else token.strip()
    options["folder"], options["socket"] = Path(options["folder"]), options["socket"] and Path(options["socket"])
    try:
        settings = DriverSettings(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    try:
        sys.exit(run(settings))
    except DriverStartRefused as error:
        click.echo(f"holdfast: {error}", err=True)
        sys.exit(error.code)


@contextmanager
def _connect(context: click.Context) -> Iterator[ProcessDriver]:
    """A client of the driver at --socket, --folder or HOLDFAST_DRIVER. Errors become one line on stderr and exit."""
    options = context.obj["driver"]
    socket = os.path.abspath(options["socket"] or os.path.join(options["folder"], SOCKET))
    was_given = options["socket"] or context.parent.get_parameter_source("folder").name != "DEFAULT"  # type: ignore[union-attr]
    try:
        yield holdfast.reconciler.ProcessDriver(
            None if not was_given and "HOLDFAST_DRIVER" in os.environ else f"unix:{socket}"
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except holdfast.DriverError as error:
        fail(str(error))


@driver.command()
@listing_options
@click.pass_context
def ls(context: click.Context, as_json: bool, wide: bool) -> None:
    """List the sandboxes, ended ones included.

    \b
    Example:
      holdfast driver ls --json | jq '.[] | select(.exit_code) | .id'
    """
    from holdfast.cli import output

    with _connect(context) as client:
        sandboxes = sorted(client.list(), key=lambda sandbox: sandbox.id)
    if as_json:
        output.print_json([_as_json(sandbox) for sandbox in sandboxes])
    elif sandboxes:
        columns = (
            output.Column("sandbox", 12), output.Column("state"), output.Column("exit"), output.Column("pid"),
            output.Column("age"), output.Column("command", 16),
        )  # fmt: skip
        output.print_table(columns, map(_row, sandboxes), wide=wide)
    else:
        click.echo("there are no sandboxes", err=True)


@driver.command()
@click.argument("id")
@click.argument("argv", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--env", multiple=True, metavar="NAME[=VALUE]",
              help="Environment variable; may be repeated. NAME alone: its value is that of our own.")  # fmt: skip
@click.option("--cwd", metavar="PATH", help="Working folder. Default: a new folder, removed with the sandbox.")
@click.option(
    "--grace", type=Seconds(0, 3600), metavar="S", help="Seconds between TERM and KILL when it is removed. Default: 10."
)
@click.option("--memory-bytes", type=int, metavar="N", help="Address-space limit of each process.")
@click.option("--cpu-seconds", type=int, metavar="N", help="CPU-time limit of each process.")
@click.option("--open-files", type=int, metavar="N", help="Open-file limit of each process.")
@click.option("--processes", type=int, metavar="N", help="Limit on processes of the user; none for root.")
@json_option
@click.pass_context
def create(
    context: click.Context, /, id: str, argv: tuple[str, ...], env: tuple[str, ...], cwd: str | None,
    grace: float | None, as_json: bool, **limits: int | None,
) -> None:  # fmt: skip
    """Run COMMAND as the sandbox ID.

    Repeating the same command has no effect. Exit code 1 when the sandbox ID exists with other settings.

    \b
    Example:
      holdfast driver create web --env PORT=8080 --env API_KEY --open-files 256 -- ./serve
    """
    from holdfast.cli import output

    if unset := [variable for variable in env if "=" not in variable and variable not in os.environ]:
        raise click.UsageError(f"--env {unset[0]}: is not set in the environment. Set it, or give NAME=VALUE")
    variables = {name: value if equals else os.environ[name] for name, equals, value in (v.partition("=") for v in env)}
    given_limits = {name: value for name, value in limits.items() if value is not None}
    with _connect(context) as client:
        sandbox = client.create(id, argv, env=variables, cwd=cwd, grace=grace, limits=given_limits)
    click.echo(output.to_json(_as_json(sandbox)) if as_json else f"created {output.clean(sandbox.id)}")


@driver.command()
@click.argument("id")
@click.option("--tail", type=Integer(0), metavar="N", help="Show the last N lines. Default: the whole log.")
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the sandbox ends, or Ctrl-C.")
@click.pass_context
def log(context: click.Context, id: str, tail: int | None, follow: bool) -> None:
    """Show the output of a sandbox (stdout and stderr), byte for byte.

    \b
    Example:
      holdfast driver log web --tail 20 --follow
    """
    with _connect(context) as client:
        try:
            for data in client.log(id, tail=tail, follow=follow):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        except KeyboardInterrupt:
            pass


@driver.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--grace", type=Seconds(0, 3600), metavar="S", help="Seconds between TERM and KILL. Default: the sandbox's own."
)
@click.option(
    "--wait",
    type=Seconds(0, 3600),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Maximum time to wait for the sandbox to end, in seconds.",
)
@click.pass_context
def rm(context: click.Context, ids: tuple[str, ...], grace: float | None, wait: float) -> None:
    """End all processes of a sandbox, and remove it with its log.

    A sandbox that does not exist is not an error. Exit code 1 when one still runs after --wait seconds; the driver then
    keeps trying to end it.

    \b
    Example:
      holdfast driver rm web --grace 2
    """
    from holdfast.cli import output

    late = []
    with _connect(context) as client:
        for id in ids:  # start to end all of them before waiting for one
            client.delete(id, grace=grace)
        for id in ids:
            if client.delete(id, grace=grace, wait=wait):
                click.echo(f"removed {output.clean(id)}")
            else:
                late.append(id)
                click.echo(
                    f"holdfast: {output.clean(id)} has not ended within {wait:g} s; the driver keeps trying", err=True
                )
    if late:
        context.exit(1)


def _as_json(sandbox: Backend) -> dict[str, Any]:
    ready = sandbox.conditions[0]
    details = {
        name: datetime.fromtimestamp(value, UTC) if name.endswith("_at") and value is not None else value
        for name, value in sandbox.details.items()
    }
    return {
        "id": sandbox.id,
        "ready": ready.status,
        "reason": ready.reason,
        "message": ready.message,
        "deleting": sandbox.deleting,
        **details,
    }


def _row(sandbox: Backend) -> tuple[object, ...]:
    from holdfast.cli import output

    details = sandbox.details
    code = details["exit_code"] if details["signal"] is None else f"signal {details['signal']}"
    age = output.format_duration(datetime.now(UTC).timestamp() - details["created_at"])
    pid = None if sandbox.conditions[0].terminal else details["pid"]
    state = "Deleting" if sandbox.deleting else sandbox.conditions[0].reason
    return sandbox.id, state, code, pid, age, " ".join(details["argv"])
