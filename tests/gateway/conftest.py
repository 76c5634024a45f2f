"""A replica inside the test, one in a process, and three in processes on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from fastapi import FastAPI

from holdfast.gateway.app import create_app
from holdfast.gateway.context import Gateway
from holdfast.gateway.settings import Settings
from tests.conftest import fresh
from tests.driver.daemon import clean
from tests.gateway.replicas import Replica, fleet


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


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[FastAPI]:
    """In this process, on SQLite. No driver answers: routes that need one say so."""
    made = create_app(Settings(f"sqlite:///{tmp_path / 'app.db'}", driver=f"unix:{tmp_path / 'none.sock'}"))
    async with made.router.lifespan_context(made):
        yield made


@pytest.fixture
def gateway(app: FastAPI) -> Gateway:
    made: Gateway = app.state.gateway
    return made


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Asks the replica of ``gateway``."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        yield client
