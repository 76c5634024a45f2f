"""Builds a replica, and defines the order in which its parts start and stop."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

from fastapi import FastAPI

import holdfast
from holdfast.gateway import (
    admission_rules,
    health,
    leader_duties,
    lineage_relay,
    openapi,
    operators,
    pages,
    problem,
    sandboxes,
    sessions,
)
from holdfast.gateway.admission import Admission
from holdfast.gateway.agents import routes as agents
from holdfast.gateway.context import Gateway, Loop
from holdfast.gateway.driver_process import DriverProcess
from holdfast.gateway.logs import ERROR, WARNING, log
from holdfast.gateway.peers import Peers
from holdfast.gateway.request_metrics import RequestMetrics
from holdfast.gateway.seal import Seal, open_seal
from holdfast.gateway.settings import Settings
from holdfast.integrations.asgi import IdempotencyMiddleware
from holdfast.integrations.prometheus import export

FEATURES: tuple[Any, ...] = (health, sandboxes, sessions, leader_duties, lineage_relay, agents, operators, pages)
"""Modules that have a ``router``, and may have ``loops(gateway)``: what they run beside the requests."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


def create_app(settings: Settings, *, replica: str | None = None) -> FastAPI:
    """The ASGI application of a replica. The database and the driver are opened when its lifespan begins."""
    metrics, seal = RequestMetrics(), open_seal(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.callback(export(metrics.registry))
            app.state.gateway = await _open_gateway(settings, seal, replica or replica_name(), stack)
            app.state.gateway.metrics = metrics.registry
            await stack.enter_async_context(_run_loops(app.state.gateway))
            yield

    app = FastAPI(
        title="holdfast", version=holdfast.__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    problem.register(app)
    for feature in FEATURES:
        app.router.routes.extend(feature.router.routes)  # flat: Starlette searches a nested router twice per level
    app.add_middleware(
        IdempotencyMiddleware, client=lambda scope: scope["app"].state.gateway.client,
        principal=lambda scope: scope["state"]["principal"], methods=("POST",),
        max_body=admission_rules.BODY_BYTES, seal=seal,
    )  # fmt: skip
    app.add_middleware(Admission, settings=settings, metrics=metrics)
    openapi.extend(app)
    return app


async def _open_gateway(settings: Settings, seal: Seal, replica: str, stack: AsyncExitStack) -> Gateway:
    """Open the driver first and the client second: the driver must end after the leases are released."""
    loops, address = [], settings.driver
    if address is None:
        process = DriverProcess(
            settings.driver_folder, end_sandboxes=settings.end_sandboxes, open_files=settings.open_files
        )
        stack.push_async_callback(process.close)
        await process.ensure_running()
        loops, address = [Loop("driver", process.supervise)], process.address
    driver = holdfast.reconciler.AsyncProcessDriver(address)
    client = await stack.enter_async_context(holdfast.AsyncClient(settings.url, schema=settings.schema))
    await client.leases.list()  # SQLite migrates itself here; PostgreSQL raises SchemaMismatch with the command to run
    await client.objects.get("@gateway", "installation")  # refused to a role that is no gateway's
    listens_at = settings.advertise or _advertised_address(settings)
    peers = Peers(client, listens_at, health.PRESENCE, single=settings.single)
    return Gateway(settings, client, driver, replica, listens_at, peers, seal, loops)


@asynccontextmanager
async def _run_loops(gateway: Gateway) -> AsyncIterator[None]:
    """Run all loops until ``gateway.stopping`` is set or the block is left."""
    for feature in FEATURES:
        if hasattr(feature, "loops"):
            gateway.loops += feature.loops(gateway)
    tasks = [asyncio.create_task(_restart_on_error(gateway, loop), name=loop.name) for loop in gateway.loops]
    cancelling = asyncio.create_task(_cancel_on_stop(gateway, tasks))
    try:
        yield
    finally:
        gateway.stopping.set()
        await cancelling


async def _cancel_on_stop(gateway: Gateway, tasks: list[asyncio.Task[None]]) -> None:
    """Cancel all loops when the replica stops, and wait for them. ``stop_within`` ends one that does not react."""
    await gateway.stopping.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _restart_on_error(gateway: Gateway, loop: Loop) -> None:
    """Run a loop again when it raises, after a pause that doubles unless the loop ran well for a while.

    An exception raised during cancellation replaces the CancelledError, and must not restart the loop.
    """
    clock, pause = asyncio.get_running_loop().time, _FIRST_PAUSE
    while True:
        began = clock()
        try:
            return await loop.run()
        except Exception as error:
            if gateway.stopping.is_set():
                log.event("loop.failed", WARNING, exc_info=error, loop=loop.name)
                return None
            pause = _FIRST_PAUSE if clock() - began > _LONGEST_PAUSE else min(2 * pause, _LONGEST_PAUSE)
            log.event("loop.failed", ERROR, exc_info=error, loop=loop.name, again_in=pause)
        await asyncio.sleep(pause)


def replica_name() -> str:
    """A name that no other running replica has: the one that was given, or that of the node, or of neither."""
    given = os.environ.get("HOLDFAST_REPLICA_ID") or os.environ.get("HOSTNAME")
    name = given or socket.gethostname().replace("(none)", "") or uuid4().hex
    return f"{name}:{os.getpid()}:{uuid4().hex[:8]}"


def _advertised_address(settings: Settings) -> str:
    """The URL that other replicas redirect to, built from host and port.

    A wildcard host is replaced by the address that the machine's own name resolves to. On many machines that is
    loopback: other machines would be redirected to themselves, so a warning is logged.
    """
    host = settings.host
    if host in ("0.0.0.0", "::", ""):
        with suppress(OSError):
            host = socket.gethostbyname(socket.gethostname())
        address = ipaddress.ip_address(host or "::")
        if not settings.single and (address.is_loopback or address.is_unspecified):
            log.event(
                "gateway.unreachable", WARNING, found=host, remedy="set --advertise to a URL that other replicas reach"
            )
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
