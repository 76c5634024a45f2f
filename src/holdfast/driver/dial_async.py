"""A connection to a socket of the machine or of the network; its blocking twin is `dial`."""

from __future__ import annotations

import asyncio

_AT_ONCE = 65536


class Line:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes, timeout: float) -> None:
        self._writer.write(data)
        async with asyncio.timeout(timeout):
            await self._writer.drain()

    async def receive(self, timeout: float) -> bytes:
        """What has come, nothing at the end; TimeoutError when nothing comes."""
        async with asyncio.timeout(timeout):
            return await self._reader.read(_AT_ONCE)

    def close(self) -> None:
        self._writer.close()


async def dial(host: str, port: int | None, timeout: float) -> Line:
    async with asyncio.timeout(timeout):
        if port is None:
            return Line(*await asyncio.open_unix_connection(host))
        return Line(*await asyncio.open_connection(host, port))
