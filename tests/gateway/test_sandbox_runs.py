"""Sandboxes at one replica with a driver: what really runs, and what a replica that died has left undone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import holdfast
from holdfast.commands import run
from holdfast.commands.gateway import to_be_deleted
from holdfast.gateway.app import create_app
from holdfast.gateway.context import Gateway
from holdfast.gateway.sandboxes.records import new_payload
from holdfast.gateway.sandboxes.routes import until_stopped
from holdfast.gateway.settings import Settings
from tests.children import PATIENCE, eventually
from tests.driver.daemon import Daemon, runs
from tests.gateway.replicas import Replica
from tests.gateway.test_sandboxes import NEW, new


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
    becomes(replica, "group", "Completed")


def test_what_has_ended_is_pruned_by_a_governed_command_and_nothing_else(replica: Replica) -> None:
    for id, argv in (("over", ["true"]), ("alive", ["sleep", "1000"])):
        replica.http.post("/sandboxes", json={"id": id, "argv": argv})
    becomes(replica, "over", "Completed")
    becomes(replica, "alive", "Ready")
    with holdfast.Client(replica.url) as client:
        told = run(client, "sandbox.prune", {"older": 0}, actor="jane", reason="tidy", dry_run=True)
        assert "ended sandbox 'over' is deleted" in told.changes
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
            record = await gateway.client.objects.get("@sandbox", id)
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
    payload = new_payload(given, gateway.address, "lost with its replica" if supervised else None, gateway.seal)
    await gateway.client.objects.put_if("@sandbox", "web", payload, holdfast.MustCreate())
    record = await phase_is(gateway, "web", "Provisioning" if supervised else "Ready")
    pid = await pid_of(gateway, "web")
    assert runs(pid)
    assert len(record.payload["tokens"]) == (2 if supervised else 0)
    await gateway.client.objects.update("@sandbox", "web", lambda found: to_be_deleted(found.payload))
    await phase_is(gateway, "web", None)
    assert await gateway.driver.get("web") is None
    assert not runs(pid)
    assert gateway.reconciler.status().errors == 0


async def test_what_runs_without_a_record_is_ended_unless_it_is_somebody_elses(complete: FastAPI) -> None:
    gateway: Gateway = complete.state.gateway
    backends = gateway.backends
    installation = await backends.installation()
    for id, whose in (("stray", f"{installation}/gone"), ("other", "elsewhere/1"), ("nobodys", None)):
        await gateway.driver.create(id, ["sleep", "1000"], owner=whose, grace=0.1)
    await backends.end_orphans()
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


async def test_a_watch_that_is_ended_twice_leaves_no_connection(complete: FastAPI) -> None:
    """As at the end of a replica on a busy machine: cancelled, and again while it waits for what it has begun."""
    watch = complete.state.gateway.backends.watch()
    await anext(watch)
    connection = watch.ag_frame.f_locals["events"]._connection._writer
    hearing = asyncio.ensure_future(anext(watch))
    for _ in range(3):
        await asyncio.sleep(0)
    hearing.cancel()
    await asyncio.sleep(0)
    hearing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hearing
    assert connection.is_closing()
