"""A way to a server that is slow, silent or cut: bytes go through this process, when they are let."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from holdfast.testing.portal import Portal


class Link:
    """``url`` leads to the database of ``url_behind``, every message ``delay`` seconds later, in either direction."""

    def __init__(self, url_behind: str, delay: float = 0.0) -> None:
        place = urlsplit(url_behind)
        self._host, self._port = place.hostname, place.port
        self._portal, self.delay = Portal(), delay
        self._answers = asyncio.Event()
        self._answers.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.connections = 0
        """How many have been made."""
        self.messages = 0
        """How often something was sent to the server."""
        self._server: asyncio.Server | None = None
        self.url = url_behind.replace(f":{place.port}/", f":{self._portal.call(self._listen)}/")

    def hold(self) -> None:
        """What the server says is kept back from now on; what it is told still gets there."""
        self._portal.call(self._answers.clear)

    def go_on(self) -> None:
        self._portal.call(self._answers.set)

    def cut(self) -> None:
        """End every connection; what was kept back is lost, and new ones are taken."""
        self._portal.call(self._abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(self._end)
        self._portal.close()

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, back}
        for source, target, count in ((reader, back, True), (there, writer, False)):
            task = asyncio.create_task(self._pump(source, target, to_server=count))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, to_server: bool) -> None:
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while data := await source.read(65536):
                self.messages += to_server
                if not to_server:
                    await self._answers.wait()
                loop.call_later(self.delay, self._write, target, data)
        loop.call_later(self.delay, self._close, target)

    def _write(self, target: asyncio.StreamWriter, data: bytes) -> None:
        if not target.is_closing():
            target.write(data)

    def _close(self, target: asyncio.StreamWriter) -> None:
        self._open.discard(target)
        target.close()

    def _abort(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        self._answers.set()
        self._abort()
        for task in list(self._pumps):
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
