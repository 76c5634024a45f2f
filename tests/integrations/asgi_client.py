"""A client of ASGI applications without a server, one message at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import holdfast
from holdfast.integrations.asgi import IdempotencyMiddleware

App = Callable[..., Awaitable[None]]
JSON = (b"content-type", b"application/json")


class Reply:
    """The messages of an answer."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.arrived = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        self.arrived.set()

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(each.get("body", b"") for each in self.messages[1:])

    @property
    def kind(self) -> str:
        """The kind of a problem. Asserts that the problem is complete."""
        problem = json.loads(self.body)
        assert self.headers["content-type"] == "application/problem+json"
        assert problem["status"] == self.status
        assert problem["title"]
        assert problem["detail"]
        kind: str = problem["type"].removeprefix("urn:holdfast:idempotency:")
        return kind

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


def scope_of(
    key: str | None = '"k"', *, method: str = "POST", path: str = "/charges", query: bytes = b"", user: str = "ann",
    headers: Sequence[tuple[bytes, bytes]] = (JSON,), **more: Any,
) -> dict[str, Any]:  # fmt: skip
    keys = [] if key is None else [(b"idempotency-key", key.encode("latin-1"))]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "query_string": query, "headers": [*headers, *keys], "user": user, **more,
    }  # fmt: skip


class Client:
    """One request. Its body may come in pieces; it leaves when it is told to."""

    def __init__(self, body: bytes | Sequence[bytes] = b"{}", **asked: Any) -> None:
        pieces = [body] if isinstance(body, bytes) else list(body)
        self.scope, self.reply = scope_of(**asked), Reply()
        self._pieces = [
            {"type": "http.request", "body": piece, "more_body": place < len(pieces)}
            for place, piece in enumerate(pieces, 1)
        ]
        self._left = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> dict[str, Any]:
        if self._pieces:
            return self._pieces.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def ask(self, app: App) -> Reply:
        await app(self.scope, self.receive, self.reply.send)
        return self.reply


async def ask(app: App, body: bytes | Sequence[bytes] = b"{}", **asked: Any) -> Reply:
    return await Client(body, **asked).ask(app)


class Shop:
    """An application that counts its effects, and answers as it is told to."""

    def __init__(self, body: bytes = b"done", status: int = 201, headers: Mapping[str, str] | None = None) -> None:
        self.effects: list[bytes] = []
        self.body, self.status, self.headers = body, status, dict(headers or {"content-type": "text/plain"})
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.effects.append(message["body"])
        self.entered.set()
        await self.go_on.wait()
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def guarded(app: App, client: holdfast.AsyncClient, **options: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, client, **{"principal": lambda scope: scope["user"], **options})
