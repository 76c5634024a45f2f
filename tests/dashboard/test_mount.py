"""The dashboard of an asyncio client, without a browser, and what ``holdfast.dashboard`` refuses."""

from __future__ import annotations

import re

import httpx
import pytest

import holdfast


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
