"""A replica as a process: it listens when all is well, and ends in order and in time when it is told to."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

import holdfast
from holdfast.driver.daemon_signals import told_to_end
from holdfast.gateway.app import create_app, instance
from holdfast.gateway.context import Gateway
from holdfast.gateway.logs import install, say
from holdfast.gateway.problem import Problem, answer
from holdfast.gateway.settings import Settings

GUARD, TAKEN = "gateway:instance", 75
HEAD_BYTES = 32768
"""Of a request line and its headers, in all."""

Ready = Callable[[Mapping[str, Any]], None]


class Refused(Exception):
    """It cannot start here, and why; ``code`` to exit with."""

    def __init__(self, why: str, code: int = 1) -> None:
        super().__init__(why)
        self.code = code


def run(settings: Settings, ready: Ready) -> int:
    """Until it is told to end; the exit code. ``ready`` is called with where it listens, once it does."""
    replica = instance()
    install(replica, [each.secret for each in settings.tokens])
    with suppress(asyncio.CancelledError):  # told to end before it was there
        asyncio.run(_run(settings, replica, ready))
    say("gateway.stopped")
    return 0


async def _run(settings: Settings, replica: str, ready: Ready) -> None:
    """Alone first: whoever starts it twice in one folder is told who serves there, not that the port is taken."""
    told = _told_to_end(settings.stop_within)
    starting = asyncio.create_task(_give_up(told, asyncio.current_task()))
    async with _alone(settings):
        with _bound(settings) as listening:
            here = replace(settings, port=listening.getsockname()[1])
            app = create_app(here, replica=replica)
            async with app.router.lifespan_context(app):
                starting.cancel()
                await _serve(here, app, listening, told, ready)


async def _give_up(told: asyncio.Event, starting: asyncio.Task[None] | None) -> None:
    """What waits for a driver or a lease while it starts need not go on when nobody wants it any more."""
    await told.wait()
    if starting is not None:
        starting.cancel()


async def _serve(settings: Settings, app: FastAPI, listening: socket.socket, told: asyncio.Event, ready: Ready) -> None:
    gateway: Gateway = app.state.gateway
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _hand_over, gateway)
    server = _Server(_config(app, settings), lambda: ready(_place(settings, gateway)))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await asyncio.wait((serving, waiting := asyncio.create_task(told.wait())), return_when="FIRST_COMPLETED")
    waiting.cancel()
    gateway.stopping.set()
    server.should_exit = True
    await serving
    await _let_go(server)


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


class _Protocol(H11Protocol):
    def send_400_response(self, msg: str) -> None:
        """What is not HTTP is a problem, too. Where an answer has begun, there is nothing to be said any more."""
        number = uuid4().hex
        say("request.unreadable", client=self.client and self.client[0], requestId=number)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            problem = Problem(400, f"this is not HTTP/1.1, or its head is longer than {HEAD_BYTES} bytes")
            told = answer(problem, number)
            headers = [*told.raw_headers, (b"x-request-id", number.encode()), (b"connection", b"close")]
            for event in (
                h11.Response(status_code=400, headers=headers),
                h11.Data(data=bytes(told.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        loop="asyncio", http=_Protocol, h11_max_incomplete_event_size=HEAD_BYTES, ws_max_size=1 << 20,
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
    async with holdfast.AsyncClient(settings.url, schema=settings.schema) as client:
        told = False
        while (first := await client.leases.get(GUARD)) is not None and _is_dead(first):
            if not told:
                say("instance.waits", pid=first.pid, seconds=round(first.remaining, 1))
            told = True
            await asyncio.sleep(0.2)
        if first is not None:
            who = f"process {first.pid} on {first.host}"
            raise Refused(f"{who} serves this file already. A file is for one: take PostgreSQL", TAKEN)
        async with client.guard(GUARD, ttl=10, heartbeat=2.5):
            yield


def _is_dead(first: Any) -> bool:
    """Killed a moment ago, on this very machine, be it buried or not: its lease has not expired yet, and soon will. One
    that had our own number was here before us, as in a container that was started again."""
    if first.host != os.uname().nodename or first.pid is None:
        return False
    try:
        state = Path(f"/proc/{first.pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return True
    return first.pid == os.getpid() or state in "ZX"


def _told_to_end(within: float) -> asyncio.Event:
    """However long anything takes, the process is gone ``within`` seconds of the first word."""

    def first() -> None:
        say("gateway.stopping", within=within)
        overdue = threading.Timer(within, _overdue)
        overdue.daemon = True
        overdue.start()

    return told_to_end((signal.SIGTERM, signal.SIGINT), first)


def _hand_over(gateway: Gateway) -> None:
    """On USR1: another replica leads from here on, and /readyz sends requests elsewhere; those that come are answered.
    For whoever ends replicas one after the other, before TERM."""
    say("gateway.hands_over")
    gateway.leaving = True
    if gateway.elector is not None:
        gateway.elector.stop()


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
