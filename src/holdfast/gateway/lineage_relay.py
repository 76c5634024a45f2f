"""The relay of lineage that runs in every replica when one is configured: one of them publishes, the others stand by.

The relay has a lease of its own, so another replica than the leader may publish.
"""

from __future__ import annotations

from fastapi import APIRouter

from holdfast.gateway.context import Gateway, Loop

router = APIRouter()


def loops(gateway: Gateway) -> list[Loop]:
    if gateway.settings.relay is None:
        return []
    name, sink = gateway.settings.relay
    gateway.relay = gateway.client.relay(name, sink)
    return [Loop("relay", gateway.relay.run)]
