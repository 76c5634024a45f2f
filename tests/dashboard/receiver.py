"""A receiver of webhooks on loopback: it records what it gets, and answers as a test says."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import Any

SECRET = "a-secret-of-sixteen-and-more"
Answer = bytes | Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]
OK = b"HTTP/1.1 204 No Content\r\n\r\n"
FAILURE = b"HTTP/1.1 500 Internal Server Error\r\n\r\n"


class Receiver:
    """``answers``: those of the first messages, in turn; all others get ``otherwise``."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.answers: list[Answer] = []
        self.otherwise: Answer = OK
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, subject: str) -> list[str]:
        """The events of a subject."""
        return [message["event"] for message in self.messages if message["subject"] == subject]

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            signed = f"{headers['holdfast-timestamp']}.".encode() + body
            signature = hmac.new(SECRET.encode(), signed, sha256).hexdigest()
            assert headers["holdfast-signature"] == f"sha256={signature}"
            self.messages.append(json.loads(body))
            self.paths.append(request)
            answer = self.answers.pop(0) if self.answers else self.otherwise
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(writer)


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    receiver.url = f"http://{host}:{port}/hooks/a-path-that-is-secret?x=1"
    try:
        yield receiver
    finally:
        server.close()
        await receiver.close()
