"""holdfast dashboard: the pages of any database, read-only."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import settings
from holdfast.cli.app import DATABASE, Integer, fail, open_client

if TYPE_CHECKING:
    from holdfast.dashboard.webhook import WebhookTarget


@click.command()
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=Integer(0, 65535), default=7412, metavar="N", show_default=True,
    help="Port to listen on; 0 picks a free one.",
)  # fmt: skip
@click.option(
    "--webhook", metavar="URL", envvar="HOLDFAST_WEBHOOK", show_envvar=True,
    help="POST each new problem there, and its end.",
)  # fmt: skip
@click.option(
    "--webhook-secret-file", metavar="FILE",
    help="File with the secret that signs these messages. Default: HOLDFAST_WEBHOOK_SECRET.",
)  # fmt: skip
@click.pass_context
def dashboard(
    context: click.Context, host: str, port: int, webhook: str | None, webhook_secret_file: str | None
) -> None:
    """Serve pages that show this database.

    They say who leads, what is held, what is wrong and why. Prints its address, and runs until Ctrl-C or TERM. No page
    changes anything. It asks for no password: on another address than loopback, everybody who reaches it reads
    everything.

    Writes nothing to the database, unless --webhook is given: of all processes with the same URL one sends, which holds
    a lease and records what it has sent.

    Exit code 1 when it cannot listen there.

    \b
    Examples:
      holdfast dashboard
      holdfast --url sqlite:///app.db dashboard --port 0
      holdfast dashboard --webhook https://hooks.example/holdfast --webhook-secret-file secret
    """
    try:
        from holdfast.dashboard.app import Dashboard
    except ModuleNotFoundError as error:
        raise click.UsageError(str(error)) from None
    target = None if webhook is None else _target(webhook, webhook_secret_file)
    with open_client(context) as client, client.read_only() as reader, _bind(host, port) as listener:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listener.getsockname()[1]}"

        def report() -> None:
            click.echo(f"holdfast dashboard: {address}")
            sys.stdout.flush()

        stopping = asyncio.Event()
        pages = Dashboard(reader, stopping=stopping)
        app = _only_hosts(pages, {host.lower(), socket.gethostname().lower()})
        url, schema = context.meta[DATABASE]
        sender = nullcontext() if target is None else _webhook(url, schema, target)
        asyncio.run(_serve(app, listener, stopping, report, pages.sample_waits(), sender))


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


def _target(url: str, secret_file: str | None) -> WebhookTarget:
    from holdfast.dashboard.webhook import WebhookTarget, read_secret

    try:
        if secret_file is not None:
            settings.warn_if_readable(secret_file)
        return WebhookTarget(url, read_secret(secret_file, os.environ))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@asynccontextmanager
async def _webhook(url: str, schema: str, target: WebhookTarget) -> AsyncIterator[None]:
    """Send in a task, with a client of its own: that of the pages may not write."""
    import holdfast
    from holdfast.dashboard.source import PageSource
    from holdfast.dashboard.webhook import Webhook

    async with holdfast.AsyncClient(url, schema=schema) as client:
        task = asyncio.create_task(Webhook(PageSource(client), target).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _serve(
    app: Any, listener: socket.socket, stopping: asyncio.Event, report: Callable[[], None],
    beside: Coroutine[Any, Any, None], sender: AbstractAsyncContextManager[None],
) -> None:  # fmt: skip
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
    async with sender, asyncio.TaskGroup() as group:
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
