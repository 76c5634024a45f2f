"""Supervisors: programs in sandboxes that keep a WebSocket connection to a replica, which sends them messages.

A lease says which replica has the connection; it expires with the replica. A request that needs the connection and
reaches another replica is redirected: 307, with the same method and body.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from fastapi.responses import RedirectResponse

import holdfast
from holdfast.gateway.admission_rules import json_body_error
from holdfast.gateway.context import CurrentGateway, Gateway
from holdfast.gateway.problem import documented
from holdfast.gateway.sandboxes import models, records
from holdfast.gateway.sandboxes.routes import get_record
from holdfast.problem_json import Problem

router = APIRouter(prefix="/sandboxes", tags=["sandboxes"])

_TTL = 15.0
_REDIRECT: dict[int | str, Any] = {
    307: {"description": "Another replica has the connection: repeat the request there, with the Authorization header."}
}
_CLOSE_REPLACED, _CLOSE_RESTART, _CLOSE_POLICY, _CLOSE_INVALID, _CLOSE_RETRY = 4001, 1012, 1008, 1007, 1013


class SupervisorConnection:
    """Sends ``{"id": 1, "message": …}`` and receives ``{"id": 1, "reply": …}``."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self.close_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Done when the replica closes the connection."""

    async def request(self, message: Any, timeout: float) -> Any:
        """Send ``message`` and return the reply. Raises TimeoutError, or ConnectionError when the supervisor left."""
        id = next(self._ids)
        reply = self._replies[id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._socket.send_text(json.dumps({"id": id, "message": message}, allow_nan=False))
                return await reply
        finally:
            del self._replies[id]

    async def serve(self) -> None:
        """Receive replies until the supervisor disconnects or ``close`` is called."""
        reading = asyncio.create_task(self._read())
        either: set[asyncio.Future[Any]] = {reading, self.close_code}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ConnectionError("its supervisor has gone before it answered"))
        if self.close_code.done():
            await self._socket.close(self.close_code.result())

    def close(self, code: int) -> None:
        if not self.close_code.done():
            self.close_code.set_result(code)

    async def _read(self) -> None:
        try:
            while True:
                text = await self._socket.receive_text()
                if reason := json_body_error(text.encode()):
                    raise ValueError(reason)
                answer = json.loads(text, parse_constant=_refuse_constant)
                reply = self._replies.get(answer["id"])
                if reply is not None and not reply.done():
                    reply.set_result(answer["reply"])
        except (ValueError, KeyError, TypeError):
            self.close(_CLOSE_INVALID)
        except (WebSocketDisconnect, RuntimeError):
            return


@router.websocket("/{id}/supervisor")
async def connect(gateway: CurrentGateway, socket: WebSocket, id: models.Id) -> None:
    """Accept a supervisor with the token of its sandbox. A new connection replaces the one before."""
    record = await gateway.client.objects.get(records.TYPE, id)
    scheme, _, token = socket.headers.get("authorization", "").partition(" ")
    if record is None or scheme.lower() != "bearer" or not records.accepts_token(record.payload, token.strip()):
        return await socket.close(_CLOSE_POLICY)
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
    address, _, replica = lease.holder.partition("#")
    return {"address": address, "replica": replica, "fence": lease.fence, "since": lease.acquired_at}


@router.post(
    "/{id}/messages", response_model=models.SupervisorReply,
    responses={**documented(404, 409, 422, 502, 503, 504), **_REDIRECT},
)  # fmt: skip
async def send(gateway: CurrentGateway, id: models.Id, body: models.SupervisorMessage) -> Any:
    """Send a message to the supervisor, and return its reply."""
    await get_record(gateway, id)
    connection = gateway.supervisors.get(id)
    if connection is None:
        address = (await _get_lease(gateway, id)).holder.partition("#")[0]
        if address == gateway.address:
            raise _not_connected(id)
        return RedirectResponse(f"{address}/sandboxes/{id}/messages", 307)
    try:
        return {"reply": await connection.request(body.message, body.timeout)}
    except TimeoutError:
        detail = f"the supervisor of {id!r} has not replied within {body.timeout:g} s; it may have received the message"
        raise Problem(504, detail) from None
    except (ConnectionError, RuntimeError, WebSocketDisconnect) as error:
        detail = f"the supervisor of {id!r} has disconnected; it may have received the message: {error}"
        raise Problem(502, detail) from None


async def _acquire(gateway: Gateway, id: str, connection: SupervisorConnection) -> Any:
    """The grant of the connection's lease, taken from the replica that has an older connection: it is of the same
    supervisor."""
    name, holder = f"{records.SUPERVISOR_LEASE}{id}", f"{gateway.address}#{gateway.replica}"[:200]
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
    return Problem(409, f"no supervisor of {id!r} is connected", headers={"Retry-After": "1"})
