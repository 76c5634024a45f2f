"""The dashboard of an asyncio client, without a browser: what it refuses, and how its streams end."""

from __future__ import annotations

import re

import httpx
import pytest

import holdfast
from holdfast.dashboard import app


async def test_an_async_client_is_shown_and_has_no_operator(url: str) -> None:
    async with holdfast.AsyncClient(url) as client, client.lease("invoices"):
        with pytest.raises(TypeError, match=re.escape("operator= needs a holdfast.Client")):
            holdfast.dashboard(client, operator=lambda request: "jane")
        transport = httpx.ASGITransport(holdfast.dashboard(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.get("/leases?q=invoices")
            assert answer.status_code == 200
            assert "invoices" in answer.text
    with pytest.raises(TypeError, match=re.escape("client must be a holdfast.Client")):
        holdfast.dashboard("sqlite:///app.db")  # type: ignore[arg-type]


async def test_a_stream_ends_where_the_server_cannot_say_that_it_stops(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that waits for its answers would not stop while a page is open."""
    monkeypatch.setattr(app, "LIFETIME", 0.0)
    with holdfast.Client(url) as client:
        transport = httpx.ASGITransport(holdfast.dashboard(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.get("/events?at=/leases")
            kinds = re.findall("^event: (.*)$", answer.text, re.MULTILINE)
            assert (kinds[0], kinds[-1]) == ("state", "again")


async def test_a_page_has_no_hints_of_the_gateway_and_no_time_for_what_runs_once(url: str) -> None:
    with holdfast.Client(url) as client, client.slots("gpu", 2).claim():
        client.schedule("deploy", None).run_due(lambda slot: None)
        transport = httpx.ASGITransport(holdfast.dashboard(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            overview = (await http.get("/")).text
            assert "gpu" in overview
            assert "POST /sessions" not in overview
            schedule = (await http.get("/schedule?name=deploy")).text
            assert "success" in schedule
            assert "1970" not in schedule


def test_the_package_and_the_function_have_one_name() -> None:
    import holdfast.dashboard.formats  # the import system sets holdfast.dashboard to the package

    with holdfast.Client("sqlite:///unused.db") as client:
        assert callable(holdfast.dashboard(client))
