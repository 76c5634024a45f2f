"""What one replica does for all: it watches and sweeps the driver, ends what has no record, and counts the slots.

The others stand by, and answer every request all the same.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter

from holdfast.gateway import sessions
from holdfast.gateway.context import Gateway, Loop
from holdfast.gateway.sandboxes.backends import Backends
from holdfast.gateway.sandboxes.records import TYPE

log = logging.getLogger("holdfast.gateway")

NAME = "gateway:reconciler"
SWEEP_EVERY, STRAYS_EVERY, SESSIONS_EVERY, FORGET_EVERY = 10.0, 30.0, 1.0, 3600.0
"""Seconds. Most is done when it is heard of; these are the net below."""

_SHARE, _LONGEST = 10, 10.0
"""What takes long is done less often: among the sessions of a week it takes its time to find those that are active, and
requests wait for the database meanwhile."""

router = APIRouter()


def loops(gateway: Gateway) -> list[Loop]:
    client = gateway.client
    backends = gateway.rooms["backends"] = Backends(gateway)
    gateway.reconciler = client.reconciler(
        TYPE, backends, sweep_every=SWEEP_EVERY, session_present=backends.session_present
    )
    gateway.elector = client.elector(
        NAME, ttl=15.0, renew_every=5.0, retry_every=2.0, holder=gateway.replica[:180],
        failover="ttl" if gateway.settings.single else "session",
    )  # fmt: skip

    async def lead(term: Any) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(gateway.reconciler.run(term))
                group.create_task(_again(term, STRAYS_EVERY, backends.end_strays))
                group.create_task(_again(term, SESSIONS_EVERY, lambda: sessions.tend(gateway)))
                group.create_task(_again(term, FORGET_EVERY, lambda: sessions.forget_ended(gateway)))
        finally:
            sessions.count_no_more(gateway)

    return [Loop("leader", lambda: gateway.elector.run(lead))]


async def _again(term: Any, every: float, duty: Callable[[], Awaitable[None]]) -> None:
    clock = asyncio.get_running_loop().time
    while not term.stopping.is_set():
        began = clock()
        try:
            await duty()
        except Exception as error:  # of the database or the driver: it is tried again
            log.warning(
                "what a leader does every %g s failed, and is tried again: %s",
                every,
                error,
                extra={"event": "leader.failed", "every": every, "error": str(error)},
            )
            if term.stopping.is_set():  # it was on its way out, and nobody tells it again
                return
            began = clock()  # the time was that of a database that was away
        await asyncio.sleep(max(every, min(_SHARE * (clock() - began), _LONGEST)) * random.uniform(0.9, 1.1))
