from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import holdfast
from holdfast.testing.sync_facade import EventLoopThread, SyncFacade


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Creates clients, and closes them at the end: async ones on PostgreSQL, sync ones elsewhere.

    The recipes of one flavour are generated from those of the other, so no test needs each flavour on each engine.
    """
    names = request.fixturenames
    on_postgres = "postgres_url" in names or ("either" in names and "postgres" in request.getfixturevalue("either"))
    loop_thread = EventLoopThread() if on_postgres else None
    clients: list[Any] = []

    def create(url: str, **options: Any) -> Any:
        if loop_thread is None:
            clients.append(holdfast.Client(url, **options))
        else:
            clients.append(SyncFacade(loop_thread, holdfast.AsyncClient(url, **options)))
        return clients[-1]

    yield create
    for client in clients:
        client.close()
    if loop_thread is not None:
        loop_thread.close()
