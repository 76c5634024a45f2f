"""A connection to a unix socket or to a host and port; its blocking twin is `dial`."""

from __future__ import annotations

import asyncio

_CHUNK = 65536


class AsyncDriverConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes, timeout: float) -> None:
        self._writer.write(data)
        async with asyncio.timeout(timeout):
            await self._writer.drain()

    async def receive(self, timeout: float) -> bytes:
        """The next bytes; empty at the end. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            return await self._reader.read(_CHUNK)

    def close(self) -> None:
        self._writer.close()


async def connect(host: str, port: int | None, timeout: float) -> AsyncDriverConnection:
    async with asyncio.timeout(timeout):
        if port is None:
            return AsyncDriverConnection(*await asyncio.open_unix_connection(host))
        return AsyncDriverConnection(*await asyncio.open_connection(host, port))
