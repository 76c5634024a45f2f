"""Sandboxes at one replica: what the store answers without a driver."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import WebSocketDisconnect
from fastapi.testclient import TestClient

import holdfast
from holdfast.database import call_dispatcher_async
from holdfast.gateway.app import create_app
from holdfast.gateway.context import Gateway
from holdfast.gateway.sandboxes import routes
from holdfast.gateway.sandboxes.models import NewSandbox
from holdfast.gateway.sandboxes.records import SandboxAction, due_action, matches, new_payload, owner
from holdfast.gateway.seal import Seal
from holdfast.gateway.settings import Settings
from holdfast.gateway.tokens import parse
from tests.children import PATIENCE, query, until
from tests.conftest import fresh
from tests.gateway.conftest import Serving
from tests.raw_session import waiters

NEW: dict[str, Any] = {"argv": ["sleep", "1000"]}

OWN = "o" * 43
"""The token of a supervisor."""


def new(**given: Any) -> dict[str, Any]:
    """As a route gets it."""
    return {**NewSandbox.model_validate(given).model_dump(), "limits": {}}


async def test_a_record_is_created_read_changed_and_listed(http: httpx.AsyncClient) -> None:
    """The driver is away: what is recorded will run all the same, so it is acknowledged."""
    asked = {**NEW, "id": "web-1", "name": "web", "env": {"SECRET": "hush"}, "labels": {"team": "a"}}
    new = await http.post("/sandboxes", json=asked)
    assert (new.status_code, new.headers["location"]) == (201, "/sandboxes/web-1")
    assert new.json()["spec"]["env"] == ["SECRET"]
    assert "hush" not in new.text
    assert new.json()["phase"] == "Provisioning"
    found = await http.get("/sandboxes/web-1")
    assert found.json() | {"status": {}, "version": 0, "updated_at": ""} == new.json() | {
        "status": {}, "version": 0, "updated_at": "",
    }  # fmt: skip
    assert found.headers["etag"] == f'"{found.json()["version"]}"'
    same = await http.get("/sandboxes/web-1", headers={"If-None-Match": f"W/{found.headers['etag']}"})
    assert (same.status_code, same.content) == (304, b"")
    change = {"name": "shop", "labels": {"team": "b"}, "metadata": {"ticket": 7}}
    changed = await http.patch("/sandboxes/web-1", json=change, headers={"If-Match": found.headers["etag"]})
    assert changed.status_code == 200, changed.text
    assert changed.json() | change == changed.json()
    assert changed.json()["version"] > found.json()["version"]
    unnamed = await http.patch("/sandboxes/web-1", json={"name": None}, headers={"If-Match": changed.headers["etag"]})
    assert (unnamed.json()["name"], unnamed.json()["labels"]) == (None, {"team": "b"})
    generated = (await http.post("/sandboxes", json=NEW)).json()["id"]
    assert generated.startswith("sb-")


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 428), ({"If-Match": '"1"'}, 412), ({"If-Match": "7"}, 400), ({"If-Match": 'W/"{now}"'}, 412)],
)
async def test_whoever_changes_or_deletes_says_what(
    http: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    version = (await http.post("/sandboxes", json={**NEW, "id": "web"})).json()["version"]
    given = {name: value.format(now=version) for name, value in headers.items()}
    for answer in (
        await http.patch("/sandboxes/web", json={"labels": {}}, headers=given),
        await http.delete("/sandboxes/web", headers=given),
    ):
        told = answer.json()
        assert answer.status_code == status, told
        assert answer.headers["content-type"] == "application/problem+json"
        assert told["requestId"]
        if status != 400:
            assert told["current"] == version
            assert answer.headers["etag"] == f'"{version}"'
    assert (await http.get("/sandboxes/web")).json()["version"] == version


async def test_of_two_who_change_the_same_version_one_is_told_the_other(http: httpx.AsyncClient) -> None:
    new = await http.post("/sandboxes", json={**NEW, "id": "web"})
    answers = await asyncio.gather(
        *(
            http.patch("/sandboxes/web", json={"labels": {"n": str(n)}}, headers={"If-Match": new.headers["etag"]})
            for n in range(8)
        )
    )
    assert sorted(each.status_code for each in answers) == [200, *[412] * 7]
    winner = next(each for each in answers if each.status_code == 200)
    assert {each.json()["current"] for each in answers if each.status_code == 412} == {winner.json()["version"]}
    assert (await http.get("/sandboxes/web")).json() == winner.json()


async def test_changes_of_many_sandboxes_share_a_commit_and_each_has_its_own_answer(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait while the first one waits for a row; meanwhile another client changes one of them."""
    url, ids = fresh(), [f"web-{number}" for number in range(10)]
    async with serving(url=url) as http, holdfast.AsyncClient(url) as other:

        def change(id: str, condition: str = "*") -> asyncio.Task[httpx.Response]:
            body = {"metadata": {"changed": id}}
            return asyncio.create_task(http.patch(f"/sandboxes/{id}", json=body, headers={"If-Match": condition}))

        def waiting() -> set[str]:
            return {call.parameters["id"] for call in dispatcher._queue.waiting if call.name == "object_swap"}

        dispatcher = http.app.state.gateway.client._engine._dispatcher  # type: ignore[attr-defined]
        for id in ids:
            assert (await http.post("/sandboxes", json={**NEW, "id": id})).status_code == 201
        monkeypatch.setattr(call_dispatcher_async, "PATIENCE", 3600.0)  # no second session writes
        with psycopg.connect(url) as locker:
            locker.execute("select from holdfast.object where id = 'web-0' for update")
            first = change(ids[0])
            await until(lambda: waiters(locker) == 1, "the first change waits for its row")
            known = (await http.get("/sandboxes/web-1")).headers["etag"]
            late, others = change("web-1", known), [change(id) for id in ids[2:]]
            await until(lambda: waiting() >= {*ids[1:]}, "all others wait")
            await other.objects.update("@sandbox", "web-1", lambda record: {**record.payload, "metadata": {}})
        answers = [await task for task in (first, late, *others)]
    assert [answer.status_code for answer in answers] == [200, 412, *[200] * 8]
    assert [answer.json()["metadata"]["changed"] for answer in (answers[0], *answers[2:])] == [ids[0], *ids[2:]]
    versions = [answer.json()["version"] for answer in answers[2:]]
    commits = "select count(*), count(distinct xid::text) from holdfast.object_change where version = any(%s)"
    assert query(url, commits, versions) == [(8, 1)]


async def test_whoever_changes_whatever_is_there_is_not_told_that_somebody_was_faster(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = gateway.client.objects
    await http.post("/sandboxes", json={**NEW, "id": "web"})
    for condition, status in ((None, 412), ("*", 200)):
        put_if = objects.put_if

        async def late(*given: Any, put_if: Any = put_if, **more: Any) -> Any:
            monkeypatch.undo()
            await objects.update("@sandbox", "web", lambda record: {**record.payload, "metadata": {"by": "another"}})
            return await put_if(*given, **more)

        known = (await http.get("/sandboxes/web")).headers["etag"]
        monkeypatch.setattr(objects, "put_if", late)
        answer = await http.patch("/sandboxes/web", json={"labels": {}}, headers={"If-Match": condition or known})
        assert (answer.status_code, answer.headers["etag"] != known) == (status, True)
    assert (await http.get("/sandboxes/web")).json()["metadata"] == {"by": "another"}


@pytest.mark.parametrize(
    ("body", "about"),
    [
        ({}, "argv"),
        ({"argv": []}, "argv"),
        ({"argv": [""]}, "program"),
        ({"argv": ["a\0b"]}, "argv"),
        ({"argv": ["x"], "env": {"A=B": "1"}}, "env"),
        ({"argv": ["x"], "env": {"HOLDFAST_SUPERVISOR_TOKEN": "1"}}, "HOLDFAST_SUPERVISOR_TOKEN"),
        ({"argv": ["x"], "id": "../x"}, "id"),
        ({"argv": ["x"], "name": "a\nb"}, "name"),
        ({"argv": ["x"], "cwd": "here"}, "cwd"),
        ({"argv": ["x"], "limits": {"speed": 1}}, "speed"),
        ({"argv": ["x"], "labels": {"a b": "c"}}, "labels"),
        ({"argv": ["x"], "image": "x"}, "image"),
    ],
)
async def test_what_makes_no_sense_is_refused_before_anything_is_written(
    http: httpx.AsyncClient, body: dict[str, Any], about: str
) -> None:
    answer = await http.post("/sandboxes", json=body)
    assert answer.status_code == 422
    assert about in answer.json()["detail"]
    assert (await http.get("/sandboxes")).json() == {"items": [], "next": None}


async def test_what_could_not_be_told_again_spoils_no_list(http: httpx.AsyncClient) -> None:
    for metadata in (r'{"a": "\ud800"}', r'{"\ud800": 1}', '{"a": ' * 260 + "1" + "}" * 260):
        body = f'{{"argv": ["true"], "metadata": {metadata}}}'
        answer = await http.post("/sandboxes", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
    listed = await http.get("/sandboxes")
    assert (listed.status_code, listed.json()["items"]) == (200, [])


async def test_a_sandbox_is_told_of_an_entrance_that_outlives_the_replica_that_made_it(serving: Serving) -> None:
    async with serving(entrance="http://gw", advertise="http://10.0.0.7:7411") as http:
        await http.post("/sandboxes", json={**NEW, "id": "web"})
        record = await http.app.state.gateway.client.objects.get("@sandbox", "web")  # type: ignore[attr-defined]
        assert record.payload["gateway"] == "http://gw"


async def test_nothing_is_recorded_whose_status_could_not_be(http: httpx.AsyncClient) -> None:
    """A record has a size, and the driver tells again what it was asked to run."""
    large = "x" * 100_000
    for body in ({"argv": ["true", *[large] * 5]}, {"argv": ["true"], "metadata": {"a": large * 10}}):
        refused = await http.post("/sandboxes", json=body)
        assert (refused.status_code, "at most 400000 bytes" in refused.json()["detail"]) == (413, True)
    assert (await http.get("/sandboxes")).json()["items"] == []
    await http.post("/sandboxes", json={**NEW, "id": "web"})
    grown = await http.patch("/sandboxes/web", json={"metadata": {"a": "ü" * 70_000}}, headers={"If-Match": "*"})
    assert grown.status_code == 413


async def test_a_write_does_not_wait_for_a_driver_that_hangs(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watch and sweep do, with the record to themselves; but versions decide all the same."""
    monkeypatch.setattr(routes, "_RECONCILER_TIMEOUT", 0.01)
    await http.post("/sandboxes", json={**NEW, "id": "web"})
    async with gateway.reconciler.exclusive("web"), asyncio.timeout(PATIENCE):
        changed = await http.patch("/sandboxes/web", json={"metadata": {"a": 1}}, headers={"If-Match": "*"})
    assert changed.json()["metadata"] == {"a": 1}


async def test_a_driver_that_refuses_the_gateway_itself_is_no_mistake_of_the_client(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_: str) -> None:
        raise holdfast.DriverError("the driver refused: a token is needed", status=401)

    await http.post("/sandboxes", json={**NEW, "id": "web"})
    monkeypatch.setattr(gateway.driver, "get", refused)
    assert (await http.get("/sandboxes/web/log")).status_code == 502


async def test_what_cannot_be_is_said_clearly(http: httpx.AsyncClient) -> None:
    new = await http.post("/sandboxes", json={**NEW, "id": "web", "name": "web"})
    for body in ({**NEW, "id": "web"}, {**NEW, "name": "web"}):
        taken = await http.post("/sandboxes", json=body)
        assert (taken.status_code, taken.json()["owner"]) == (409, "web")
    fixed = await http.patch("/sandboxes/web", json={"argv": ["x"]}, headers={"If-Match": "*"})
    assert fixed.status_code == 422
    assert "argv of a sandbox cannot be changed" in fixed.json()["detail"]
    assert (await http.get("/sandboxes/none")).status_code == 404
    for wrong in ("team", ["team=a", "team=b"]):
        assert (await http.get("/sandboxes", params={"label": wrong})).status_code == 422
    going = await http.delete("/sandboxes/web", headers={"If-Match": new.headers["etag"]})
    assert (going.status_code, going.json()["phase"]) == (202, "Deleting")  # nobody can say yet that nothing runs
    assert going.json() == (await http.get("/sandboxes/web")).json()
    late = await http.patch("/sandboxes/web", json={"labels": {}}, headers={"If-Match": "*"})
    assert late.status_code == 409


async def test_pages_stay_what_they_are_while_others_come_and_go(http: httpx.AsyncClient) -> None:
    for number in range(7):
        await http.post("/sandboxes", json={**NEW, "id": f"b{number}", "labels": {"odd": str(number % 2)}})
    first = (await http.get("/sandboxes", params={"limit": 3})).json()
    assert [each["id"] for each in first["items"]] == ["b0", "b1", "b2"]
    await http.post("/sandboxes", json={**NEW, "id": "a"})
    second = (await http.get("/sandboxes", params={"limit": 3, "after": first["next"]})).json()
    assert [each["id"] for each in second["items"]] == ["b3", "b4", "b5"]
    last = (await http.get("/sandboxes", params={"limit": 3, "after": second["next"]})).json()
    assert ([each["id"] for each in last["items"]], last["next"]) == (["b6"], None)
    odd = (await http.get("/sandboxes", params={"label": "odd=1"})).json()
    assert [each["id"] for each in odd["items"]] == ["b1", "b3", "b5"]


def test_a_supervisor_needs_the_token_of_its_sandbox_and_no_operators(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    settings = Settings(url, driver=f"unix:{tmp_path / 'none.sock'}", tokens=parse("ops operate a-secret-of-operators"))
    with holdfast.Client(url) as client:
        payload = new_payload(new(argv=["true"], supervised=True), "http://here", OWN, Seal(()))
        assert OWN not in str(payload)
        client.objects.put_if("@sandbox", "web", payload, holdfast.MustCreate())
    with TestClient(create_app(settings), base_url="http://localhost") as http:
        assert http.get("/sandboxes/web").status_code == 401
        for token in ("a-secret-of-operators", ""):
            bearer = {"Host": "localhost", "Authorization": f"Bearer {token}"}
            with (
                pytest.raises(WebSocketDisconnect),
                http.websocket_connect("/sandboxes/web/supervisor", headers=bearer),
            ):
                pytest.fail("it was let in")
        bearer = {"Host": "localhost", "Authorization": f"Bearer {OWN}"}
        with (
            http.websocket_connect("/sandboxes/web/supervisor", headers=bearer) as older,
            http.websocket_connect("/sandboxes/web/supervisor", headers=bearer),
        ):
            assert older.receive()["code"] == 4001, "the newest connection is the one that counts"


def test_what_is_due() -> None:
    payload = new_payload(new(argv=["true"]), "http://here", None, Seal(()))
    seen = {**payload, "status": {"phase": "Ready", "conditions": []}}
    going = {**payload, "status": {"phase": "Deleting"}}
    ours = holdfast.reconciler.Backend("a", details={"owner": owner(payload, "home")})
    ending = holdfast.reconciler.Backend("a", deleting=True, details=ours.details)
    earlier = holdfast.reconciler.Backend("a", details={"owner": "home/earlier"})
    foreign = holdfast.reconciler.Backend("a", details={"owner": "away/1"})
    for given, backend, step in (
        (payload, None, SandboxAction.CREATE),
        (seen, None, SandboxAction.KEEP),
        (going, None, SandboxAction.KEEP),
        (None, None, SandboxAction.KEEP),
        (payload, ours, SandboxAction.KEEP),
        (going, ours, SandboxAction.END),
        (going, ending, SandboxAction.KEEP),
        (None, ours, SandboxAction.END),
        (payload, earlier, SandboxAction.END),
        (payload, foreign, SandboxAction.KEEP),
        (None, foreign, SandboxAction.KEEP),
    ):
        assert due_action(given, backend, "home") is step, (given, backend)


def test_which_version_a_condition_names() -> None:
    assert matches('"7"', 7, weak=False)
    assert matches('"5", "7"', 7, weak=False)
    assert matches(" * ", 7, weak=False)
    assert not matches('W/"7"', 7, weak=False)
    assert matches('W/"7"', 7, weak=True)
    assert not matches('"70"', 7, weak=True)
    for wrong in ("7", "", '"7', 'x"7"', "W/7"):
        with pytest.raises(ValueError, match="in quotes"):
            matches(wrong, 7, weak=True)
