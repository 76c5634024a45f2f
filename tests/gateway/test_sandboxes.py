"""Sandboxes at one replica: what the store answers without a driver, and what really runs with one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocketDisconnect
from fastapi.testclient import TestClient

import holdfast
from holdfast.gateway.app import create_app
from holdfast.gateway.context import Gateway
from holdfast.gateway.sandboxes.models import NewSandbox
from holdfast.gateway.sandboxes.records import Step, due, made, matches, owner
from holdfast.gateway.sandboxes.routes import until_stopped
from holdfast.gateway.settings import Settings
from holdfast.gateway.tokens import parse
from holdfast.operator import run
from holdfast.operator.gateway import to_be_deleted
from tests.children import PATIENCE, eventually
from tests.driver.daemon import Daemon, runs
from tests.gateway.conftest import Serving
from tests.gateway.replicas import Replica

NEW: dict[str, Any] = {"argv": ["sleep", "1000"]}


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


async def test_whoever_changes_whatever_is_there_is_not_told_that_somebody_was_faster(
    gateway: Gateway, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = gateway.client.objects
    await http.post("/sandboxes", json={**NEW, "id": "web"})
    for condition, status in ((None, 412), ("*", 200)):
        put_if = objects.put_if

        async def late(*given: Any, put_if: Any = put_if, **more: Any) -> Any:
            monkeypatch.undo()
            await objects.update("sandbox", "web", lambda record: {**record.payload, "metadata": {"by": "another"}})
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
        record = await http.app.state.gateway.client.objects.get("sandbox", "web")  # type: ignore[attr-defined]
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


async def test_what_cannot_be_is_said_clearly(http: httpx.AsyncClient) -> None:
    new = await http.post("/sandboxes", json={**NEW, "id": "web", "name": "web"})
    for body in ({**NEW, "id": "web"}, {**NEW, "name": "web"}):
        taken = await http.post("/sandboxes", json=body)
        assert (taken.status_code, taken.json()["owner"]) == (409, "web")
    fixed = await http.patch("/sandboxes/web", json={"argv": ["x"]}, headers={"If-Match": "*"})
    assert fixed.status_code == 422
    assert "argv of what runs cannot be changed" in fixed.json()["detail"]
    assert (await http.get("/sandboxes/none")).status_code == 404
    assert (await http.get("/sandboxes", params={"label": "team"})).status_code == 422
    going = await http.delete("/sandboxes/web", headers={"If-Match": new.headers["etag"]})
    assert (going.status_code, going.json()["phase"]) == (202, "Deleting")  # nobody can say yet that nothing runs
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


# --- what really runs


def becomes(replica: Replica, id: str, phase: str) -> dict[str, Any]:
    eventually(lambda: replica.http.get(f"/sandboxes/{id}").json().get("phase") == phase, f"{id} is {phase}")
    found: dict[str, Any] = replica.http.get(f"/sandboxes/{id}").json()
    return found


def test_a_sandbox_runs_its_log_and_exit_code_can_be_read(replica: Replica) -> None:
    script = "echo one; echo two; echo $GREETING; exit 3"
    body = {"id": "ends", "argv": ["sh", "-c", script], "env": {"GREETING": "hello"}}
    assert replica.http.post("/sandboxes", json=body).status_code == 201
    ended = becomes(replica, "ends", "Error")
    assert ended["status"]["details"]["exit_code"] == 3
    assert replica.http.get("/sandboxes/ends/log").text == "one\ntwo\nhello\n"
    assert replica.http.get("/sandboxes/ends/log", params={"tail": 1}).text == "hello\n"
    assert replica.http.get("/sandboxes/ends/log", params={"offset": 4}).text == "two\nhello\n"
    assert replica.http.get("/sandboxes/ends/log", params={"offset": 4, "tail": 1}).status_code == 422
    assert replica.http.get("/sandboxes/none/log").status_code == 404


def test_a_log_is_followed_to_the_end(replica: Replica) -> None:
    script = "echo begun; while [ ! -e go ]; do sleep 0.02; done; echo done"
    replica.http.post("/sandboxes", json={"id": "long", "argv": ["sh", "-c", script]})
    pid = becomes(replica, "long", "Ready")["status"]["details"]["pid"]
    with replica.http.stream("GET", "/sandboxes/long/log", params={"follow": True}) as answer:
        pieces = answer.iter_text()
        assert next(pieces) == "begun\n"
        Path(f"/proc/{pid}/cwd/go").touch()
        assert "".join(pieces) == "done\n"


def test_a_delete_ends_the_whole_process_group_and_the_record_is_gone(replica: Replica) -> None:
    """Two processes, of which one does not hear TERM."""
    script = "sh -c 'trap \"\" TERM; echo $$; while :; do sleep 1000; done' & echo $$; wait"
    body = {"id": "group", "name": "group", "argv": ["sh", "-c", script], "grace": 0.2}
    replica.http.post("/sandboxes", json=body)
    becomes(replica, "group", "Ready")
    eventually(lambda: len(replica.http.get("/sandboxes/group/log").text.split()) == 2, "both run")
    pids = [int(each) for each in replica.http.get("/sandboxes/group/log").text.split()]
    assert all(map(runs, pids))
    answer = replica.http.delete("/sandboxes/group", headers={"If-Match": "*"})
    assert answer.status_code == 204, answer.text
    assert not any(map(runs, pids))
    assert replica.http.get("/sandboxes/group").status_code == 404
    again = replica.http.post("/sandboxes", json={"id": "group", "name": "group", "argv": ["true"]})
    assert again.status_code == 201
    becomes(replica, "group", "Error")


def test_what_has_ended_is_pruned_by_a_governed_command_and_nothing_else(replica: Replica) -> None:
    for id, argv in (("over", ["true"]), ("alive", ["sleep", "1000"])):
        replica.http.post("/sandboxes", json={"id": id, "argv": argv})
    becomes(replica, "over", "Error")
    becomes(replica, "alive", "Ready")
    with holdfast.Client(replica.url) as client:
        told = run(client, "sandbox.prune", {"older": 0}, actor="jane", reason="tidy", dry_run=True)
        assert "sandbox 'over', which has ended, is deleted" in told.changes
        assert not [each for each in told.changes if "alive" in each]
        run(client, "sandbox.prune", {"older": 0}, actor="jane", reason="tidy")
    eventually(lambda: replica.http.get("/sandboxes/over").status_code == 404, "the leader has ended it")
    assert replica.http.get("/sandboxes/alive").json()["phase"] == "Ready"


def test_it_is_the_supervisor_of_a_sandbox_that_makes_it_ready(replica: Replica) -> None:
    replica.http.post("/sandboxes", json={"id": "dull", "argv": ["sleep", "1000"], "supervised": True})
    eventually(lambda: replica.http.get("/sandboxes/dull").json()["status"].get("conditions"), "it runs")
    assert replica.http.get("/sandboxes/dull").json()["phase"] == "Provisioning"
    nobody = replica.http.post("/sandboxes/dull/messages", json={"message": "?"})
    assert (nobody.status_code, nobody.headers["retry-after"]) == (409, "1")
    assert replica.http.get("/sandboxes/dull/supervisor").status_code == 409


async def test_a_log_in_which_nothing_is_written_does_not_hold_up_the_end(gateway: Gateway) -> None:
    async def quiet() -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.Event().wait()

    followed = until_stopped(gateway, quiet())
    assert await anext(followed) == b"begun"
    rest = asyncio.ensure_future(anext(followed, None))
    await asyncio.sleep(0)
    gateway.stopping.set()
    assert await asyncio.wait_for(rest, PATIENCE) is None


# --- what is left undone by a replica that died is done by whoever leads


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "d") as made:
        yield made


@pytest.fixture
async def complete(tmp_path: Path, driver: Daemon) -> AsyncIterator[FastAPI]:
    """A replica in this process, with a driver."""
    app = create_app(Settings(f"sqlite:///{tmp_path / 'app.db'}", driver=driver.address))
    async with app.router.lifespan_context(app):
        yield app


def new(**given: Any) -> dict[str, Any]:
    """As a route gets it."""
    return {**NewSandbox.model_validate(given).model_dump(), "limits": {}}


async def pid_of(gateway: Gateway, id: str) -> int:
    async with asyncio.timeout(PATIENCE):
        while True:
            found = await gateway.driver.get(id)
            if found is not None and found.details["pid"] is not None:
                return int(found.details["pid"])
            await asyncio.sleep(0.01)


async def phase_is(gateway: Gateway, id: str, phase: str | None) -> Any:
    async with asyncio.timeout(PATIENCE):
        while True:
            record = await gateway.client.objects.get("sandbox", id)
            if (record and record.payload.get("status", {}).get("phase")) == phase:
                return record
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("supervised", [False, True])
async def test_a_crash_between_record_and_driver_comes_to_a_running_sandbox(
    complete: FastAPI, supervised: bool
) -> None:
    """And one between the mark and the driver to a dead process group."""
    gateway: Gateway = complete.state.gateway
    given = new(argv=["sleep", "1000"], grace=0.1, supervised=supervised)
    payload = made(given, gateway.address, "lost with its replica" if supervised else None)
    await gateway.client.objects.put_if("sandbox", "web", payload, holdfast.MustCreate())
    record = await phase_is(gateway, "web", "Provisioning" if supervised else "Ready")
    pid = await pid_of(gateway, "web")
    assert runs(pid)
    assert len(record.payload["tokens"]) == (2 if supervised else 0)
    await gateway.client.objects.update("sandbox", "web", lambda found: to_be_deleted(found.payload))
    await phase_is(gateway, "web", None)
    assert await gateway.driver.get("web") is None
    assert not runs(pid)
    assert gateway.reconciler.status().errors == 0


async def test_what_runs_without_a_record_is_ended_unless_it_is_somebody_elses(complete: FastAPI) -> None:
    gateway: Gateway = complete.state.gateway
    backends = gateway.rooms["backends"]
    home = await backends.home()
    for id, whose in (("stray", f"{home}/gone"), ("other", "elsewhere/1"), ("nobodys", None)):
        await gateway.driver.create(id, ["sleep", "1000"], owner=whose, grace=0.1)
    await backends.end_strays()
    left = await gateway.driver.get("stray")
    assert left is None or left.deleting
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=complete), base_url="http://localhost") as http:
        taken = await http.post("/sandboxes", json={**NEW, "id": "other"})
        assert taken.status_code == 409
        assert (await http.get("/sandboxes/other")).status_code == 404
    for id in ("other", "nobodys"):
        found = await gateway.driver.get(id)
        assert found is not None
        assert not found.deleting
        await pid_of(gateway, id)  # what has begun by the end of the test is ended with it


def test_a_supervisor_needs_the_token_of_its_sandbox_and_no_operators(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    settings = Settings(url, driver=f"unix:{tmp_path / 'none.sock'}", tokens=parse("ops operate a-secret-of-operators"))
    with holdfast.Client(url) as client:
        payload = made(new(argv=["true"], supervised=True), "http://here", "its own")
        assert "its own" not in str(payload)
        client.objects.put_if("sandbox", "web", payload, holdfast.MustCreate())
    with TestClient(create_app(settings), base_url="http://localhost") as http:
        assert http.get("/sandboxes/web").status_code == 401
        for token in ("a-secret-of-operators", ""):
            bearer = {"Host": "localhost", "Authorization": f"Bearer {token}"}
            with (
                pytest.raises(WebSocketDisconnect),
                http.websocket_connect("/sandboxes/web/supervisor", headers=bearer),
            ):
                pytest.fail("it was let in")
        bearer = {"Host": "localhost", "Authorization": "Bearer its own"}
        with (
            http.websocket_connect("/sandboxes/web/supervisor", headers=bearer) as older,
            http.websocket_connect("/sandboxes/web/supervisor", headers=bearer),
        ):
            assert older.receive()["code"] == 4001, "the newest connection is the one that counts"


def test_what_is_due() -> None:
    payload = made(new(argv=["true"]), "http://here", None)
    seen = {**payload, "status": {"phase": "Ready", "conditions": []}}
    going = {**payload, "status": {"phase": "Deleting"}}
    ours = holdfast.Backend("a", details={"owner": owner(payload, "home")})
    ending = holdfast.Backend("a", deleting=True, details=ours.details)
    earlier = holdfast.Backend("a", details={"owner": "home/earlier"})
    foreign = holdfast.Backend("a", details={"owner": "away/1"})
    for given, backend, step in (
        (payload, None, Step.MAKE),
        (seen, None, Step.KEEP),
        (going, None, Step.KEEP),
        (None, None, Step.KEEP),
        (payload, ours, Step.KEEP),
        (going, ours, Step.END),
        (going, ending, Step.KEEP),
        (None, ours, Step.END),
        (payload, earlier, Step.END),
        (payload, foreign, Step.KEEP),
        (None, foreign, Step.KEEP),
    ):
        assert due(given, backend, "home") is step, (given, backend)


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
