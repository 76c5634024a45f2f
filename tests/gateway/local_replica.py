"""A replica in the process of the test, and a second client of its database that can hold its locks."""

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


class LocalReplica:
    """A replica in the process of the test. ``other`` is another client of its database, to hold locks against it."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient, other: holdfast.AsyncClient) -> None:
        self.gateway, self.http, self.other = gateway, http, other
        self.requested_locks: list[Any] = []
        """The names of the locks that the replica has requested."""
        self.lock_requested = asyncio.Event()
        lock = gateway.client._reserved_lock

        def spy(namespace: str, number: int, **options: Any) -> Any:
            self.requested_locks.append((namespace, number))
            self.lock_requested.set()
            return lock(namespace, number, **options)

        gateway.client._reserved_lock = spy  # type: ignore[method-assign]

    async def hook(self, kind: str, session: str = "s", **more: Any) -> httpx.Response:
        return await self.http.post(f"/hook/{kind}", json={"session_id": session, **SAID, **more})

    async def send_hooks(self, *kinds: str, session: str = "s", **more: Any) -> dict[str, Any]:
        for kind in kinds:
            answer = await self.hook(kind, session, **more)
            assert answer.status_code == 200, answer.text
        last: dict[str, Any] = answer.json()
        return last

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def commands(self, number: int = 1) -> list[tuple[str, str | None]]:
        commands = (await self.get(f"/agents/{number}/commands"))["commands"]
        return [(each["status"], each["ended_by"]) for each in commands]

    async def amend(self, number: int = 1, **changes: Any) -> None:
        """Change the record directly, as another replica might."""
        await self.other.objects.update("@agent", records.key(number), lambda record: {**record.payload, **changes})


@asynccontextmanager
async def open_local_replica(url: str, tmp_path: Path, **settings: Any) -> AsyncIterator[LocalReplica]:
    app = create_app(Settings(url, driver=f"unix:{tmp_path / 'none.sock'}", **{"stop_delay": 3600.0, **settings}))
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        holdfast.AsyncClient(url) as other,
    ):
        yield LocalReplica(app.state.gateway, http, other)


async def wait_for_command(local: LocalReplica, status: str, by: str) -> None:
    """Wait until a background loop has ended the only command, with this status."""
    async with asyncio.timeout(PATIENCE):
        while await local.commands() != [(status, by)]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
