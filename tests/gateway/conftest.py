"""A replica inside the test, one in a process, and three in processes on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from holdfast.dashboard import snapshot
from holdfast.gateway import health
from holdfast.gateway.agents import workers
from holdfast.gateway.app import create_app
from holdfast.gateway.context import Gateway
from holdfast.gateway.settings import Settings
from tests.children import PATIENCE
from tests.conftest import fresh
from tests.driver.daemon import clean
from tests.gateway.local_replica import LocalReplica, open_local_replica
from tests.gateway.replicas import Replica, fleet


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica in this process waits for its database however slow the machine is, and its workers do nothing of their
    own accord: a test that calls them would find their work done."""
    monkeypatch.setattr(snapshot, "READ_WITHIN", PATIENCE)
    monkeypatch.setattr(health, "_CHECK_WITHIN", PATIENCE)
    monkeypatch.setattr(workers, "EVERY", 3600.0)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of the module: short enough for a socket in it."""
    with TemporaryDirectory(prefix="hf-") as made:
        yield Path(made)
        for each in Path(made).glob("**/sandboxes"):
            clean(each.parent)


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[Replica]:
    """One on SQLite, shared by the tests of a module."""
    with Replica(f"sqlite:///{folder / 'app.db'}", folder) as made:
        yield made


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[list[Replica]]:
    """Three on one PostgreSQL, shared by the tests of a module. Whoever kills one starts it again."""
    with fleet(fresh(), folder) as made:
        yield made


Serving = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    """``async with serving(writes=2, routes=add) as http``: a replica in this process, on SQLite, set up as said.
    ``routes`` is given the app before it starts. No driver answers: routes that need one say so."""

    @asynccontextmanager
    async def serve(
        routes: Callable[[FastAPI], object] | None = None, **options: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        place = {"url": f"sqlite:///{tmp_path / 'app.db'}", "driver": f"unix:{tmp_path / 'none.sock'}"}
        app = create_app(Settings(**{**place, **options}))
        if routes is not None:
            routes(app)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            http.app = app  # type: ignore[attr-defined]
            yield http

    return serve


@pytest.fixture
async def http(serving: Serving) -> AsyncIterator[httpx.AsyncClient]:
    """Asks the replica of ``gateway``."""
    async with serving() as made:
        yield made


@pytest.fixture
def gateway(http: httpx.AsyncClient) -> Gateway:
    """A replica in this process, on SQLite, without a driver."""
    made: Gateway = http.app.state.gateway  # type: ignore[attr-defined]
    return made


@pytest.fixture
async def local(sqlite_url: str, tmp_path: Path) -> AsyncIterator[LocalReplica]:
    async with open_local_replica(sqlite_url, tmp_path, transcripts=str(tmp_path)) as made:
        yield made
