"""Alive, ready and measured; and a POST that is sent twice has its effect once."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import holdfast
from holdfast.gateway.context import Gateway
from holdfast.gateway.health import PRESENCE
from holdfast.gateway.tokens import Token
from holdfast.lease.grant_async import AsyncLeaseGrant
from tests.children import PATIENCE
from tests.gateway.conftest import Serving


async def until_ready(http: httpx.AsyncClient) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE):
        while (answer := await http.get("/readyz")).status_code != 200 or not answer.json()["lease"]["leading"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    told: dict[str, Any] = answer.json()
    return told


async def test_it_is_ready_when_all_is_well_and_says_who_leads(http: httpx.AsyncClient, gateway: Gateway) -> None:
    told = await until_ready(http)
    assert (told["status"], told["replica"]) == ("ready", gateway.replica)
    lead = told["lease"]
    assert lead["leader"].startswith(gateway.replica)
    assert lead["since"] is not None
    assert 0 <= lead["renewed_ago"] < PATIENCE
    assert (await http.get("/healthz")).json()["lease"]["fence"] == lead["fence"]


async def test_it_is_alive_and_not_ready_without_its_heartbeat_or_when_told_to_end(
    http: httpx.AsyncClient, gateway: Gateway
) -> None:
    await until_ready(http)
    await gateway.client.leases.force_release(f"gateway:replica:{gateway.replica}", actor="me", reason="to see")
    gateway.presence = None
    answer = await http.get("/readyz")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
    assert answer.json()["checks"] == {"database": True, "schema": True, "heartbeat": False, "running": True}
    gateway.stopping.set()
    assert (await http.get("/readyz")).json()["checks"]["running"] is False
    assert (await http.get("/healthz")).status_code == 200
    assert [(await http.head(path)).status_code for path in ("/readyz", "/healthz")] == [503, 200]


async def test_it_ends_although_the_database_is_away_when_it_is_told_to(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loop meets on its way out, when it is cancelled, does not bring it back."""
    asked = []

    async def unreachable(grant: Any) -> bool:
        asked.append(grant.name)
        raise holdfast.EngineError("the database is away")

    async with asyncio.timeout(PATIENCE):
        async with serving() as http:
            await until_ready(http)
            monkeypatch.setattr(AsyncLeaseGrant, "release", unreachable)
    assert len([each for each in asked if each.startswith(PRESENCE)]) == 1


async def test_requests_are_measured_by_the_template_of_their_route(http: httpx.AsyncClient) -> None:
    for path in ("/healthz", "/sandboxes/one", "/sandboxes/two", "/api/locks", "/made/up"):
        await http.get(path)
    told = (await http.get("/metrics")).text
    for labels, count in (
        ('route="/healthz",status="200"', 1), ('route="/sandboxes/{id}",status="404"', 2),
        ('route="/api/locks",status="200"', 1), ('route="none",status="404"', 1),
    ):  # fmt: skip
        assert f'holdfast_http_request_seconds_count{{method="GET",{labels}}} {count}.0' in told
    assert "holdfast_electors_leading" in told


async def test_a_post_with_a_key_has_its_effect_once_a_principal(serving: Serving) -> None:
    count = 0

    def routes(app: FastAPI) -> None:
        @app.post("/count", status_code=201)
        async def more() -> int:
            nonlocal count
            count += 1
            return count

    tokens = (Token("a", "operate", "secret-of-the-first"), Token("b", "operate", "secret-of-the-other"))
    async with serving(routes, tokens=tokens) as http:
        mine, other = ({"Authorization": f"Bearer {each.secret}", "Idempotency-Key": '"k"'} for each in tokens)
        first, again = [await http.post("/count", headers=mine) for _ in range(2)]
        assert (first.status_code, first.json()) == (again.status_code, again.json()) == (201, 1)
        assert (again.headers["idempotent-replayed"], count) == ("true", 1)
        assert (await http.post("/count", headers=other)).json() == 2, "another's key is another key"
        assert (await http.post("/count", headers=mine | {"Idempotency-Key": '"'})).status_code == 400
        assert (await http.post("/count", headers=mine, content=b"{}")).status_code == 422
        assert count == 2
