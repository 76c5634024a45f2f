"""Clients that send the next request as soon as they have the response: HTTP/1.1 over persistent connections.

A separate process, so that it neither blocks nor is blocked, and plain streams, because an HTTP library would take
longer than the request. Reads one job per line from stdin, writes one result per line to stdout.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

_PART = re.compile(r"(\w+);dur=([\d.]+)")
_WARM = 5
_LEAST = 2
"""Responses per client, even on a slow machine: quantiles need two."""
WITHIN = 60.0
"""Timeout of one response, in seconds."""


class Client:
    """A client of one replica, with one connection, that repeats one request."""

    def __init__(self, address: str, method: str, path: str, body: Any = None) -> None:
        self._host, self._port = urlsplit(address).hostname or "", urlsplit(address).port or 80
        self._body = b"" if body is None else json.dumps(body).encode()
        self._head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
        if self._body:
            self._head += f"Content-Type: application/json\r\nContent-Length: {len(self._body)}\r\n"
        self._conditional, self._tag = method == "PATCH", "*"
        self.taken: list[float] = []
        self.parts: list[dict[str, float]] = []
        """The server's own timing of each request (Server-Timing), in seconds."""

    async def run(self, seconds: float, limit: int, warm: asyncio.Semaphore, begin: asyncio.Event) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        try:
            for _ in range(_WARM):
                await self._ask()
            warm.release()
            while not begin.is_set():  # a server ends a connection that is idle for some seconds
                await self._ask()
            self.taken.clear()
            self.parts.clear()
            end = perf_counter() + seconds
            while len(self.taken) < _LEAST or (perf_counter() < end and len(self.taken) < limit):
                await self._ask()
        finally:
            self._writer.close()

    async def _ask(self) -> None:
        """Send the request and read the response. A PATCH sends the ETag of the last response as If-Match."""
        head = self._head + (f"If-Match: {self._tag}\r\n" if self._conditional else "")
        began = perf_counter()
        self._writer.write(head.encode() + b"\r\n" + self._body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        body = await self._reader.readexactly(int(headers["content-length"]))
        self.taken.append(perf_counter() - began)
        if not lines[0].startswith("HTTP/1.1 2"):
            raise RuntimeError(f"{lines[0]}: {body.decode()}")
        self._tag = headers.get("etag", self._tag)
        if timing := headers.get("server-timing"):
            self.parts.append({name: float(took) / 1000 for name, took in _PART.findall(timing)})


async def run(clients: list[list[Any]], seconds: float, limit: int) -> dict[str, Any]:
    """Run all clients for ``seconds``, or until each has sent ``most`` requests. RuntimeError at the first refusal."""
    workers, warm, begin = [Client(*each) for each in clients], asyncio.Semaphore(0), asyncio.Event()
    async with asyncio.timeout(seconds + WITHIN), asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker.run(seconds, limit, warm, begin))
        for _ in workers:
            await warm.acquire()
        begin.set()
        began = perf_counter()
    lasted = perf_counter() - began
    taken = [one for each in workers for one in each.taken]
    return {"seconds": lasted, "taken": taken, "parts": [one for each in workers for one in each.parts]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(**json.loads(line)))), flush=True)
