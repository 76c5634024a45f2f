"""A replica as a process: it listens once its database and driver answer, and ends in order and in time.

SIGTERM or SIGINT ends it within ``stop_within`` seconds, a second signal at once. SIGUSR1 lets another replica lead.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import h11
import uvicorn
from fastapi import FastAPI
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

import holdfast
from holdfast.driver.daemon_signals import stop_on_signals
from holdfast.gateway import connections
from holdfast.gateway.admission_rules import HEAD_BYTES
from holdfast.gateway.app import create_app, replica_name
from holdfast.gateway.connections import ConnectionLimits
from holdfast.gateway.context import Gateway
from holdfast.gateway.logs import ERROR, WARNING, install, log
from holdfast.gateway.problem import respond
from holdfast.gateway.settings import Settings
from holdfast.problem_json import Problem

INSTANCE_LEASE = "gateway:instance"
EXIT_TAKEN = 75

OnReady = Callable[[Mapping[str, Any]], None]


class StartRefused(Exception):
    """The replica cannot start here; ``code`` is the exit code."""

    def __init__(self, reason: str, code: int = 1) -> None:
        super().__init__(reason)
        self.code = code


def run(settings: Settings, on_ready: OnReady) -> int:
    """Serve until a signal ends the process, and return the exit code. Raises StartRefused.

    ``on_ready`` is called once the replica listens, with its address, name and pid.
    """
    replica = replica_name()
    open_files, room = _raise_file_limit()
    settings = replace(settings, open_files=open_files, connections=room)
    install(replica, [*(token.secret for token in settings.tokens), *settings.keys])
    with suppress(asyncio.CancelledError):  # a signal came before the replica listened
        asyncio.run(_run(settings, replica, on_ready))
    log.event("gateway.stopped")
    return 0


async def _run(settings: Settings, replica: str, on_ready: OnReady) -> None:
    """Check for another instance before binding: its pid is a better message than "address in use"."""
    stop = _stop_on_signal(settings.stop_within)
    cancelling = asyncio.create_task(_cancel_start(stop, asyncio.current_task()))
    async with _only_instance(settings):
        with _bind(settings) as listener:
            bound = replace(settings, port=listener.getsockname()[1])
            app = create_app(bound, replica=replica)
            async with app.router.lifespan_context(app):
                cancelling.cancel()
                await _serve(bound, app, listener, stop, on_ready)


async def _cancel_start(stop: asyncio.Event, start: asyncio.Task[None] | None) -> None:
    """Cancel a start that still waits for a driver or a lease when a signal comes."""
    await stop.wait()
    if start is not None:
        start.cancel()


async def _serve(
    settings: Settings, app: FastAPI, listener: socket.socket, stop: asyncio.Event, on_ready: OnReady
) -> None:
    gateway: Gateway = app.state.gateway
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _hand_over, gateway)
    server = _Server(_config(app, settings), lambda: on_ready(_ready_fields(settings, gateway)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait((serving, waiting := asyncio.create_task(stop.wait())), return_when="FIRST_COMPLETED")
    waiting.cancel()
    gateway.stopping.set()
    server.should_exit = True
    await serving
    await _wait_for_cancelled_requests(server)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_startup: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_startup = on_startup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_startup()

    # private: uvicorn.Server.capture_signals, tested in tests/test_private_names.py
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: _stop_on_signal handles them."""
        yield


# private: h11._receivebuffer.ReceiveBuffer, h11 Connection._receive_buffer, tested in tests/test_private_names.py
class _HeadBuffer(ReceiveBuffer):
    """Refuses heads that a proxy before us could read in another way: with folded lines, with lines that end without
    CR, and those that h11 takes in spite of its limit because they arrived at once."""

    _AMBIGUOUS = re.compile(rb"(?<!\r)\n|\n[ \t]")
    _extracted = bytearray()

    def _extract(self, count: int) -> bytearray:
        self._extracted = super()._extract(count)
        return self._extracted

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Of a head, or of trailers. h11 makes an error of the peer of a LocalProtocolError."""
        lines = super().maybe_extract_lines()
        if lines is not None and (len(self._extracted) > HEAD_BYTES or self._AMBIGUOUS.search(self._extracted)):
            raise h11.LocalProtocolError("the head is ambiguous or too long")
        return lines


class _Protocol(H11Protocol):
    """Counted by ``limits``, and closed when the head of a request takes too long, or its client reads nothing."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn._receive_buffer = _HeadBuffer()
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._unsent_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        surplus = self._limits.add(self, self.client[0] if self.client else "")
        if isinstance(surplus, _Protocol):
            surplus.transport.abort()  # which sends nothing: a peer that does not read cannot delay it

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_request()

    def on_response_complete(self) -> None:
        self._limits.set_idle(self)
        self._wait_for_head()
        super().on_response_complete()
        self._note_request()  # one that was sent ahead

    # private: uvicorn H11Protocol.handle_websocket_upgrade, tested in tests/test_private_names.py
    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Count the connection until the protocol that takes it over loses it."""
        super().handle_websocket_upgrade(event)
        self._stop_waiting()
        protocol: Any = self.transport.get_protocol()
        lost = protocol.connection_lost

        def connection_lost(error: Exception | None) -> None:
            self._limits.remove(self)
            lost(error)

        protocol.connection_lost = connection_lost

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        size = self.transport.get_write_buffer_size()
        for surplus in self._limits.set_unsent(self, size):
            assert isinstance(surplus, _Protocol)
            surplus.transport.abort()
        self._wait_for_reader(size)

    def resume_writing(self) -> None:
        self._stop_waiting_for_reader()
        super().resume_writing()

    def _wait_for_reader(self, unsent: int) -> None:
        def check() -> None:
            if (size := self.transport.get_write_buffer_size()) >= unsent:
                self.transport.abort()
            else:
                self._wait_for_reader(size)

        self._unsent_timer = self.loop.call_later(connections.STALL_WITHIN, check)

    def _stop_waiting_for_reader(self) -> None:
        self._limits.set_unsent(self, 0)
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
            self._unsent_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_waiting_for_reader()
        self._limits.remove(self)
        super().connection_lost(exc)

    def _note_request(self) -> None:
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._stop_waiting()

    def _wait_for_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(connections.HEAD_WITHIN, self.transport.abort)

    def _stop_waiting(self) -> None:
        self._limits.set_busy(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # private: uvicorn H11Protocol.send_400_response, .conn, .transport, tested in tests/test_private_names.py
    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with a problem, too, unless an answer has begun."""
        request_id = uuid4().hex
        log.event("request.unreadable", client=self.client and self.client[0], requestId=request_id)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            problem = Problem(400, f"this is not HTTP/1.1, or its head is longer than {HEAD_BYTES} bytes")
            response = respond(problem, request_id)
            headers = [*response.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
            for event in (
                h11.Response(status_code=400, headers=headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    protocol: Any = partial(_Protocol, limits=ConnectionLimits(settings.connections))
    return uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        loop="asyncio", http=protocol, backlog=connections.BACKLOG, h11_max_incomplete_event_size=HEAD_BYTES,
        ws_max_size=1 << 20,
        timeout_graceful_shutdown=max(1, int(settings.stop_within / 2)),
    )  # fmt: skip


async def _wait_for_cancelled_requests(server: uvicorn.Server) -> None:
    """Requests that uvicorn has cancelled have a moment to clean up while the database is still open."""
    # private: uvicorn.Server.server_state.tasks, tested in tests/test_private_names.py
    if tasks := list(server.server_state.tasks):
        await asyncio.wait(tasks, timeout=1.0)


@asynccontextmanager
async def _only_instance(settings: Settings) -> AsyncIterator[None]:
    """On SQLite, hold the lease of the only instance. Raises StartRefused with code 75 when another process has it.

    The lease of an instance that was killed a moment ago is waited for.
    """
    if not settings.single:
        yield
        return
    async with holdfast.AsyncClient(settings.url, schema=settings.schema) as client:
        is_logged = False
        while (lease := await client.leases.get(INSTANCE_LEASE)) is not None and _is_dead(lease):
            if not is_logged:
                log.event("instance.waits", pid=lease.pid, seconds=round(lease.remaining, 1))
            is_logged = True
            await asyncio.sleep(0.2)
        if lease is not None:
            other = f"process {lease.pid} on {lease.host}"
            raise StartRefused(
                f"{other} serves this file already. A SQLite file allows one replica: use PostgreSQL for more",
                EXIT_TAKEN,
            )
        async with client.guard(INSTANCE_LEASE, ttl=10, renew_every=2.5):
            yield


def _is_dead(lease: Any) -> bool:
    """Whether the holder was a process of this machine that has ended, be it still a zombie.

    A holder with our own pid was here before us, as in a container that was started again.
    """
    if lease.host != os.uname().nodename or lease.pid is None:
        return False
    try:
        state = Path(f"/proc/{lease.pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return True
    return lease.pid == os.getpid() or state in "ZX"


def _stop_on_signal(within: float) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. The process ends ``within`` seconds of the first signal, however long
    anything takes."""

    def on_first_signal() -> None:
        log.event("gateway.stopping", within=within)
        timer = threading.Timer(within, _exit_overdue)
        timer.daemon = True
        timer.start()

    return stop_on_signals((signal.SIGTERM, signal.SIGINT), on_first_signal)


def _exit_overdue() -> None:
    log.event("gateway.overdue", ERROR)
    os._exit(1)


def _hand_over(gateway: Gateway) -> None:
    """On SIGUSR1: stop leading and publishing lineage, and let /readyz fail so that new requests go elsewhere; those
    that come are answered.

    An orchestrator that replaces replicas one by one sends it before SIGTERM.
    """
    log.event("gateway.hands_over")
    gateway.leaving = True
    for elected in (gateway.elector, gateway.relay):
        if elected is not None:
            elected.stop()


def _bind(settings: Settings) -> socket.socket:
    """A bound socket that does not listen yet. Raises StartRefused."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise StartRefused(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from None
    return listener


def _ready_fields(settings: Settings, gateway: Gateway) -> dict[str, Any]:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{host}:{settings.port}"
    fields = {"address": address, "replica": gateway.replica, "pid": os.getpid(), "driver": gateway.driver.address}
    log.event("gateway.ready", fields=fields)
    if not settings.tokens:
        log.event(
            "gateway.open", WARNING,
            why=f"no tokens are set: every user of this machine can read everything at {address}, run operator "
            f"commands, and run programs as the user with id {os.geteuid()}. Set --tokens-file or HOLDFAST_TOKENS",
        )  # fmt: skip
    if not settings.keys and not settings.single:
        log.event(
            "gateway.unsealed", WARNING,
            why="no key is set: variables of sandboxes, tokens of sessions and kept answers are readable in the "
            "database. Set --key-file or HOLDFAST_KEY, the same for all replicas",
        )  # fmt: skip
    return fields


def _raise_file_limit() -> tuple[int, int]:
    """Raise the soft limit of open files as far as needed. Returns the old one, which the driver and its sandboxes get,
    and how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections.MAX_CONNECTIONS + connections.SPARE_FILES
    limit = wanted if hard in (resource.RLIM_INFINITY, max(hard, wanted)) else hard
    if soft in (resource.RLIM_INFINITY, max(soft, limit)):
        limit = soft
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = (
        connections.MAX_CONNECTIONS
        if limit == resource.RLIM_INFINITY
        else min(connections.MAX_CONNECTIONS, limit - connections.SPARE_FILES)
    )
    return soft, max(16, room)
