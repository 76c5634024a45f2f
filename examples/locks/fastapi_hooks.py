"""Hooks of one agent run one after another, those of different agents concurrently. FastAPI, asyncio.

uvicorn --factory examples.locks.fastapi_hooks:create_app        with HOLDFAST_URL=postgresql://…
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, HTTPException, Path, Request
from psycopg_pool import AsyncConnectionPool

import holdfast

Agent = Annotated[int, Path(ge=1, le=2**31 - 1)]


def create_app(url: str | None = None, *, patience: float = 15.0) -> FastAPI:
    where = url or os.environ["HOLDFAST_URL"]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with holdfast.AsyncClient(where) as client, AsyncConnectionPool(where, min_size=1, open=False) as pool:
            app.state.client, app.state.pool = client, pool
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/agents/{agent}/hooks/{event}")
    async def hook(agent: Agent, event: str, request: Request) -> dict[str, int]:
        client: holdfast.AsyncClient = request.app.state.client
        try:
            async with client.lock(("agent", agent), timeout=patience):
                return {"events": await record(request.app.state.pool, agent, event)}
        except holdfast.AcquireTimeout:
            raise HTTPException(503, f"agent {agent} is busy", headers={"Retry-After": "1"}) from None

    return app


async def record(pool: AsyncConnectionPool, agent: int, event: str) -> int:
    """Two transactions, on connections of the application's own pool: the lock is on neither, and outlives both."""
    async with pool.connection() as connection:
        row = await (await connection.execute("select events from agent where id = %s", [agent])).fetchone()
    if row is None:
        raise HTTPException(404, f"there is no agent {agent}")
    events = [*row[0], event]
    async with pool.connection() as connection:
        await connection.execute("update agent set events = %s where id = %s", [events, agent])
    return len(events)
