"""/healthz, /readyz and /metrics.

A replica is alive when its event loop answers: no database can make an orchestrator restart it. It is ready when its
database answers, the schema has the right version, and its heartbeat is fresh. The heartbeat is that of a lease which
every replica holds on its own name; by these leases replicas are listed.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field

import holdfast
from holdfast.gateway.context import CurrentGateway, Gateway, Loop
from holdfast.gateway.logs import WARNING, log
from holdfast.gateway.problem import documented
from holdfast.problem_json import Problem

PRESENCE = "gateway:replica:"
"""Prefix of the lease of a replica; its name follows."""
TTL = 15.0
_CHECK_WITHIN = 2.0
RETRY_AFTER = 1.0
"""Seconds between two attempts to acquire this lease. They do not grow while the database is away: until a replica has
its lease again no request is routed to it, and all replicas lose theirs at once."""

router = APIRouter(tags=["health"])

_EXAMPLE: dict[str, Any] = {
    "status": "ready",
    "replica": "gw-1:4711:5f0c3a1b",
    "lease": {
        "leader": "gw-2:4712:9d1e77aa:0b5c2f", "leading": False, "state": "standby",
        "since": "2026-11-16T01:00:00Z", "renewed_ago": 2.5, "transitions": 1, "fence": None,
    },
}  # fmt: skip


class Leadership(BaseModel):
    """Which replica leads, as far as this one knows without asking the database."""

    leader: str | None = Field(description="The holder of the lease that was last seen.")
    leading: bool = Field(description="Whether it is this replica.")
    state: str
    since: datetime | None = Field(description="When it was first seen to lead.")
    renewed_ago: float | None = Field(description="Seconds since its last renewal.")
    transitions: int = Field(description="How often this replica saw the leader change.")
    fence: int | None = Field(description="Of this replica's own term, if it leads.")
    model_config = ConfigDict(from_attributes=True)


class Health(BaseModel):
    status: Literal["alive", "ready"]
    replica: str
    lease: Leadership | None = Field(description="Null before the election has started.")
    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})


@router.head("/healthz", include_in_schema=False)  # some load balancers send HEAD
@router.get("/healthz", summary="Whether the process is alive")
async def alive(gateway: CurrentGateway) -> Health:
    return Health(status="alive", replica=gateway.replica, lease=_leadership(gateway))


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="Whether requests should be sent here", responses=documented(503))
async def ready(gateway: CurrentGateway) -> Health:
    """The database answers, its schema fits, the heartbeat is fresh, and the process was not asked to end."""
    checks, leadership = await _checks(gateway), _leadership(gateway)
    if failed := [name for name, is_fine in checks.items() if not is_fine]:
        raise Problem(
            503, f"not ready: {', '.join(failed)}", headers={"Retry-After": "1"}, replica=gateway.replica,
            checks=checks, lease=leadership and leadership.model_dump(mode="json"),
        )  # fmt: skip
    return Health(status="ready", replica=gateway.replica, lease=leadership)


@router.get("/metrics", summary="For Prometheus", response_class=PlainTextResponse)
async def metrics(gateway: CurrentGateway) -> Response:
    return Response(generate_latest(gateway.metrics), media_type=CONTENT_TYPE_LATEST)


def loops(gateway: Gateway) -> list[Loop]:
    async def hold_presence() -> None:
        await _hold_presence(gateway)

    return [Loop("presence", hold_presence)]


async def _hold_presence(gateway: Gateway) -> None:
    """Hold the lease on the replica's own name, and acquire it again after a loss."""
    while True:
        lost = asyncio.Event()

        def on_lost(_: object, lost: asyncio.Event = lost) -> None:
            lost.set()

        lease = gateway.client.lease(PRESENCE + gateway.replica, ttl=TTL, holder=gateway.replica, on_lost=on_lost)
        try:
            gateway.presence = grant = await lease.acquire(timeout=None)
            announcing = asyncio.create_task(gateway.peers.announce(grant))
            try:
                await lost.wait()
                log.event("presence.lost", WARNING)
            finally:
                announcing.cancel()
                await grant.release()
        except holdfast.EngineError as error:
            if gateway.stopping.is_set():  # the error replaced the cancellation
                return
            log.event("presence.refused", WARNING, again_in=RETRY_AFTER, why=str(error))
            await asyncio.sleep(RETRY_AFTER)


async def _checks(gateway: Gateway) -> dict[str, bool]:
    is_running = not (gateway.leaving or gateway.stopping.is_set())
    checks = {"database": False, "schema": False, "heartbeat": False, "running": is_running}
    try:
        async with asyncio.timeout(_CHECK_WITHIN):
            await gateway.client.leases.get(PRESENCE + gateway.replica)
        checks["database"] = checks["schema"] = True
    except holdfast.SchemaMismatch:
        checks["database"] = True
    except (holdfast.HoldfastError, TimeoutError) as error:
        log.event("database.silent", WARNING, why=str(error))
    checks["heartbeat"] = gateway.presence is not None and not gateway.presence.lost
    return checks


def _leadership(gateway: Gateway) -> Leadership | None:
    return None if gateway.elector is None else Leadership.model_validate(gateway.elector.status())
