"""A shop under a real server: FastAPI, with middleware of the kind that cancels on both sides of ours.

    python -m tests.integrations.asgi_shop URL EFFECTS TTL

Says its port, and what it does. An order waits in the middle of its effect until it is told to go on.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

import holdfast
from holdfast.integrations.asgi import IdempotencyMiddleware

_, URL, EFFECTS, TTL = sys.argv
orders = asyncio.Queue[str]()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(orders.put_nowait, line)

    threading.Thread(target=listen, daemon=True).start()
    async with holdfast.AsyncClient(URL) as app.state.client:
        yield


def is_to_be_tried_again(scope: Any, body: bytes) -> bool:
    return body == b"again"


async def passing(request: Request, call_next: Any) -> Response:
    response: Response = await call_next(request)
    return response


app = FastAPI(lifespan=lifespan)
app.middleware("http")(passing)
app.add_middleware(
    IdempotencyMiddleware, client=lambda scope: scope["app"].state.client,
    principal=lambda scope: dict(scope["headers"]).get(b"authorization", b"nobody").decode(),
    on_partial=is_to_be_tried_again, ttl=float(TTL), linger=0.0,
)  # fmt: skip
app.middleware("http")(passing)


async def effect(body: bytes) -> None:
    with open(EFFECTS, "ab", buffering=0) as effects:  # noqa: ASYNC230, PTH123
        effects.write(body + b"\n")
        os.fsync(effects.fileno())
    print("entered", flush=True)  # noqa: T201
    await orders.get()


@app.post("/orders")
async def order(request: Request) -> dict[str, str]:
    body = await request.body()
    await effect(body)
    return {"ordered": body.decode()}


@app.post("/streams")
async def stream(request: Request) -> StreamingResponse:
    body = await request.body()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"begin"
        await effect(body)
        while True:
            yield b"."
            await asyncio.sleep(0.01)

    return StreamingResponse(pieces())


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)  # noqa: T201
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
