"""Supervisors: programs in sandboxes that keep a WebSocket connection to a replica, which sends them messages.

A lease says which replica has the connection; it expires with the replica. A request that needs the connection and
reaches another replica is sent on to that one, or redirected to it: see ``peers``.

Bounded: the requests at a time of each connection, and what its supervisor may send that no client has read yet.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import holdfast
from holdfast.gateway.admission_rules import json_body_error
from holdfast.gateway.context import CurrentGateway, Gateway
from holdfast.gateway.problem import documented
from holdfast.gateway.sandboxes import models, records
from holdfast.gateway.sandboxes.routes import get_record, until_stopped
from holdfast.problem_json import Problem

router = APIRouter(prefix="/sandboxes", tags=["sandboxes"])

MAX_REQUESTS = 32
"""Requests at a time to one supervisor."""
WINDOW = 1 << 18
"""Bytes of one stream that are kept until its client reads them. A supervisor that sends more is not read meanwhile."""
STALL = 10.0
"""Seconds until a stream whose client reads nothing is cut: it holds up the other requests of its supervisor."""
_TTL = 15.0
_PEER_MARGIN, _CANCEL_WITHIN = 5.0, 1.0
_LINES = "application/x-ndjson"
_REDIRECT: dict[int | str, Any] = {
    307: {
        "description": "With `redirect`: another replica has the connection. Repeat the request there, with the "
        "Authorization header."
    }
}
_STREAM: dict[int | str, Any] = {
    200: {
        "content": {_LINES: {}},
        "description": "A line for each part, `{\"part\": …}`. The last line has `reply`, or `error`; a stream without "
        "it was cut.",
    }
}  # fmt: skip
_RETRY = {"Retry-After": "1"}
_CLOSE_REPLACED, _CLOSE_RESTART, _CLOSE_POLICY, _CLOSE_INVALID, _CLOSE_RETRY = 4001, 1012, 1008, 1007, 1013
_GONE = (ConnectionError, RuntimeError, WebSocketDisconnect)


class SupervisorAnswer:
    """What a supervisor has sent for one request and was not read yet: WINDOW bytes, and one message more."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[tuple[Mapping[str, Any] | Exception, int]] = asyncio.Queue()
        self._unread = 0
        self._room = asyncio.Event()

    async def put(self, part: Mapping[str, Any], size: int) -> None:
        """Waits until there is room."""
        while self._unread > WINDOW:
            self._room.clear()
            await self._room.wait()
        self._unread += size
        self._parts.put_nowait((part, size))

    def fail(self, error: Exception) -> None:
        """Let ``get`` raise ``error`` after the parts that came before."""
        self._parts.put_nowait((error, 0))

    async def get(self) -> Mapping[str, Any]:
        part, size = await self._parts.get()
        self._unread -= size
        self._room.set()
        if isinstance(part, Exception):
            raise part
        return part


class SupervisorConnection:
    """Sends ``{"id": 1, "message": …}`` and receives ``{"id": 1, "reply": …}``, before that any number of
    ``{"id": 1, "part": …}``. Sends ``{"id": 1, "cancel": true}`` when the client of a stream has gone."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, SupervisorAnswer] = {}
        self.close_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Done when the replica closes the connection."""

    async def request(self, message: Any, timeout: float) -> Any:
        """Send ``message`` and return the reply. Raises TimeoutError, or ConnectionError when the supervisor left."""
        async with asyncio.timeout(timeout):
            with self._register() as (id, answer):
                await self._send({"id": id, "message": message})
                while "reply" not in (part := await answer.get()):
                    pass
                return part["reply"]

    async def stream(self, message: Any) -> AsyncGenerator[Mapping[str, Any], None]:
        """Send ``message`` and yield each ``{"part": …}``, and at the end ``{"reply": …}``."""
        with self._register() as (id, answer):
            await self._send({"id": id, "message": message})
            try:
                while "reply" not in (part := await answer.get()):
                    yield part
            except _GONE:
                raise
            except BaseException:  # the client has gone, or the timeout is over
                with suppress(*_GONE, TimeoutError):
                    async with asyncio.timeout(_CANCEL_WITHIN):
                        await self._send({"id": id, "cancel": True})
                raise
            yield part

    async def serve(self) -> None:
        """Receive replies until the supervisor disconnects or ``close`` is called."""
        reading = asyncio.create_task(self._read())
        either: set[asyncio.Future[Any]] = {reading, self.close_code}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        for answer in self._answers.values():
            answer.fail(ConnectionError("its supervisor has gone before it answered"))
        if self.close_code.done():
            await self._socket.close(self.close_code.result())

    def close(self, code: int) -> None:
        if not self.close_code.done():
            self.close_code.set_result(code)

    @contextmanager
    def _register(self) -> Iterator[tuple[int, SupervisorAnswer]]:
        if len(self._answers) >= MAX_REQUESTS:
            raise Problem(503, f"this supervisor is answering {MAX_REQUESTS} requests already", headers=_RETRY)
        id = next(self._ids)
        self._answers[id] = SupervisorAnswer()
        try:
            yield id, self._answers[id]
        finally:
            self._answers.pop(id, None)

    async def _send(self, message: Mapping[str, Any]) -> None:
        await self._socket.send_text(json.dumps(message, allow_nan=False))

    async def _read(self) -> None:
        try:
            while True:
                text = await self._socket.receive_text()
                if reason := json_body_error(text.encode()):
                    raise ValueError(reason)
                message = json.loads(text, parse_constant=_refuse_constant)
                kind = "part" if "part" in message else "reply"
                part, answer = {kind: message[kind]}, self._answers.get(message["id"])
                if answer is not None:
                    await self._deliver(message["id"], answer, part, len(text))
        except (ValueError, KeyError, TypeError):
            self.close(_CLOSE_INVALID)
        except (WebSocketDisconnect, RuntimeError):
            return

    async def _deliver(self, id: int, answer: SupervisorAnswer, part: Mapping[str, Any], size: int) -> None:
        try:
            async with asyncio.timeout(STALL):
                await answer.put(part, size)
        except TimeoutError:
            self._answers.pop(id, None)
            answer.fail(ConnectionError(f"its client has read nothing for {STALL:g} s, so the stream was cut"))


class _Stream(StreamingResponse):
    """Closes the source of its lines in any case, also when the client has gone."""

    def __init__(self, source: AsyncExitStack, lines: AsyncIterator[bytes]) -> None:
        super().__init__(lines, media_type=_LINES)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._source:
            await super().__call__(scope, receive, send)


@router.websocket("/{id}/supervisor")
async def connect(gateway: CurrentGateway, socket: WebSocket, id: models.Id) -> None:
    """Accept a supervisor with the token of its sandbox. A new connection replaces the one before."""
    scheme, _, token = socket.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not records.TOKEN.fullmatch(token.strip()):
        return await socket.close(_CLOSE_POLICY)
    async with gateway.token_checks:
        record = await gateway.client.objects.get(records.TYPE, id)
    if record is None or not records.accepts_token(record.payload, token.strip()):
        return await socket.close(_CLOSE_POLICY)
    if gateway.handshakes.take(id) is not None:
        return await socket.close(_CLOSE_RETRY)
    connection, connections = SupervisorConnection(socket), gateway.supervisors
    try:
        grant = await _acquire(gateway, id, connection)
    except holdfast.HoldfastError:
        return await socket.close(_CLOSE_RETRY)
    try:
        await socket.accept()
        if (before := connections.get(id)) is not None:
            before.close(_CLOSE_REPLACED)
        connections[id] = connection
        await _record_fence(gateway, id, grant.fence)
        stopping = asyncio.create_task(_close_on_stop(gateway, connection))
        try:
            await connection.serve()
        finally:
            stopping.cancel()
    finally:
        if connections.get(id) is connection:
            del connections[id]
        await grant.release()
        await _record_fence(gateway, id, None)
    return None


@router.get("/{id}/supervisor", response_model=models.SupervisorLocation, responses=documented(404, 409, 422, 503))
async def locate(gateway: CurrentGateway, id: models.Id) -> Any:
    """Which replica has the connection."""
    await get_record(gateway, id)
    lease = await _get_lease(gateway, id)
    is_here = lease.holder == gateway.replica
    address = gateway.address if is_here else (await gateway.peers.find(lease.holder)).address
    return {"address": address, "replica": lease.holder, "fence": lease.fence, "since": lease.acquired_at}


@router.post(
    "/{id}/messages", response_model=models.SupervisorReply,
    responses={**documented(404, 409, 422, 502, 503, 504), **_REDIRECT},
)  # fmt: skip
async def send(gateway: CurrentGateway, id: models.Id, body: models.SupervisorMessage, request: Request) -> Any:
    """Send a message to the supervisor, and return its reply."""
    await get_record(gateway, id)
    connection = gateway.supervisors.get(id)
    if connection is None:
        return await _send_on(gateway, id, body, request)
    with _problems(id, body.timeout):
        return {"reply": await connection.request(body.message, body.timeout)}


@router.post(
    "/{id}/streams", response_class=StreamingResponse,
    responses={**documented(404, 409, 422, 502, 503, 504), **_REDIRECT, **_STREAM},
)  # fmt: skip
async def stream(gateway: CurrentGateway, id: models.Id, body: models.SupervisorMessage, request: Request) -> Any:
    """Send a message to the supervisor, and return what it sends until its reply: the output of a command, a log.

    A client that disconnects ends the stream: its supervisor is told to cancel.
    """
    await get_record(gateway, id)
    connection = gateway.supervisors.get(id)
    if connection is None:
        return await _send_on(gateway, id, body, request)
    async with AsyncExitStack() as source:
        parts = await source.enter_async_context(aclosing(connection.stream(body.message)))
        with _problems(id, body.timeout):
            async with asyncio.timeout(body.timeout):
                first = await anext(parts)
        return _Stream(source.pop_all(), _lines(id, first, parts))


async def _lines(id: str, first: Mapping[str, Any], rest: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    yield _line(first)
    try:
        async for part in rest:
            yield _line(part)
    except _GONE as error:
        yield _line({"error": f"the supervisor of {id!r} has disconnected: {error}"})


def _line(part: Mapping[str, Any]) -> bytes:
    return json.dumps(part, ensure_ascii=False).encode() + b"\n"


async def _send_on(gateway: Gateway, id: str, body: models.SupervisorMessage, request: Request) -> Response:
    """Send the request to the replica that has the connection, or redirect to it. One that came from a replica is not
    sent on: Problem 409."""
    lease = await _get_lease(gateway, id)
    if lease.holder == gateway.replica or request.state.is_forwarded:
        raise _not_connected(id)
    peer, path = await gateway.peers.find(lease.holder), request.url.path
    if gateway.settings.redirect:
        return RedirectResponse(f"{peer.address}{path}", 307)
    content = json.dumps(body.model_dump(), allow_nan=False).encode()
    headers = {"X-Request-Id": request.state.request_id, "X-Holdfast-Principal": quote(request.state.principal)}
    async with AsyncExitStack() as source:
        sending = gateway.peers.send(peer, path, content, headers, body.timeout + _PEER_MARGIN)
        answer = await source.enter_async_context(sending)
        kind = answer.headers.get("content-type", "")
        if kind == _LINES:
            return _Stream(source.pop_all(), until_stopped(gateway, answer.lines()))
        kept = {name: value for name, value in answer.headers.items() if name == "retry-after"}
        return Response(await answer.read(), answer.status, kept, kind)


@contextmanager
def _problems(id: str, timeout: float) -> Iterator[None]:
    """Raise a failure of a request to a supervisor as a Problem."""
    try:
        yield
    except TimeoutError:
        detail = f"the supervisor of {id!r} has not replied within {timeout:g} s; it may have received the message"
        raise Problem(504, detail) from None
    except _GONE as error:
        detail = f"the supervisor of {id!r} has disconnected; it may have received the message: {error}"
        raise Problem(502, detail) from None


async def _acquire(gateway: Gateway, id: str, connection: SupervisorConnection) -> Any:
    """The grant of the connection's lease, taken from the replica that has an older connection: it is of the same
    supervisor."""
    name, holder = f"{records.SUPERVISOR_LEASE}{id}", gateway.replica
    lease = gateway.client.lease(
        name, ttl=_TTL, holder=holder, on_lost=lambda _: connection.close(_CLOSE_REPLACED)
    )  # fmt: skip
    while (grant := await lease.try_acquire()) is None:
        if (other := await gateway.client.leases.get(name)) is not None:
            reason = f"its supervisor is connected to {gateway.address} now"
            await gateway.client.leases.force_release(name, actor=holder, reason=reason, fence=other.fence)
    return grant


async def _record_fence(gateway: Gateway, id: str, fence: int | None) -> None:
    """Change the record, so that the leader checks at once whether the sandbox is ready."""
    with suppress(holdfast.HoldfastError):  # the record is gone, or the next sweep checks it
        await gateway.client.objects.update(records.TYPE, id, lambda record: {**record.payload, "supervisor": fence})


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


async def _close_on_stop(gateway: Gateway, connection: SupervisorConnection) -> None:
    await gateway.stopping.wait()
    connection.close(_CLOSE_RESTART)


async def _get_lease(gateway: Gateway, id: str) -> Any:
    """Raises Problem 409 when no replica has the connection."""
    lease = await gateway.client.leases.get(f"{records.SUPERVISOR_LEASE}{id}")
    if lease is None:
        raise _not_connected(id)
    return lease


def _not_connected(id: str) -> Problem:
    return Problem(409, f"no supervisor of {id!r} is connected", headers=_RETRY)
