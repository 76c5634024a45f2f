"""A replica as a process: it starts, says where it is, and ends as it is told to."""

from __future__ import annotations

from pathlib import Path

import httpx

from holdfast.gateway.context import Gateway
from tests.gateway.replicas import Replica


def test_it_says_where_it_listens_and_ends_when_told(tmp_path: Path) -> None:
    with Replica(f"sqlite:///{tmp_path / 'app.db'}", tmp_path) as replica:
        assert replica.http.get("/openapi.json").json()["info"]["title"] == "holdfast"
        assert replica.end() == 0
        assert [each["event"] for each in replica.events()][-1] == "gateway.stopped"


async def test_in_process(gateway: Gateway, http: httpx.AsyncClient) -> None:
    assert (await http.get("/openapi.json")).status_code == 200


def test_three(replicas: list[Replica]) -> None:
    assert len({each.told["replica"] for each in replicas}) == 3
