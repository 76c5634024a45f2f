"""A replica inside the test, whose locks somebody else may have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

import holdfast
from holdfast.gateway.agents import records
from holdfast.gateway.app import create_app
from holdfast.gateway.context import Gateway
from holdfast.gateway.settings import Settings
from tests.children import PATIENCE

SAID = {"prompt": "make it green", "message": "may I?", "last_assistant_message": "It is green.", "tool_name": "Bash"}


class House:
    """A replica inside the test, and another client of its database: for locks that are somebody else's."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient, other: holdfast.AsyncClient) -> None:
        self.gateway, self.http, self.other = gateway, http, other
        self.asked: list[Any] = []
        """The locks that the replica has asked for."""
        self.asks = asyncio.Event()
        lock = gateway.client.lock

        def spy(name: Any, **options: Any) -> Any:
            self.asked.append(name)
            self.asks.set()
            return lock(name, **options)

        gateway.client.lock = spy  # type: ignore[method-assign]

    async def hook(self, kind: str, session: str = "s", **more: Any) -> httpx.Response:
        return await self.http.post(f"/hook/{kind}", json={"session_id": session, **SAID, **more})

    async def tell(self, *kinds: str, session: str = "s", **more: Any) -> dict[str, Any]:
        for kind in kinds:
            answer = await self.hook(kind, session, **more)
            assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def see(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def commands(self, number: int = 1) -> list[tuple[str, str | None]]:
        found = (await self.see(f"/agents/{number}/commands"))["commands"]
        return [(each["status"], each["ended_by"]) for each in found]

    async def amend(self, number: int = 1, **changes: Any) -> None:
        """As another replica would have: straight in the store."""
        await self.other.objects.update("agent", records.key(number), lambda record: {**record.payload, **changes})


@asynccontextmanager
async def house_of(url: str, tmp_path: Path, **settings: Any) -> AsyncIterator[House]:
    app = create_app(Settings(url, driver=f"unix:{tmp_path / 'none.sock'}", **{"stop_delay": 3600.0, **settings}))
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        holdfast.AsyncClient(url) as other,
    ):
        yield House(app.state.gateway, http, other)


async def seen(house: House, status: str, by: str) -> None:
    """That the command ends so, by what goes on beside the requests."""
    async with asyncio.timeout(PATIENCE):
        while await house.commands() != [(status, by)]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
