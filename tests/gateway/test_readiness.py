"""A replica whose database is away says so, and is there again as soon as it is back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psycopg
import pytest

from holdfast.gateway import app, health
from holdfast.testing.proxy import Proxy
from tests.children import PATIENCE
from tests.gateway.conftest import Serving


async def until(so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await so():  # noqa: ASYNC110 - it asks a replica
            await asyncio.sleep(0.02)


async def test_however_long_the_database_was_away_it_is_ready_when_it_is_back(
    serving: Serving, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "TTL", 1.5)
    monkeypatch.setattr(health, "RETRY_AFTER", 0.05)
    for pause in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(app, pause, 3600.0)
    with Proxy(postgres_url) as proxy:
        async with serving(url=proxy.url) as http:

            async def ready() -> bool:
                return (await http.get("/readyz")).status_code == 200

            await until(ready)
            proxy.reset()
            unready = await http.get("/readyz")
            assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")
            assert (unready.json()["checks"]["database"], unready.json()["checks"]["running"]) == (False, True)
            for asked in (http.get("/sandboxes"), http.post("/sessions", json={})):
                answer = await asked
                assert answer.status_code == 503
                assert answer.headers["content-type"] == "application/problem+json"
            assert (await http.get("/healthz")).status_code == 200

            async def forlorn() -> bool:
                return caplog.messages.count("presence.refused") >= 8

            await until(forlorn)  # another loop would be tried again after an hour
            assert (await http.get("/readyz")).json()["checks"]["heartbeat"] is False
            proxy.heal()
            await until(ready)
            assert (await http.get("/sandboxes")).status_code == 200


async def test_tables_that_do_not_fit_are_told(serving: Serving, postgres_url: str) -> None:
    """As when somebody takes a migration back beneath a running replica."""
    async with serving(url=postgres_url) as http:
        assert (await http.get("/sandboxes")).status_code == 200
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("alter schema holdfast rename to elsewhere")
            unready = await http.get("/readyz")
            connection.execute("alter schema elsewhere rename to holdfast")
        assert unready.status_code == 503
        assert (unready.json()["checks"]["database"], unready.json()["checks"]["schema"]) == (True, False)
