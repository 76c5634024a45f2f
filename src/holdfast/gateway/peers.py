"""Requests that one replica sends to another, which has the connection that they need.

    client ─→ replica A: no connection ─→ Peers.find: is B present? ─→ Peers.send: with B's key ─→ replica B

Each replica stores its address and a random key with the lease on its name. The database returns both only to sessions
of the role that stored them, and only while that lease is held. So no request goes to an address that another role
wrote, and its key proves that the sender reads the database as a replica does.

A change must keep this:

- Only ``find`` gives an address to send to, never the holder of a lease, which any role may choose.
- A request that came from a replica is never sent on: there is no loop.
- Requests at a time, the time to connect and to begin an answer, and the bytes of a head and of a line are bounded.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11

import holdfast
from holdfast.gateway.logs import WARNING, log
from holdfast.problem_json import Problem

PATHS = re.compile(r"/sandboxes/[^/]+/(messages|streams)")
"""What a replica accepts from another one."""
MAX_REQUESTS = 200
"""Requests to other replicas at a time."""
LINE_BYTES = 2 << 20
"""Of one line of an answer: a message of a supervisor has half of it at most."""
_HEAD_BYTES, _READ_BYTES = 32768, 65536
_CONNECT_WITHIN = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_RETRY = {"Retry-After": "1"}
_FAILURES = (OSError, EOFError, h11.ProtocolError)


class Peer(NamedTuple):
    """Another replica that is present."""

    replica: str
    address: str
    key: str


class PeerAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]

    async def read(self) -> bytes:
        """The whole body. Raises Problem 502 when it is cut, or longer than LINE_BYTES."""
        body = bytearray()
        async for piece in self.pieces:
            body += piece
            if len(body) > LINE_BYTES:
                raise Problem(502, f"the answer of the replica has more than {LINE_BYTES} bytes")
        return bytes(body)

    async def lines(self) -> AsyncIterator[bytes]:
        """The body in whole lines. An answer that is cut ends with a line that has ``error``."""
        rest = b""
        try:
            async for piece in self.pieces:
                whole, newline, rest = (rest + piece).rpartition(b"\n")
                if newline:
                    yield whole + newline
                if len(rest) > LINE_BYTES:
                    raise Problem(502, f"a line of its answer has more than {LINE_BYTES} bytes")
        except Problem as problem:
            yield json.dumps({"error": problem.detail}).encode() + b"\n"


class Peers:
    """``key``: what other replicas prove themselves with to this one."""

    def __init__(self, client: holdfast.AsyncClient, address: str, presence: str, *, single: bool) -> None:
        self.key = secrets.token_hex(32)
        self._client, self._address, self._presence, self._single = client, address, presence, single
        self._requests = 0

    def accepts(self, key: str, method: str, path: str) -> bool:
        """Whether a request with this key comes from a replica, and is one that replicas send."""
        is_ours = hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self.key.encode())
        return is_ours and method == "POST" and PATHS.fullmatch(path) is not None

    async def announce(self, grant: Any) -> None:
        """Store address and key with the lease on this replica's name. Retries until that is done or refused."""
        pause = _FIRST_PAUSE
        while not self._single:
            try:
                await self._client._announce_peer(grant, self._address, self.key)
                return
            except holdfast.EngineError as error:
                log.event("peer.unannounced", WARNING, again_in=pause, why=str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def find(self, replica: str) -> Peer:
        """The replica of this name. Raises Problem 503 unless this role has stored it, and it is present."""
        stored = None if self._single else await self._client._find_peer(self._presence + replica)
        if stored is None:
            detail = f"replica {replica!r} is not present in the database under the role of this replica"
            raise Problem(503, f"{detail}: nothing is sent to it", headers=_RETRY)
        return Peer(replica, *stored)

    @asynccontextmanager
    async def send(
        self, peer: Peer, path: str, body: bytes, headers: Mapping[str, str], within: float
    ) -> AsyncIterator[PeerAnswer]:
        """POST ``body`` to a replica. Raises Problem when it cannot be reached, or does not answer in time."""
        if self._requests >= MAX_REQUESTS:
            raise Problem(503, f"{MAX_REQUESTS} requests are being sent to other replicas", headers=_RETRY)
        self._requests += 1
        try:
            reader, writer = await _connect(peer)
            try:
                yield await _PeerRequest(peer, reader, writer).send(path, body, headers, within)
            finally:
                writer.close()
        finally:
            self._requests -= 1


class _PeerRequest:
    """One request on a connection of its own."""

    def __init__(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._peer, self._reader, self._writer = peer, reader, writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)

    async def send(self, path: str, body: bytes, headers: Mapping[str, str], within: float) -> PeerAnswer:
        peer = self._peer
        fields = {
            "Host": urlsplit(peer.address).netloc, "Authorization": f"Peer {peer.key}", "Connection": "close",
            "Content-Type": "application/json", "Content-Length": str(len(body)), **headers,
        }  # fmt: skip
        request = h11.Request(method="POST", target=path, headers=[*fields.items()])
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")
        try:
            async with asyncio.timeout(within):
                head = await self._next_event()
        except TimeoutError:
            raise Problem(504, f"{self._where()} has not answered in time; it may have received the message") from None
        if not isinstance(head, h11.Response):
            raise self._cut("it sent no answer")
        answered = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        return PeerAnswer(head.status_code, answered, self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next_event(), h11.Data):
            yield bytes(event.data)

    async def _next_event(self) -> Any:
        """Raises Problem 502 when the connection ends before the answer."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ_BYTES))
        except _FAILURES as error:
            raise self._cut(error) from None
        return event

    def _cut(self, reason: object) -> Problem:
        return Problem(502, f"{self._where()} has gone; it may have received the message: {reason}")

    def _where(self) -> str:
        return f"replica {self._peer.replica!r}, which has the connection,"


async def _connect(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(peer.address)
    is_https = url.scheme == "https"
    try:
        async with asyncio.timeout(_CONNECT_WITHIN):
            reader, writer = await asyncio.open_connection(
                url.hostname, url.port or (443 if is_https else 80), ssl=is_https or None
            )
    except (OSError, ValueError) as error:
        detail = f"replica {peer.replica!r}, which has the connection, cannot be reached at {peer.address}"
        raise Problem(503, f"{detail}; nothing was sent: {str(error) or 'no answer'}", headers=_RETRY) from None
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that has lost its power sends nothing
    for name, value in _KEEPALIVE:
        with suppress(AttributeError):  # pragma: no cover - macOS
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return reader, writer
