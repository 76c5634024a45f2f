"""Errors of an ASGI application as problem+json: its own, and what holdfast refuses; nothing else is touched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import holdfast
from holdfast.integrations.asgi import Problem, ProblemMiddleware

ERRORS: dict[str, Exception] = {
    "taken": holdfast.NotAcquired("held by web-3:4711", name="x", holder="web-3:4711", expires_at=None),
    "lost": holdfast.LeaseLost("lease 'x' is lost: taken by web-3:4711"),
    "unknown": holdfast.OwnershipUnknown("no answer of web-3:4711"),
    "fenced": holdfast.FencedOut("lease 'x' has passed on to web-3:4711"),
    "down": holdfast.Unreachable("no server at web-3:4711"),
}


def fastapi(url: str) -> FastAPI:
    """Sessions that claim slots."""
    app, sessions = FastAPI(), dict[str, tuple[int, str]]()
    app.add_middleware(ProblemMiddleware, retry_after=7)

    @app.post("/sessions/{id}", status_code=201)
    async def start(id: str) -> None:
        async with holdfast.AsyncClient(url) as client:
            grant = await client.slots("tuner", 1, auto_renew=False).claim(owner=id)
            sessions[id] = (grant.slot, grant.detach())

    @app.post("/sessions/{id}/heartbeat")
    async def beat(id: str) -> None:
        async with holdfast.AsyncClient(url) as client:
            try:
                await (await client.slots("tuner", 1).adopt(*sessions[id])).renew()
            except holdfast.LeaseLost:
                raise Problem(410, f"session {id!r} has ended", state="EXPIRED") from None

    @app.get("/errors/{name}")
    async def fail(name: str) -> None:
        raise ERRORS[name]

    return app


def over(app: Any, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, **options), base_url="http://x")


async def test_a_session_that_has_ended_is_410_and_a_pool_that_is_full_503(either: str) -> None:
    async with over(fastapi(either)) as http, holdfast.AsyncClient(either) as client:
        assert (await http.post("/sessions/s-1")).status_code == 201
        full = await http.post("/sessions/s-2")
        assert (full.status_code, full.headers["retry-after"]) == (503, "7")
        assert full.headers["content-type"] == "application/problem+json"
        assert (await http.post("/sessions/s-1/heartbeat")).status_code == 200
        [lease] = await client.leases.list()
        await client.leases.force_release(lease.name, actor="jane", reason="test")
        gone = await http.post("/sessions/s-1/heartbeat")
        assert gone.json() == {
            "type": "about:blank", "title": "Gone", "status": 410, "detail": "session 's-1' has ended",
            "state": "EXPIRED",
        }  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
async def test_what_cannot_go_on_is_503_and_names_no_holder(sqlite_url: str, name: str) -> None:
    async with over(fastapi(sqlite_url)) as http:
        answer = await http.get(f"/errors/{name}")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert "4711" not in answer.text


@pytest.mark.parametrize("error", [ValueError("mine"), KeyError("mine")], ids=repr)
async def test_other_errors_pass(error: Exception) -> None:
    async def app(*_: Any) -> None:
        raise error

    async with over(ProblemMiddleware(app)) as http:
        with pytest.raises(type(error), match="mine"):
            await http.get("/")


async def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    app = FastAPI()
    app.add_middleware(ProblemMiddleware)

    @app.get("/")
    async def stream() -> StreamingResponse:
        async def parts() -> Any:
            yield b"first"
            raise Problem(410, "gone")

        return StreamingResponse(parts())

    async with over(app) as http:
        with pytest.raises(Problem):
            await http.get("/")


async def test_what_is_no_request_is_passed_on_with_its_channels() -> None:
    """As a websocket, or the lifespan: their errors are not ours."""
    passed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.extend((scope["type"], receive, send))
        raise Problem(410, "gone")

    async def channel(*_: Any) -> Any: ...

    receive: Callable[[], Awaitable[Any]] = channel
    send: Callable[[Any], Awaitable[None]] = channel
    with pytest.raises(Problem):
        await ProblemMiddleware(app)({"type": "websocket"}, receive, send)
    assert passed == ["websocket", receive, send]
