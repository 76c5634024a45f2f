"""The gateway's dashboard acts in the name of a token that may operate, and is read-only for the others."""

from __future__ import annotations

import re

import httpx
import pytest

import holdfast
from holdfast.dashboard import listings, webhook
from holdfast.dashboard.webhook import WebhookTarget
from holdfast.gateway.context import Gateway
from holdfast.gateway.tokens import parse
from tests.children import until
from tests.dashboard.receiver import SECRET, receiving
from tests.gateway.conftest import Serving

OPERATE, READ = "a-secret-of-operators", "a-secret-of-readers"
TOKENS = parse(f"jane operate {OPERATE}\nwatch read {READ}")


async def test_a_token_that_may_operate_acts_and_is_in_the_audit(serving: Serving) -> None:
    async with serving(tokens=TOKENS) as http:
        gateway: Gateway = http.app.state.gateway  # type: ignore[attr-defined]
        async with gateway.client.lease("stuck", ttl=600):
            for secret, may_act in ((READ, False), (OPERATE, True)):
                page = await http.get("/lease?name=stuck", auth=("any", secret))
                assert ("data-act" in page.text, "acting as <b>jane" in page.text) == (may_act, may_act)
            refused = await _release(http, READ)
            assert refused.status_code == 403
            foreign = await _release(http, OPERATE, "https://evil.example")
            assert foreign.status_code == 403
            assert await gateway.client.leases.get("stuck") is not None
            done = await _release(http, OPERATE)
            assert (done.status_code, done.headers["location"][:7]) == (303, "/entry?"), done.text
            assert await gateway.client.leases.get("stuck") is None
            [entry] = await gateway.client.audit.list(action="lease.release", limit=1)
            assert (entry.actor, entry.reason, entry.outcome) == ("jane", "a test", "done")
            assert "a test" in (await http.get(done.headers["location"], auth=("any", OPERATE))).text


async def test_the_page_of_a_pool_lists_its_sessions(serving: Serving) -> None:
    async with serving(pools={"default": 2}) as http:
        id = (await http.post("/sessions", json={"pool": "default"})).json()["id"]
        assert f"/act/session.cancel?id={id}" in (await http.get("/pool?name=default")).text


async def test_a_list_of_large_records_is_cut_and_says_so(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "MAX_BYTES", 2500)
    async with serving() as http:
        gateway: Gateway = http.app.state.gateway  # type: ignore[attr-defined]
        for kind, count in (("few", 2), ("many", 3)):
            for number in range(count):
                await gateway.client.objects.put_if(kind, f"r-{number}", b"x" * 1000, holdfast.MustCreate())
            page = (await http.get(f"/objects?type={kind}")).text
            shown = [f"r-{number}" in page for number in range(count)]
            assert (shown, "the database has more" in page) == ([True, True, False][:count], kind == "many")


async def test_a_replica_sends_new_problems(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "EVERY", 0.05)
    async with receiving() as receiver, serving(webhook=WebhookTarget(receiver.url, SECRET)) as http:
        gateway: Gateway = http.app.state.gateway  # type: ignore[attr-defined]
        await gateway.client.lease("gone", ttl=600).acquire()
        await gateway.client.leases.force_release("gone", actor="jane", reason="a test")
        await until(lambda: receiver.of("gone"), "it is sent")


async def _release(http: httpx.AsyncClient, secret: str, origin: str = "http://localhost") -> httpx.Response:
    path, auth = "/act/lease.release?name=stuck", ("any", secret)
    plan = re.search(r'name="plan" value="([0-9a-f]+)"', (await http.get(path, auth=auth)).text)
    form = {"plan": plan[1] if plan else "", "reason": "a test"}
    return await http.post(path, data=form, auth=auth, headers={"origin": origin})
