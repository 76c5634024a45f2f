"""A way to a server that can be cut, silenced, slowed down and led elsewhere, by an ordinary process without root.

    with Proxy(postgres.database()) as proxy, holdfast.Client(proxy.url) as client:
        proxy.stall()
        ...
        proxy.heal()

Every client is given connections of its own, so what is done to the way is done to nobody else. The bytes that do pass
are never changed, reordered or repeated: a connection that lost some is ended before the way is whole again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from holdfast.testing.closing import Closing
from holdfast.testing.pipes import Connection, Direction, Way, reset
from holdfast.testing.portal import Portal

HOST = "127.0.0.1"


class Proxy(Closing):
    """``url`` leads to the database of ``url_behind``, every message ``delay`` seconds later, in either direction.

    Faults add up until ``heal()``. All methods may be called from any thread, and return when it is done.
    """

    def __init__(self, url_behind: str, *, delay: float = 0.0) -> None:
        self._place = _place(url_behind)
        self._usual_delay = delay
        self._ways: dict[Direction, Way] = {"to_server": Way(delay), "to_client": Way(delay)}
        self._lost = self._refuses = self._closed = False
        self._open: set[Connection] = set()
        self.connections = 0
        """How many have been taken."""
        self._portal = Portal()
        self._listener: asyncio.Server | None = None
        place, port = urlsplit(url_behind), self._portal.call(self._listen)
        self.url = place._replace(netloc=f"{place.netloc.rpartition('@')[0]}@{HOST}:{port}".lstrip("@")).geturl()

    @property
    def messages(self) -> int:
        """How often something came from a client on its way to the server."""
        return self._ways["to_server"].messages

    def target(self, url: str) -> None:
        """Lead new connections to the server of ``url``, as after a failover; ``cut()`` ends those to the old one."""
        self._place = _place(url)

    def cut(self) -> None:
        """End every connection at once, for both sides (RST). New ones are taken."""
        self._portal.call(self._cut)

    def reset(self) -> None:
        """End every connection at once, for both sides (RST), and so each new one."""
        self._portal.call(self._reset)

    def stall(self, direction: Direction | None = None) -> None:
        """Nothing passes, in one direction or in both, not even the news that somebody has gone. Healed, it all does.

        Whoever sends is not told: a message that was never answered may have been heard.
        """
        self._portal.call(self._stall, direction)

    def drop(self, direction: Direction) -> None:
        """What is sent in this direction gets lost. Healed, the connections that lost something are ended."""
        self._portal.call(self._drop, direction)

    def half_open(self) -> None:
        """The server's side of every connection is ended, and no client is told; new ones are taken and not answered.

        As after a firewall forgot a connection, or when the machine behind an address is gone.
        """
        self._portal.call(self._lose)

    def delay(self, seconds: float) -> None:
        """Everything sent from now on arrives ``seconds`` later, in its order."""
        if seconds < 0:
            raise ValueError(f"seconds={seconds!r}: the proxy cannot deliver before it was sent")
        self._portal.call(self._slow, seconds)

    def heal(self) -> None:
        """End every fault. What was stalled arrives; connections that lost anything are cut."""
        self._portal.call(self._heal)

    def close(self) -> None:
        """End every connection, and take no more. Harmless when closed."""
        if not self._closed:
            self._closed = True
            self._portal.call(self._end)
            self._portal.close()

    def __repr__(self) -> str:
        return f"<Proxy to {self._place[0]}:{self._place[1]}>"

    async def _listen(self) -> int:
        self._listener = await asyncio.start_server(self._arrive, HOST, 0)
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses or self._closed:
            reset(writer)
            return
        self.connections += 1
        connection = Connection(reader, writer, self._ways)
        self._open.add(connection)
        self._run(connection, connection.swallow() if self._lost else self._lead(connection))

    def _run(self, connection: Connection, what: Coroutine[Any, Any, None]) -> None:
        connection.task = task = asyncio.get_running_loop().create_task(what)
        task.add_done_callback(lambda done: None if done.cancelled() else self._open.discard(connection))

    async def _lead(self, connection: Connection) -> None:
        """To the server and back, until both sides have said all they had to say."""
        to_server = self._ways["to_server"]
        await to_server.passable()
        if to_server.drops:  # the request to connect gets lost, too
            await connection.swallow()
        try:
            await connection.join(*await asyncio.open_connection(*self._place))
        except OSError:  # nobody is there
            connection.end()

    def _cut(self) -> None:
        for connection in self._open:
            connection.end()
        self._open.clear()

    def _reset(self) -> None:
        self._refuses = True
        self._cut()

    def _stall(self, direction: Direction | None) -> None:
        for way in self._ways.values() if direction is None else [self._ways[direction]]:
            way.close()

    def _drop(self, direction: Direction) -> None:
        self._ways[direction].drops = True

    def _slow(self, seconds: float) -> None:
        for way in self._ways.values():
            way.delay = seconds

    def _lose(self) -> None:
        self._lost = True
        for connection in self._open:
            connection.lose_server()
            self._run(connection, connection.swallow(after=connection.task))

    def _heal(self) -> None:
        self._lost = self._refuses = False
        for connection in [each for each in self._open if each.spoilt]:
            connection.end()
            self._open.discard(connection)
        for way in self._ways.values():
            way.delay, way.drops = self._usual_delay, False
            way.open()

    async def _end(self) -> None:
        assert self._listener is not None
        for listening in self._listener.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(5):  # whoever is just being let in takes the loop some rounds to arrive, and is sent away then:
            await asyncio.sleep(0)  # a server that is closed meanwhile would forget about it
        self._listener.close()
        tasks = [connection.task for connection in self._open if connection.task is not None]
        self._cut()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what was aborted is closed in the next round of the loop


def _place(url: str) -> tuple[str, int]:
    try:
        place = urlsplit(url)
        host, port = place.hostname, place.port
    except ValueError:
        host, port = None, None
    if host is None or "," in host:
        raise ValueError("a proxy leads to one server: expected a URL with one host, e.g. postgresql://host:5432/name")
    return host, port or 5432
