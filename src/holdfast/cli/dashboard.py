"""holdfast dashboard: the pages of any database, read-only."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import click

from holdfast.cli.app import Integer, fail, open_client


@click.command()
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=Integer(0, 65535), default=7412, metavar="N", show_default=True,
    help="Port to listen on; 0 picks a free one.",
)  # fmt: skip
@click.pass_context
def dashboard(context: click.Context, host: str, port: int) -> None:
    """Serve pages that show this database.

    They say who leads, what is held, what is wrong and why. Prints its address, and runs until Ctrl-C or TERM. Writes
    nothing to the database, and no page changes anything. It asks for no password: on another address than loopback,
    everybody who reaches it reads everything.

    Exit code 1 when it cannot listen there.

    \b
    Examples:
      holdfast dashboard
      holdfast --url sqlite:///app.db dashboard --port 0
    """
    try:
        from holdfast.dashboard.app import Dashboard
    except ModuleNotFoundError as error:
        raise click.UsageError(str(error)) from None
    with open_client(context) as client, client.read_only() as reader, _bind(host, port) as listener:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}"

        def report() -> None:
            click.echo(f"holdfast dashboard: {address}")
            sys.stdout.flush()

        stopping = asyncio.Event()
        pages = Dashboard(reader, stopping=stopping)
        app = _only_hosts(pages, {host.lower(), socket.gethostname().lower()})
        asyncio.run(_serve(app, listener, stopping, report, pages.sample_waits()))


@contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        fail(f"cannot listen on {host} port {port}: {error.strerror}")
    if not str(address[0]).startswith("127.") and address[0] != "::1":
        click.echo(f"holdfast: everybody who reaches {address[0]} can read everything: no password is asked", err=True)
    with listener:
        yield listener


async def _serve(
    app: Any,
    listener: socket.socket,
    stopping: asyncio.Event,
    report: Callable[[], None],
    beside: Coroutine[Any, Any, None],
) -> None:
    """``beside`` runs until ``stopping`` is set."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            report()

        # private: uvicorn.Server.capture_signals, tested in tests/test_private_names.py
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Capture none: the loop handles them."""
            yield

    def stop() -> None:
        stopping.set()
        server.should_exit = True

    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=10,
    )  # fmt: skip
    server = Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    async with asyncio.TaskGroup() as group:
        group.create_task(beside)
        await server.serve(sockets=[listener])
        stopping.set()


def _only_hosts(app: Any, names: set[str]) -> Any:
    """Refuse other names than these and localhost: a foreign page could let its own name resolve to this machine."""
    from holdfast.gateway.admission_rules import is_allowed_host

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        if scope["type"] == "http" and is_allowed_host(headers.get(b"host", b"").decode("latin-1"), names):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 421, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"this host is not served here: use the address\n"})

    return serve
