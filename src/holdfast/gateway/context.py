"""The state of a running replica, which every route and every loop works with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends
from prometheus_client import CollectorRegistry
from starlette.requests import HTTPConnection

import holdfast
from holdfast.gateway.admission_rules import HANDSHAKES, RateLimit
from holdfast.gateway.agents.replica_state import AgentState
from holdfast.gateway.peers import Peers
from holdfast.gateway.seal import Seal
from holdfast.gateway.settings import Settings

if TYPE_CHECKING:
    from holdfast.dashboard.app import Dashboard
    from holdfast.gateway.operators.commands import CommandRunner
    from holdfast.gateway.sandboxes.backends import Backends
    from holdfast.gateway.sandboxes.supervisors import SupervisorConnection

MAX_LISTINGS = 2
"""Pages of records that are read at a time."""
MAX_TOKEN_CHECKS = 16
"""Tokens of supervisors that are checked at a time: others have room in the database meanwhile."""


@dataclass(slots=True)
class Gateway:
    """One replica, while it runs. The attributes without a default value are set by ``loops`` of their feature."""

    settings: Settings
    client: holdfast.AsyncClient
    driver: holdfast.reconciler.AsyncProcessDriver
    replica: str
    """The name of this replica in leases, logs and on pages: unique to this running instance."""
    address: str
    """Where other replicas and redirected clients reach this one, e.g. http://10.0.0.7:7411."""
    peers: Peers
    """The other replicas, as far as requests are sent to them."""
    seal: Seal
    """Encrypts the secrets in its records."""
    loops: list[Loop] = field(default_factory=list)
    """What runs beside the requests; cancelled and awaited at the end."""
    agents: AgentState = field(default_factory=AgentState)
    supervisors: dict[str, SupervisorConnection] = field(default_factory=dict)
    """The connections to supervisors that this replica has, by the id of the sandbox."""
    listings: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LISTINGS))
    """Held while a page of records is read."""
    handshakes: RateLimit = field(default_factory=lambda: RateLimit(HANDSHAKES, time.monotonic))
    """Of supervisors, whose token is good."""
    token_checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_TOKEN_CHECKS))
    """Held while the token of a supervisor is read."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process was asked to end: streams to clients end then."""
    leaving: bool = False
    """Whether the process will soon be asked to end: another replica leads, and /readyz refuses new requests."""
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    """What /metrics returns."""
    presence: Any = None
    """The grant of this replica's own lease; None before the first one."""
    elector: Any = None
    """Elects the leader of the replicas. None before the loops have started."""
    relay: Any = None
    """Publishes lineage, here or in another replica; None when none is configured."""
    reconciler: Any = None
    """Reconciles the records of sandboxes while this replica leads. A route that writes one enters
    ``reconciler.exclusive(id)``."""
    backends: Backends = field(init=False)
    commands: CommandRunner = field(init=False)
    pages: Dashboard = field(init=False)


@dataclass(slots=True)
class Loop:
    name: str
    run: Callable[[], Coroutine[Any, Any, None]]


async def _current_gateway(connection: HTTPConnection) -> Gateway:
    gateway: Gateway = connection.app.state.gateway
    return gateway


CurrentGateway = Annotated[Gateway, Depends(_current_gateway)]
"""``async def route(gateway: CurrentGateway)``: the replica that answers."""
