"""Supervisors: programs in sandboxes that keep a connection to some replica, through which they are spoken to.

Which replica has it is a lease, which dies with the replica. A request that needs the connection and comes to another
one is told where to go: 307, with the same method and body.
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
from holdfast.gateway.context import Gateway, Here
from holdfast.gateway.problem import Problem, documented
from holdfast.gateway.rules import unspeakable
from holdfast.gateway.sandboxes import models, records
from holdfast.gateway.sandboxes.routes import found

router = APIRouter(prefix="/sandboxes", tags=["sandboxes"])

_TTL = 15.0
_ELSEWHERE: dict[int | str, Any] = {
    307: {"description": "Another replica has the connection: ask it, and say who you are again."}
}
_REPLACED, _GOING, _STRANGER, _NONSENSE, _LATER = 4001, 1012, 1008, 1007, 1013


class Connection:
    """One supervisor's: ``{"id": 1, "message": …}`` goes out, ``{"id": 1, "reply": …}`` comes back."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """With the code to close it with."""

    async def ask(self, message: Any, timeout: float) -> Any:
        number = next(self._numbers)
        reply = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._socket.send_text(json.dumps({"id": number, "message": message}, allow_nan=False))
                return await reply
        finally:
            del self._asked[number]

    async def listen(self) -> None:
        """Until it goes, or is told to."""
        reading = asyncio.create_task(self._read())
        either: set[asyncio.Future[Any]] = {reading, self.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        for each in self._asked.values():
            if not each.done():
                each.set_exception(ConnectionError("its supervisor has gone before it answered"))
        if self.ended.done():
            await self._socket.close(self.ended.result())

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    async def _read(self) -> None:
        try:
            while True:
                text = await self._socket.receive_text()
                if why := unspeakable(text.encode()):
                    raise ValueError(why)
                told = json.loads(text, parse_constant=_refuse)
                waiting = self._asked.get(told["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(told["reply"])
        except (ValueError, KeyError, TypeError):
            self.end(_NONSENSE)
        except (WebSocketDisconnect, RuntimeError):
            return


@router.websocket("/{id}/supervisor")
async def connect(here: Here, socket: WebSocket, id: models.Id) -> None:
    """With the token that its sandbox was given. The newest connection is the one that counts."""
    record = await here.client.objects.get(records.TYPE, id)
    scheme, _, token = socket.headers.get("authorization", "").partition(" ")
    if record is None or scheme.lower() != "bearer" or not records.knows(record.payload, token.strip()):
        return await socket.close(_STRANGER)
    connection, known = Connection(socket), connections(here)
    try:
        grant = await _take(here, id, connection)
    except holdfast.HoldfastError:
        return await socket.close(_LATER)
    try:
        await socket.accept()
        if (before := known.get(id)) is not None:
            before.end(_REPLACED)
        known[id] = connection
        await _tell(here, id, grant.fence)
        stopping = asyncio.create_task(_on_stop(here, connection))
        try:
            await connection.listen()
        finally:
            stopping.cancel()
    finally:
        if known.get(id) is connection:
            del known[id]
        await grant.release()
        await _tell(here, id, None)
    return None


@router.get("/{id}/supervisor", response_model=models.Supervisor, responses=documented(404, 409, 422, 503))
async def where(here: Here, id: models.Id) -> Any:
    """Which replica has its connection."""
    await found(here, id)
    lease = await _lease(here, id)
    address, _, replica = lease.holder.partition("#")
    return {"address": address, "replica": replica, "fence": lease.fence, "since": lease.acquired_at}


@router.post(
    "/{id}/messages", response_model=models.Reply, responses={**documented(404, 409, 422, 502, 503, 504), **_ELSEWHERE}
)
async def send(here: Here, id: models.Id, asked: models.Message) -> Any:
    """Say something to its supervisor, and hear what it replies."""
    await found(here, id)
    connection = connections(here).get(id)
    if connection is None:
        address = (await _lease(here, id)).holder.partition("#")[0]
        if address == here.address:
            raise _nobody(id)
        return RedirectResponse(f"{address}/sandboxes/{id}/messages", 307)
    try:
        return {"reply": await connection.ask(asked.message, asked.timeout)}
    except TimeoutError:
        detail = f"the supervisor of {id!r} has not replied within {asked.timeout:g} s; it may have heard"
        raise Problem(504, detail) from None
    except (ConnectionError, RuntimeError, WebSocketDisconnect) as error:
        raise Problem(502, f"the supervisor of {id!r} has gone; it may have heard: {error}") from None


def connections(here: Gateway) -> dict[str, Connection]:
    """Those that this replica has."""
    found: dict[str, Connection] = here.rooms.setdefault("supervisors", {})
    return found


async def _take(here: Gateway, id: str, connection: Connection) -> Any:
    """The lease that says we have its connection, from whoever has an older one: it was the same supervisor's."""
    name, holder = f"{records.SUPERVISOR}{id}", f"{here.address}#{here.replica}"[:200]
    lease = here.client.lease(name, ttl=_TTL, holder=holder, on_lost=lambda _: connection.end(_REPLACED))
    while (grant := await lease.try_acquire()) is None:
        if (other := await here.client.leases.get(name)) is not None:
            reason = f"its supervisor is connected to {here.address} now"
            await here.client.leases.force_release(name, actor=holder, reason=reason, fence=other.fence)
    return grant


async def _tell(here: Gateway, id: str, fence: int | None) -> None:
    """Change the record, which whoever leads hears of, and looks whether it is ready."""
    with suppress(holdfast.HoldfastError):  # it is gone, or is looked at with the next sweep
        await here.client.objects.update(records.TYPE, id, lambda record: {**record.payload, "supervisor": fence})


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


async def _on_stop(here: Gateway, connection: Connection) -> None:
    await here.stopping.wait()
    connection.end(_GOING)


async def _lease(here: Gateway, id: str) -> Any:
    lease = await here.client.leases.get(f"{records.SUPERVISOR}{id}")
    if lease is None:
        raise _nobody(id)
    return lease


def _nobody(id: str) -> Problem:
    return Problem(409, f"no supervisor of {id!r} is connected", headers={"Retry-After": "1"})
