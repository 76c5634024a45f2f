"""Sessions: a slot each, kept by their own heartbeats, and 410 when they are over."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import holdfast
import holdfast.telemetry
from holdfast.commands import run
from holdfast.gateway import leader_duties, sessions
from holdfast.gateway.context import Gateway
from tests.children import PATIENCE

CAPACITY = 8


async def claimed(http: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    answer = await http.post("/sessions", json={"pool": "default", **more})
    assert answer.status_code == 201, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def owners(gateway: Gateway) -> dict[int, str]:
    return await gateway.client.slots("default", CAPACITY).owners()


async def is_gone(http: httpx.AsyncClient, id: str, state: str) -> None:
    """To everything that is asked of it."""
    for answer in (
        await http.get(f"/sessions/{id}"),
        await http.post(f"/sessions/{id}/heartbeat"),
        await http.post(f"/sessions/{id}/end", json={"state": "STOPPED"}),
    ):
        told = answer.json()
        assert (answer.status_code, told["status"], told["state"]) == (410, 410, state)
        assert answer.headers["content-type"] == "application/problem+json"
        assert told["requestId"]


@pytest.mark.parametrize("state", ["STOPPED", "FAILED", "CANCELLED"])
async def test_a_session_claims_a_slot_lives_and_ends(gateway: Gateway, http: httpx.AsyncClient, state: str) -> None:
    told = await claimed(http, agent="a-1")
    assert await owners(gateway) == {told["slot"]: told["id"]}
    assert "token" not in told
    assert (await http.get(f"/sessions/{told['id']}")).json() == told
    assert (await http.post(f"/sessions/{told['id']}/heartbeat")).json() == told
    ended = await http.post(f"/sessions/{told['id']}/end", json={"state": state, "reason": "it was enough"})
    assert (ended.status_code, ended.json()["state"], ended.json()["reason"]) == (200, state, "it was enough")
    assert await owners(gateway) == {}
    await is_gone(http, told["id"], state)
    listed = (await http.get("/sessions", params={"state": state, "pool": "default"})).json()["items"]
    assert [(each["id"], each["state"]) for each in listed] == [(told["id"], state)]
    assert "token" not in listed[0]


async def test_there_are_so_many_slots_and_no_more(http: httpx.AsyncClient) -> None:
    made = await asyncio.gather(*(http.post("/sessions", json={}) for _ in range(CAPACITY + 4)))
    assert sorted(each.status_code for each in made) == [201] * CAPACITY + [409] * 4
    refused = next(each for each in made if each.status_code == 409)
    assert int(refused.headers["retry-after"]) >= 1
    held = [each.json() for each in made if each.status_code == 201]
    assert sorted(each["slot"] for each in held) == [*range(1, CAPACITY + 1)]
    await http.post(f"/sessions/{held[3]['id']}/end", json={"state": "STOPPED"})
    again = await claimed(http)
    assert again["slot"] == held[3]["slot"]
    assert again["fence"] > max(each["fence"] for each in held)
    pages, after = [], None
    while True:
        page = (await http.get("/sessions", params={"limit": 4} | ({"after": after} if after else {}))).json()
        pages += [each["id"] for each in page["items"]]
        if (after := page["next"]) is None:
            break
    assert sorted(pages) == sorted(each["id"] for each in [*held, again])


async def test_what_makes_no_sense_is_refused(http: httpx.AsyncClient) -> None:
    unknown = await http.post("/sessions", json={"pool": "none"})
    assert (unknown.status_code, "there are: default" in unknown.json()["detail"]) == (422, True)
    for body in ({"ttl": 0}, {"ttl": "nan"}, {"pool": ""}, {"speed": 1}):
        assert (await http.post("/sessions", json=body)).status_code == 422
    id = (await claimed(http))["id"]
    assert (await http.post(f"/sessions/{id}/end", json={"state": "ACTIVE"})).status_code == 422
    assert (await http.post("/sessions/none/heartbeat")).status_code == 404


async def test_one_that_falls_silent_fails_and_its_slot_is_free(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """Our own heartbeats go on all the while, and do not keep it alive. The leader writes down what became of it."""
    loud, silent = await claimed(http, ttl=600.0), await claimed(http, ttl=1.0)
    slot = f"@slot:default:{loud['slot']}"
    before = await gateway.client.leases.get(slot)
    assert (await http.post(f"/sessions/{loud['id']}/heartbeat")).status_code == 200
    async with asyncio.timeout(PATIENCE):
        while silent["id"] in (await owners(gateway)).values():
            assert (await http.post(f"/sessions/{loud['id']}/heartbeat")).status_code == 200
            await asyncio.sleep(0.1)
        after = await gateway.client.leases.get(slot)
        assert before is not None
        assert after is not None
        assert after.expires_at > before.expires_at, "its heartbeats keep it"
        assert (await http.get(f"/sessions/{silent['id']}")).status_code == 410
        while not (failed := (await http.get("/sessions", params={"state": "FAILED"})).json()["items"]):
            await http.post(f"/sessions/{loud['id']}/heartbeat")
            await asyncio.sleep(0.1)
    assert [(each["id"], "no heartbeat" in each["reason"]) for each in failed] == [(silent["id"], True)]
    await is_gone(http, silent["id"], "FAILED")
    assert await owners(gateway) == {loud["slot"]: loud["id"]}


async def test_a_late_heartbeat_does_not_bring_it_back(gateway: Gateway, http: httpx.AsyncClient) -> None:
    """Although nobody has written down yet that it has failed, and another one has its slot by now."""
    told = await claimed(http)
    await gateway.client.leases.force_release(f"@slot:default:{told['slot']}", actor="test", reason="too long")
    other = await claimed(http)
    assert other["slot"] == told["slot"]
    late = await http.post(f"/sessions/{told['id']}/heartbeat")
    assert (late.status_code, late.json()["reason"]) == (410, "its slot was taken away by test: too long")
    await is_gone(http, told["id"], "FAILED")
    assert (await http.post(f"/sessions/{other['id']}/heartbeat")).status_code == 200


async def test_silence_is_noticed_in_a_pool_that_is_not_offered_any_more(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    silent, loud = await claimed(http), await claimed(http)
    gateway.settings = replace(gateway.settings, pools={"other": 1})
    await gateway.client.leases.force_release(f"@slot:default:{silent['slot']}", actor="test", reason="as if expired")
    await sessions.reconcile(gateway)
    listed = (await http.get("/sessions")).json()["items"]
    assert {each["id"]: each["state"] for each in listed} == {silent["id"]: "FAILED", loud["id"]: "ACTIVE"}


async def test_once_told_to_have_failed_nobody_ends_it_otherwise(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that was just ended read as failed, because its slot is free. Nobody leads meanwhile."""
    monkeypatch.setattr(sessions, "reconcile", lambda _: asyncio.sleep(0))
    for ask in ("get", "end"):
        told = await claimed(http)
        await gateway.client.leases.force_release(f"@slot:default:{told['slot']}", actor="test", reason="as if expired")
        if ask == "get":
            assert (await http.get(f"/sessions/{told['id']}")).json()["state"] == "FAILED"
        ended = await http.post(f"/sessions/{told['id']}/end", json={"state": "STOPPED"})
        assert (ended.status_code, ended.json()["state"]) == (410, "FAILED")
        await is_gone(http, told["id"], "FAILED")
    told = await claimed(http)
    known = gateway.client.objects.get

    async def late(type: str, id: str) -> Any:
        monkeypatch.undo()
        before = await known(type, id)
        assert (await http.post(f"/sessions/{id}/end", json={"state": "STOPPED"})).status_code == 200
        return before

    monkeypatch.setattr(gateway.client.objects, "get", late)
    beaten = await http.post(f"/sessions/{told['id']}/heartbeat")
    assert (beaten.status_code, beaten.json()["state"]) == (410, "STOPPED")


async def test_what_is_in_use_is_what_sessions_and_leases_agree_upon(gateway: Gateway, http: httpx.AsyncClient) -> None:
    ours = gateway.client.slots("default", CAPACITY)
    for _ in range(3):
        await claimed(http)
    await sessions.reconcile(gateway)
    assert holdfast.telemetry.readings()["slots_in_use"] == 3
    assert not any(ours.invariant_violation_total.values())
    await ours.claim(owner="nobody that is known")
    await sessions.reconcile(gateway)
    assert ours.invariant_violation_total["unclaimed_lease"] >= 1
    assert holdfast.telemetry.readings()["slots_in_use"] == 3
    ended = await claimed(http)
    record = await gateway.client.objects.get("@session", ended["id"])
    assert record is not None
    await sessions._record_end(gateway, record, "STOPPED", "")  # and the replica died before it gave the slot back
    await sessions.reconcile(gateway)
    assert ours.invariant_violation_total["terminal_owner"] >= 1
    assert holdfast.telemetry.readings()["slots_in_use"] == 3
    sessions.stop_counting(gateway)
    assert holdfast.telemetry.readings()["slots_in_use"] == 0


async def test_an_operator_cancels_one(gateway: Gateway, http: httpx.AsyncClient) -> None:
    told = await claimed(http)

    def cancel(**more: Any) -> Any:
        with holdfast.Client(gateway.settings.url) as client:
            return run(client, "session.cancel", {"id": told["id"]}, actor="jane", reason="it hangs", **more)

    plan = await asyncio.to_thread(cancel, dry_run=True)
    assert plan.changes == [f"session '{told['id']}' is cancelled, and slot {told['slot']} of pool 'default' is freed"]
    assert (await http.get(f"/sessions/{told['id']}")).status_code == 200
    await asyncio.to_thread(cancel)
    await is_gone(http, told["id"], "CANCELLED")
    assert await owners(gateway) == {}
    with pytest.raises(holdfast.HoldfastError, match="is already CANCELLED"):
        await asyncio.to_thread(cancel)


async def test_what_ended_long_ago_is_forgotten(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, alive = await claimed(http), await claimed(http)
    await http.post(f"/sessions/{over['id']}/end", json={"state": "STOPPED"})
    await sessions.forget_ended(gateway)
    await is_gone(http, over["id"], "STOPPED")
    monkeypatch.setattr(sessions, "KEEP", 0 * sessions.KEEP)
    await sessions.forget_ended(gateway)
    assert (await http.get(f"/sessions/{over['id']}")).status_code == 404
    assert (await http.get(f"/sessions/{alive['id']}")).status_code == 200


async def test_what_a_leader_does_every_second_takes_no_more_than_a_tenth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there are many records to go through, it is done less often: requests wait for the database meanwhile."""
    pauses: list[float] = []
    moment = 1000.0
    """What the loop's clock says."""
    term: Any = SimpleNamespace(stopping=asyncio.Event())

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            term.stopping.set()

    async def duty() -> None:
        nonlocal moment
        moment += 0.1
        if pauses:
            raise holdfast.EngineError("the database was away")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        patched.setattr(asyncio.get_running_loop(), "time", lambda: moment)
        await leader_duties._repeat(term, "a duty", 0.001, duty)
    assert 0.9 <= pauses[0] <= 1.1
    assert pauses[1] <= 0.0011, "how long it took to fail says nothing"
