"""A replica as a process: it listens when all is well, and ends in order and in time when it is told to."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI

import holdfast
from holdfast.gateway.app import create_app, instance
from holdfast.gateway.context import Gateway
from holdfast.gateway.logs import install, say
from holdfast.gateway.settings import Settings

GUARD = "gateway:instance"
HEAD_BYTES = 32768
"""Of a request line and its headers, in all."""


Ready = Callable[[Mapping[str, Any]], None]


class Refused(Exception):
    """It cannot start here, and why."""


def run(settings: Settings, ready: Ready) -> int:
    """Until it is told to end; the exit code. ``ready`` is called with where it listens, once it does."""
    replica = instance()
    install(replica, [each.secret for each in settings.tokens])
    listening = _bound(settings)
    settings = replace(settings, port=listening.getsockname()[1])
    try:
        asyncio.run(_serve(settings, replica, listening, ready))
    finally:
        listening.close()
    return 0


async def _serve(settings: Settings, replica: str, listening: socket.socket, ready: Ready) -> None:
    told = _told_to_end(settings.stop_within)
    async with _alone(settings):
        app = create_app(settings, replica=replica)
        async with app.router.lifespan_context(app):
            gateway: Gateway = app.state.gateway
            server = _Server(_config(app, settings), lambda: ready(_place(settings, gateway)))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            await asyncio.wait((serving, waiting := asyncio.create_task(told.wait())), return_when="FIRST_COMPLETED")
            waiting.cancel()
            gateway.stopping.set()
            server.should_exit = True
            await serving
            await _let_go(server)
    say("gateway.stopped")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are ours."""
        yield


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        loop="asyncio", http="h11", h11_max_incomplete_event_size=HEAD_BYTES, ws_max_size=1 << 20,
        timeout_graceful_shutdown=max(1, int(settings.stop_within / 2)),
    )  # fmt: skip


async def _let_go(server: uvicorn.Server) -> None:
    """Those that were cancelled have a moment to clean up while there is a database."""
    if tasks := list(server.server_state.tasks):
        await asyncio.wait(tasks, timeout=1.0)


@asynccontextmanager
async def _alone(settings: Settings) -> AsyncIterator[None]:
    """On a file, one instance: whoever comes second is told who is there, and ends with 75."""
    if not settings.single:
        yield
        return
    async with holdfast.AsyncClient(settings.url, schema=settings.schema) as client, client.guard(GUARD):
        yield


def _told_to_end(within: float) -> asyncio.Event:
    """By TERM or INT; told twice, at once. However long anything takes, the process is gone ``within`` seconds."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        if told.is_set():
            os._exit(1)
        say("gateway.stopping", within=within)
        overdue = threading.Timer(within, _overdue)
        overdue.daemon = True
        overdue.start()
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    return told


def _overdue() -> None:
    say("gateway.overdue", logging.ERROR)
    os._exit(1)


def _bound(settings: Settings) -> socket.socket:
    """Ours from here on; nobody is let in before it listens."""
    try:
        [(family, kind, number, _, place), *_] = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        found = socket.socket(family, kind, number)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
    except OSError as error:
        raise Refused(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from None
    return found


def _place(settings: Settings, gateway: Gateway) -> dict[str, Any]:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{settings.port}"
    place = {"address": address, "replica": gateway.replica, "pid": os.getpid(), "driver": gateway.driver.address}
    say("gateway.ready", fields=place)
    return place
