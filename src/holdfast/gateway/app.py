"""What a replica is put together of, and in which order it starts and stops."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

from fastapi import FastAPI

import holdfast
from holdfast.gateway import health, leading, openapi, operators, pages, problem, rules, sandboxes, sessions
from holdfast.gateway.agents import routes as agents
from holdfast.gateway.beside import Beside
from holdfast.gateway.context import Gateway, Loop
from holdfast.gateway.logs import say
from holdfast.gateway.meter import Meter
from holdfast.gateway.settings import Settings
from holdfast.gateway.shield import Shield
from holdfast.integrations.asgi import IdempotencyMiddleware
from holdfast.integrations.prometheus import export

ROOMS: tuple[Any, ...] = (health, sandboxes, sessions, leading, agents, operators, pages)
"""Each has a ``router``, and may have ``loops(gateway)``: what it runs beside the requests."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


def create_app(settings: Settings, *, replica: str | None = None) -> FastAPI:
    meter = Meter()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.callback(export(meter.registry))
            app.state.gateway = await _opened(settings, replica or instance(), stack)
            app.state.gateway.metrics = meter.registry
            await stack.enter_async_context(_running(app.state.gateway))
            yield

    app = FastAPI(
        title="holdfast", version=holdfast.__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    problem.register(app)
    for room in ROOMS:
        app.router.routes.extend(room.router.routes)  # flat: a router in a router is searched twice for each level
    app.add_middleware(
        IdempotencyMiddleware, client=lambda scope: scope["app"].state.gateway.client,
        principal=lambda scope: scope["state"]["principal"], methods=("POST",),
        max_body=rules.BODY_BYTES,
    )  # fmt: skip
    app.add_middleware(Shield, settings=settings, meter=meter)
    openapi.describe(app)
    return app


async def _opened(settings: Settings, replica: str, stack: AsyncExitStack) -> Gateway:
    """What is closed last comes first: the driver goes when the leases are released."""
    loops, address = [], settings.driver
    if address is None:
        beside = Beside(settings.driver_folder, end_sandboxes=settings.end_sandboxes)
        stack.push_async_callback(beside.close)
        await beside.ensure()
        loops, address = [Loop("driver", beside.keep)], beside.address
    driver = holdfast.AsyncProcessDriver(address)
    client = await stack.enter_async_context(holdfast.AsyncClient(settings.url, schema=settings.schema))
    await client.leases.list()  # SQLite migrates itself; PostgreSQL says the command
    return Gateway(settings, client, driver, replica, settings.advertise or _address(settings), loops)


@asynccontextmanager
async def _running(gateway: Gateway) -> AsyncIterator[None]:
    """All loops, until we are told to end, or leave the block."""
    for room in ROOMS:
        if hasattr(room, "loops"):
            gateway.loops += room.loops(gateway)
    tasks = [asyncio.create_task(_kept(gateway, loop), name=loop.name) for loop in gateway.loops]
    ending = asyncio.create_task(_ended(gateway, tasks))
    try:
        yield
    finally:
        gateway.stopping.set()
        await ending


async def _ended(gateway: Gateway, tasks: list[asyncio.Task[None]]) -> None:
    """All of them, when we are told to end. What does not heed it ends with the process, which has a bound."""
    await gateway.stopping.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _kept(gateway: Gateway, loop: Loop) -> None:
    """Run it again when it fails, later each time, unless it went well for a while. What it meets on its way out, when
    it is cancelled, is told in the place of the cancellation, and must not bring it back."""
    clock, pause = asyncio.get_running_loop().time, _FIRST_PAUSE
    while True:
        began = clock()
        try:
            return await loop.run()
        except Exception as error:
            if gateway.stopping.is_set():
                say("loop.failed", logging.WARNING, loop=loop.name, error=error)
                return None
            pause = _FIRST_PAUSE if clock() - began > _LONGEST_PAUSE else min(2 * pause, _LONGEST_PAUSE)
            say("loop.failed", logging.ERROR, loop=loop.name, again_in=pause, error=error)
        await asyncio.sleep(pause)


def instance() -> str:
    """A name that no other running replica has."""
    name = os.environ.get("HOLDFAST_REPLICA_ID") or socket.gethostname()
    return f"{name}:{os.getpid()}:{uuid4().hex[:8]}"


def _address(settings: Settings) -> str:
    """One that leads somewhere: all addresses of this machine are none to go to. Where its own name stands for
    loopback, as many a machine has it, other machines would be sent to themselves, and somebody has to know."""
    host = settings.host
    if host in ("0.0.0.0", "::", ""):
        with suppress(OSError):
            host = socket.gethostbyname(socket.gethostname())
        found = ipaddress.ip_address(host or "::")
        if not settings.single and (found.is_loopback or found.is_unspecified):
            say(
                "gateway.unreachable", logging.WARNING, found=host, remedy="say --advertise, which other replicas reach"
            )
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
