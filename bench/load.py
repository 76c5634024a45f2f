"""Clients that ask again as soon as they are answered: HTTP/1.1 over connections that stay open, and nothing more.

A process of its own, so that nothing else waits for it or keeps it waiting, and plain streams, because a library for
HTTP would cost more than what is asked. A job a line on stdin, what came of it a line on stdout.
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
"""Answers of each client, on however slow a machine: quantiles need as many."""
WITHIN = 60.0
"""Seconds that one answer may take."""


class Client:
    """Of one replica, with one connection; it asks for one thing, over and over."""

    def __init__(self, address: str, method: str, path: str, body: Any = None) -> None:
        self._host, self._port = urlsplit(address).hostname or "", urlsplit(address).port or 80
        self._body = b"" if body is None else json.dumps(body).encode()
        self._head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
        if self._body:
            self._head += f"Content-Type: application/json\r\nContent-Length: {len(self._body)}\r\n"
        self._conditional, self._tag = method == "PATCH", "*"
        self.taken: list[float] = []
        self.parts: list[dict[str, float]] = []
        """Where the server says that the time went, in seconds."""

    async def run(self, seconds: float, most: int, begin: asyncio.Barrier) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        try:
            for _ in range(_WARM):
                await self._ask()
            self.taken.clear()
            self.parts.clear()
            await begin.wait()
            end = perf_counter() + seconds
            while len(self.taken) < _LEAST or (perf_counter() < end and len(self.taken) < most):
                await self._ask()
        finally:
            self._writer.close()

    async def _ask(self) -> None:
        """A record that is changed is named as the last answer left it: If-Match is that answer's ETag."""
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


async def run(clients: list[list[Any]], seconds: float, most: int) -> dict[str, Any]:
    """All at once: ``seconds`` long, or until each has asked ``most`` times. RuntimeError at the first refusal."""
    made, begin = [Client(*each) for each in clients], asyncio.Barrier(len(clients) + 1)
    async with asyncio.timeout(seconds + WITHIN), asyncio.TaskGroup() as group:
        for each in made:
            group.create_task(each.run(seconds, most, begin))
        await begin.wait()
        began = perf_counter()
    lasted = perf_counter() - began
    taken = [one for each in made for one in each.taken]
    return {"seconds": lasted, "taken": taken, "parts": [one for each in made for one in each.parts]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(**json.loads(line)))), flush=True)
