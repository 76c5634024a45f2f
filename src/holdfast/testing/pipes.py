"""The inside of a proxy: one client, the server it is led to, and what may pass between them."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Literal, NoReturn

Direction = Literal["to_server", "to_client"]

_ROOM = 16
"""Messages kept back before nothing more is taken from the sender, as a full network would."""


class Way:
    """What becomes of bytes in one direction, of all connections."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.drops = False
        self.messages = 0
        self._open = asyncio.Event()
        self._open.set()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    async def passable(self) -> None:
        while not self._open.is_set():  # it may have been closed again before we came to run
            await self._open.wait()


class Connection:
    """``spoilt`` once anything of it was lost: what comes after would make no sense to whoever receives it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ways: dict[Direction, Way]) -> None:
        self._reader, self._client, self._ways = reader, writer, ways
        self._server: asyncio.StreamWriter | None = None
        self.task: asyncio.Task[None] | None = None
        self.spoilt = False

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what both sides say, until both have ended."""
        self._server = writer
        async with asyncio.TaskGroup() as both:
            both.create_task(self._pass(self._reader, writer, self._ways["to_server"]))
            both.create_task(self._pass(reader, self._client, self._ways["to_client"]))

    async def swallow(self, after: asyncio.Task[None] | None = None) -> NoReturn:
        """Take what the client says, and never say anything, until it is ended from outside.

        ``after`` that task has let go of the client, whom only one can listen to."""
        self.spoilt = True
        if after is not None:
            await asyncio.wait([after])
        with suppress(OSError):
            while await self._reader.read(65536):
                pass
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def lose_server(self) -> None:
        self._stop()
        if self._server is not None:
            reset(self._server)

    def end(self) -> None:
        """RST to both sides."""
        self.lose_server()
        reset(self._client)

    def _stop(self) -> None:
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, way: Way) -> None:
        """One task takes and one gives, so that what is under way neither holds up what follows nor is overtaken."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_ROOM)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._take(source, under_way, way))
            both.create_task(self._give(under_way, target, way))

    async def _take(
        self, source: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]], way: Way
    ) -> None:
        clock = asyncio.get_running_loop().time
        data = b"-"
        while data:
            try:
                data = await source.read(65536)
            except OSError:  # reset by its sender, which the other side learns as any other end
                data = b""
            way.messages += bool(data)
            await under_way.put((clock() + way.delay, data))

    async def _give(
        self, under_way: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter, way: Way
    ) -> None:
        clock = asyncio.get_running_loop().time
        data, lost = b"-", False
        while data:
            due, data = await under_way.get()
            if (early := due - clock()) > 0:
                await asyncio.sleep(early)
            await way.passable()
            if lost := lost or way.drops:
                self.spoilt = True
                continue
            with suppress(OSError):
                if not target.is_closing():  # gone, which its own direction tells
                    target.write(data)
                    await target.drain()
        if lost:  # the end got lost as well: the other side waits until the connection is ended
            await asyncio.Event().wait()
        target.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST: nothing that was sent and not read yet survives."""
    ours: socket.socket | None = writer.get_extra_info("socket")
    with suppress(OSError):
        if ours is not None and ours.fileno() >= 0:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
