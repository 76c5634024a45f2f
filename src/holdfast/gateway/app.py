"""What a replica is put together of, and in which order it starts and stops."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

from fastapi import FastAPI

import holdfast
from holdfast.gateway import operators, pages, problem
from holdfast.gateway.context import Gateway
from holdfast.gateway.settings import Settings

ROOMS: tuple[Any, ...] = (operators, pages)
"""Each has a ``router``, and may have ``loops(gateway)``: what it runs beside the requests."""


def create_app(settings: Settings) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(holdfast.AsyncClient(settings.url, schema=settings.schema))
            gateway = Gateway(
                settings, client, holdfast.AsyncProcessDriver(settings.driver), _instance(), _address(settings)
            )
            app.state.gateway = gateway
            await stack.enter_async_context(_running(gateway))
            yield

    app = FastAPI(title="holdfast", version=holdfast.__version__, lifespan=lifespan)
    problem.register(app)
    for room in ROOMS:
        app.include_router(room.router)
    return app


@asynccontextmanager
async def _running(gateway: Gateway) -> AsyncIterator[None]:
    """All loops, until the requests are over."""
    for room in ROOMS:
        if hasattr(room, "loops"):
            gateway.loops += room.loops(gateway)
    tasks = [asyncio.create_task(loop.run(), name=loop.name) for loop in gateway.loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def _instance() -> str:
    name = os.environ.get("HOLDFAST_REPLICA_ID") or socket.gethostname()
    return f"{name}:{os.getpid()}:{uuid4().hex[:8]}"


def _address(settings: Settings) -> str:
    return f"http://{settings.host}:{settings.port}"
