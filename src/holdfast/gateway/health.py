"""Alive, ready, measured.

Alive is a process whose loop answers: no database can make it restart. Ready is one whose database answers, whose
tables fit, and whose heartbeat is fresh. The heartbeat is that of a lease which every replica holds on its own name:
by it the others know who is there.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field

import holdfast
from holdfast.gateway.context import Gateway, Here, Loop
from holdfast.gateway.logs import say
from holdfast.gateway.problem import Problem, documented

PRESENCE = "gateway:replica:"
"""And the replica's name: the lease by which it is known to be there."""
TTL = 15.0
_PATIENCE = 2.0
AGAIN = 1.0
"""Seconds between two tries to be there again. No longer, however long the database was away: no request is sent to who
is not there, and all replicas are away at once."""

router = APIRouter(tags=["health"])

_EXAMPLE: dict[str, Any] = {
    "status": "ready",
    "replica": "gw-1:4711:5f0c3a1b",
    "lease": {
        "leader": "gw-2:4712:9d1e77aa/0b5c2f31", "leading": False, "state": "standby",
        "since": "2026-11-16T01:00:00Z", "renewed_ago": 2.5, "transitions": 1, "fence": None,
    },
}  # fmt: skip


class Lead(BaseModel):
    """Who leads the replicas, as far as this one knows without asking."""

    leader: str | None = Field(description="The holder of the lease that was last seen.")
    leading: bool = Field(description="Whether it is this replica.")
    state: str
    since: datetime | None = Field(description="When it was first seen to lead.")
    renewed_ago: float | None = Field(description="Seconds since its last renewal.")
    transitions: int = Field(description="How often this replica saw the leader change.")
    fence: int | None = Field(description="Of our own term, if we lead.")


class Health(BaseModel):
    status: Literal["alive", "ready"]
    replica: str
    lease: Lead | None = Field(description="None where nobody is elected.")
    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})


@router.head("/healthz", include_in_schema=False)  # as some load balancers ask
@router.get("/healthz", summary="Whether the process is alive")
async def alive(here: Here) -> Health:
    return Health(status="alive", replica=here.replica, lease=_lead(here))


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="Whether requests should be sent here", responses=documented(503))
async def ready(here: Here) -> Health:
    """The database answers, its tables fit, our heartbeat is fresh, and we were not told to end."""
    checks = await _checks(here)
    if wrong := [name for name, fine in checks.items() if not fine]:
        lead = _lead(here)
        raise Problem(
            503, f"not ready: {', '.join(wrong)}", headers={"Retry-After": "1"}, replica=here.replica, checks=checks,
            lease=lead and lead.model_dump(mode="json"),
        )  # fmt: skip
    return Health(status="ready", replica=here.replica, lease=_lead(here))


@router.get("/metrics", summary="For Prometheus", response_class=PlainTextResponse)
async def metrics(here: Here) -> Response:
    return Response(generate_latest(here.metrics), media_type=CONTENT_TYPE_LATEST)


def loops(gateway: Gateway) -> list[Loop]:
    async def present() -> None:
        await _present(gateway)

    return [Loop("presence", present)]


async def _present(gateway: Gateway) -> None:
    """Hold the lease on our own name, and take it again when it was lost."""
    loop = asyncio.get_running_loop()
    while True:
        lost = asyncio.Event()

        def tell(_: object, lost: asyncio.Event = lost) -> None:  # in the keeper's thread
            loop.call_soon_threadsafe(lost.set)

        lease = gateway.client.lease(PRESENCE + gateway.replica, ttl=TTL, holder=gateway.replica, on_lost=tell)
        try:
            grant = await lease.acquire(timeout=None)
            gateway.rooms["presence"] = grant
            try:
                await lost.wait()
                say("presence.lost", logging.WARNING)
            finally:
                await grant.release()
        except holdfast.EngineError as error:
            if gateway.stopping.is_set():  # it was on its way out
                return
            say("presence.refused", logging.WARNING, again_in=AGAIN, why=str(error))
            await asyncio.sleep(AGAIN)


async def _checks(gateway: Gateway) -> dict[str, bool]:
    running = not (gateway.leaving or gateway.stopping.is_set())
    checks = {"database": False, "schema": False, "heartbeat": False, "running": running}
    try:
        async with asyncio.timeout(_PATIENCE):
            await gateway.client.leases.get(PRESENCE + gateway.replica)
        checks["database"] = checks["schema"] = True
    except holdfast.SchemaMismatch:
        checks["database"] = True
    except (holdfast.HoldfastError, TimeoutError) as error:
        say("database.silent", logging.WARNING, why=str(error))
    grant = gateway.rooms.get("presence")
    checks["heartbeat"] = grant is not None and not grant.lost
    return checks


def _lead(gateway: Gateway) -> Lead | None:
    if gateway.elector is None:
        return None
    found = gateway.elector.status()
    return Lead(**{name: getattr(found, name) for name in Lead.model_fields})
