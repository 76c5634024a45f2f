"""What every route and every loop works with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends
from prometheus_client import CollectorRegistry
from starlette.requests import HTTPConnection

import holdfast
from holdfast.gateway.agents.desk import Desk
from holdfast.gateway.settings import Settings


@dataclass(slots=True)
class Gateway:
    """One replica, while it runs."""

    settings: Settings
    client: holdfast.AsyncClient
    driver: holdfast.AsyncProcessDriver
    replica: str
    """Who we are in leases, logs and on pages: unique to this running instance."""
    address: str
    """Where the other replicas and those who are sent on can reach us, e.g. http://10.0.0.7:7411."""
    loops: list[Loop] = field(default_factory=list)
    """What runs beside the requests, declared by the rooms at start: each is cancelled at the end, and awaited."""
    agents: Desk = field(default_factory=Desk)
    elector: Any = None
    """Whose holder leads the replicas: its ``status()`` is told by the health checks. None until a room has made it."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when we were told to end: what streams to a client ends then."""
    leaving: bool = False
    """Told that it will soon be told to end: another one leads, and no new requests should come."""
    reconciler: Any = None
    """Keeps the records of sandboxes true while we lead; its ``exclusive(id)`` is for those who write one here."""
    rooms: dict[str, Any] = field(default_factory=dict)
    """What a room keeps while we run, by its name."""
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    """What /metrics tells: a room may add its own."""


@dataclass(slots=True)
class Loop:
    name: str
    run: Callable[[], Coroutine[Any, Any, None]]


async def _gateway(connection: HTTPConnection) -> Gateway:
    gateway: Gateway = connection.app.state.gateway
    return gateway


Here = Annotated[Gateway, Depends(_gateway)]
"""``async def route(here: Here)``: the replica that answers."""
