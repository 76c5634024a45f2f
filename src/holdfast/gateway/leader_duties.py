"""What the leading replica does for all: it reconciles sandboxes with the driver, ends orphans and reconciles slots.

The other replicas stand by. They answer every request all the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter

from holdfast.gateway import sessions
from holdfast.gateway.context import Gateway, Loop
from holdfast.gateway.logs import WARNING, log
from holdfast.gateway.sandboxes.backends import Backends
from holdfast.gateway.sandboxes.records import TYPE

NAME = "gateway:reconciler"
SWEEP_EVERY, ORPHANS_EVERY, SESSIONS_EVERY, FORGET_EVERY = 10.0, 30.0, 1.0, 3600.0
"""Seconds. Most changes are handled when an event reports them; these sweeps handle what events missed."""

_IDLE_SHARE, _LONGEST_PAUSE = 10, 10.0
"""A duty that took t seconds pauses for at least ten times t, up to ten seconds: listing the sessions of a week can
take long, and requests wait for the database meanwhile."""

router = APIRouter()


def loops(gateway: Gateway) -> list[Loop]:
    client = gateway.client
    backends = gateway.backends = Backends(gateway)
    gateway.reconciler = client.reconciler(
        TYPE, backends, sweep_every=SWEEP_EVERY, session_present=backends.session_present
    )
    gateway.elector = client.elector(
        NAME, ttl=15.0, renew_every=5.0, retry_every=2.0, holder=gateway.replica[:180],
        failover="ttl" if gateway.settings.single else "session", watchdog=not gateway.settings.single,
    )  # fmt: skip

    async def lead(term: Any) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(gateway.reconciler.run(term))
                group.create_task(_repeat(term, "ending orphans", ORPHANS_EVERY, backends.end_orphans))
                group.create_task(
                    _repeat(term, "comparing sessions with slots", SESSIONS_EVERY, lambda: sessions.reconcile(gateway))
                )
                group.create_task(
                    _repeat(term, "removing old sessions", FORGET_EVERY, lambda: sessions.forget_ended(gateway))
                )
        finally:
            sessions.stop_counting(gateway)

    return [Loop("leader", lambda: gateway.elector.run(lead))]


async def _repeat(term: Any, name: str, every: float, duty: Callable[[], Awaitable[None]]) -> None:
    """Call ``duty`` about every ``every`` seconds until the term ends. Errors are logged, and the duty is retried."""
    clock = asyncio.get_running_loop().time
    while not term.stopping.is_set():
        began = clock()
        try:
            await duty()
        except Exception as error:
            log.event(
                "leader.failed", WARNING,
                "%(duty)s failed on the leader, and is tried again in about %(every)g s: %(error)s",
                duty=name, every=every, error=str(error),
            )  # fmt: skip
            if term.stopping.is_set():  # the error replaced the cancellation, which does not come twice
                return
            began = clock()  # waiting for a database that did not answer is not work
        await asyncio.sleep(max(every, min(_IDLE_SHARE * (clock() - began), _LONGEST_PAUSE)) * random.uniform(0.9, 1.1))
