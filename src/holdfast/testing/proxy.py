"""A TCP proxy in front of a server that cuts, stalls, drops and delays connections, without root.

    with Proxy(postgres.database()) as proxy, holdfast.Client(proxy.url) as client:
        proxy.stall()
        ...
        proxy.heal()

A fault affects the connections through this proxy only. Bytes that pass are never changed, reordered or repeated: a
connection that has lost bytes is reset before the proxy passes anything again.

For each connection two pairs of tasks run on the proxy's event loop: one task of a pair reads from one side into a
queue, the other writes from the queue to the other side when each message is due.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

from holdfast.testing.resource import Resource
from holdfast.testing.sync_facade import EventLoopThread

HOST = "127.0.0.1"
Direction = Literal["to_server", "to_client"]

_QUEUE_SIZE = 16
"""Messages held back before the proxy stops reading from the sender, as a full network would."""


class Proxy(Resource):
    """``url`` is the database of ``url_behind``; every message arrives ``delay`` seconds later, in both directions.

    Faults add up until ``heal()``. All methods may be called from any thread, and return when the fault is in effect.
    """

    def __init__(self, url_behind: str, *, delay: float = 0.0) -> None:
        self._address = _parse_address(url_behind)
        self._usual_delay = delay
        self._channels: dict[Direction, Channel] = {"to_server": Channel(delay), "to_client": Channel(delay)}
        self._is_half_open = self._resets_new = self._closed = False
        self._open: set[ProxiedConnection] = set()
        self.connections = 0
        """Connections accepted so far."""
        self._loop_thread = EventLoopThread()
        self._listener: asyncio.Server | None = None
        url, port = urlsplit(url_behind), self._loop_thread.call(self._listen)
        self.url = url._replace(netloc=f"{url.netloc.rpartition('@')[0]}@{HOST}:{port}".lstrip("@")).geturl()

    @property
    def messages(self) -> int:
        """How many times bytes from a client were read, each of up to 64 KiB."""
        return self._channels["to_server"].messages

    def target(self, url: str) -> None:
        """Connect new clients to the server of ``url``, as after a failover. ``cut()`` ends connections to the old."""
        self._address = _parse_address(url)

    def cut(self) -> None:
        """Reset every connection (RST to both sides). New ones are accepted."""
        self._loop_thread.call(self._cut)

    def reset(self) -> None:
        """Reset every connection (RST to both sides), and every new one at once."""
        self._loop_thread.call(self._reset)

    def stall(self, direction: Direction | None = None) -> None:
        """Hold back all bytes and the end of connections, in one direction or both. ``heal()`` delivers them.

        The sender sees no error: a message without an answer may have been received.
        """
        self._loop_thread.call(self._stall, direction)

    def drop(self, direction: Direction) -> None:
        """Discard all bytes sent in this direction. ``heal()`` resets the connections that have lost some."""
        self._loop_thread.call(self._drop, direction)

    def half_open(self) -> None:
        """Reset the server's side of every connection, and leave the client's open. New connections get no answer.

        So it is when a firewall has forgotten a connection, or when the machine behind an address is gone.
        """
        self._loop_thread.call(self._half_open)

    def delay(self, seconds: float) -> None:
        """Deliver everything sent from now on ``seconds`` later, in order. Raises ValueError for a negative number."""
        if seconds < 0:
            raise ValueError(f"seconds={seconds!r}: a delay cannot be negative")
        self._loop_thread.call(self._delay, seconds)

    def heal(self) -> None:
        """End every fault. Stalled bytes are delivered; connections that have lost bytes are reset."""
        self._loop_thread.call(self._heal)

    def close(self) -> None:
        """End every connection, and accept no more. Does nothing when it is closed already."""
        if not self._closed:
            self._closed = True
            self._loop_thread.call(self._end)
            self._loop_thread.close()

    def __repr__(self) -> str:
        return f"<Proxy to {self._address[0]}:{self._address[1]}>"

    # All methods below run on the event loop.

    async def _listen(self) -> int:
        self._listener = await asyncio.start_server(self._accept, HOST, 0)
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._resets_new or self._closed:
            _reset(writer)
            return
        self.connections += 1
        connection = ProxiedConnection(reader, writer, self._channels)
        self._open.add(connection)
        self._run(connection, connection.ignore_client() if self._is_half_open else self._forward(connection))

    def _run(self, connection: ProxiedConnection, coroutine: Coroutine[Any, Any, None]) -> None:
        connection.task = task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(lambda ended: None if ended.cancelled() else self._open.discard(connection))

    async def _forward(self, connection: ProxiedConnection) -> None:
        """Connect to the server, and forward until both sides have closed."""
        to_server = self._channels["to_server"]
        await to_server.wait_open()
        if to_server.drops:  # the request to connect is lost, too
            await connection.ignore_client()
        try:
            await connection.forward(*await asyncio.open_connection(*self._address))
        except OSError:  # no server listens
            connection.reset()

    def _cut(self) -> None:
        for connection in self._open:
            connection.reset()
        self._open.clear()

    def _reset(self) -> None:
        self._resets_new = True
        self._cut()

    def _stall(self, direction: Direction | None) -> None:
        for channel in self._channels.values() if direction is None else [self._channels[direction]]:
            channel.close()

    def _drop(self, direction: Direction) -> None:
        self._channels[direction].drops = True

    def _delay(self, seconds: float) -> None:
        for channel in self._channels.values():
            channel.delay = seconds

    def _half_open(self) -> None:
        self._is_half_open = True
        for connection in self._open:
            connection.reset_server()
            self._run(connection, connection.ignore_client(after=connection.task))

    def _heal(self) -> None:
        self._is_half_open = self._resets_new = False
        for connection in [connection for connection in self._open if connection.has_lost_bytes]:
            connection.reset()
            self._open.discard(connection)
        for channel in self._channels.values():
            channel.delay, channel.drops = self._usual_delay, False
            channel.open()

    async def _end(self) -> None:
        assert self._listener is not None
        for listening in self._listener.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        # A connection that was accepted just now reaches _accept some iterations of the loop later, and is reset there.
        # A server closed before that would leave it open.
        for _ in range(5):
            await asyncio.sleep(0)
        self._listener.close()
        tasks = [connection.task for connection in self._open if connection.task is not None]
        self._cut()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports are closed in the next iteration


class Channel:
    """The state of one direction, shared by all connections."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.drops = False
        self.messages = 0
        self._opened = asyncio.Event()
        self._opened.set()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()

    async def wait_open(self) -> None:
        while not self._opened.is_set():  # it may be closed again before this task runs
            await self._opened.wait()


class ProxiedConnection:
    """The two sides of one connection, and the task that forwards between them."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, channels: dict[Direction, Channel]
    ) -> None:
        self._reader, self._client, self._channels = reader, writer, channels
        self._server: asyncio.StreamWriter | None = None
        self.task: asyncio.Task[None] | None = None
        self.has_lost_bytes = False
        """Then nothing more may be delivered: the receiver could not make sense of it."""

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward both directions until both sides have closed. The arguments are the server's side."""
        self._server = writer
        async with asyncio.TaskGroup() as group:
            group.create_task(self._forward(self._reader, writer, self._channels["to_server"]))
            group.create_task(self._forward(reader, self._client, self._channels["to_client"]))

    async def ignore_client(self, after: asyncio.Task[None] | None = None) -> NoReturn:
        """Read what the client sends, and never answer, until this task is cancelled.

        ``after`` is a task that may still be reading from the client; it is awaited first.
        """
        self.has_lost_bytes = True
        if after is not None:
            await asyncio.wait([after])
        with suppress(OSError):
            while await self._reader.read(65536):
                pass
        await asyncio.Event().wait()
        raise AssertionError("the event is never set")

    def reset_server(self) -> None:
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        if self._server is not None:
            _reset(self._server)

    def reset(self) -> None:
        """RST to both sides."""
        self.reset_server()
        _reset(self._client)

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, channel: Channel) -> None:
        """Two tasks with a queue: a delayed message neither blocks reading the next nor is overtaken by it."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE_SIZE)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(source, queue, channel))
            group.create_task(self._deliver(queue, target, channel))

    async def _receive(
        self, source: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]], channel: Channel
    ) -> None:
        clock = asyncio.get_running_loop().time
        data = b"-"
        while data:
            try:
                data = await source.read(65536)
            except OSError:  # reset by the sender: for the receiver the same as its end
                data = b""
            channel.messages += bool(data)
            await queue.put((clock() + channel.delay, data))

    async def _deliver(
        self, queue: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter, channel: Channel
    ) -> None:
        clock = asyncio.get_running_loop().time
        data, dropped = b"-", False
        while data:
            due, data = await queue.get()
            if (early := due - clock()) > 0:
                await asyncio.sleep(early)
            await channel.wait_open()
            if dropped := dropped or channel.drops:
                self.has_lost_bytes = True
                continue
            with suppress(OSError):
                if not target.is_closing():
                    target.write(data)
                    await target.drain()
        if dropped:  # the end of the connection is lost, too: the receiver waits until heal()
            await asyncio.Event().wait()
        target.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST: bytes that the peer has not read yet are lost."""
    peer: socket.socket | None = writer.get_extra_info("socket")
    with suppress(OSError):
        if peer is not None and peer.fileno() >= 0:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _parse_address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or "," in host:
        raise ValueError(
            "a proxy connects to one server: expected a URL with one host, e.g. postgresql://host:5432/name"
        )
    return host, port or 5432
