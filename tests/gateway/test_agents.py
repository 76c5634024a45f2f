"""Agents in one replica: each sentence about hooks and injections, shown with locks held by others."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.gateway import agents as package
from holdfast.gateway.agents import records, workers
from tests.children import PATIENCE, query, until
from tests.conftest import fresh
from tests.gateway.local_replica import SAID, LocalReplica, open_local_replica


async def test_hooks_make_agents_commands_and_turns(local: LocalReplica) -> None:
    started = await local.send_hooks("session-start", cwd="/srv/app")
    assert started == {"agent": 1, "state": "idle", "command": None, "turn": None, "additional_context": None}
    assert (await local.send_hooks("user-prompt-submit"))["state"] == "working"
    assert (await local.send_hooks("pre-tool-use", "permission-request"))["state"] == "waiting"
    assert (await local.send_hooks("post-tool-use"))["state"] == "working"
    await local.send_hooks("notification", "pre-tool-use", "post-tool-use", "stop")
    agent = await local.get("/agents/1")
    assert (agent["cwd"], agent["tools"], agent["turns"], agent["state"]) == ("/srv/app", 2, 4, "working")
    assert [each["kind"] for each in (await local.get("/agents/1/turns"))["turns"]] == [
        "prompt", "permission", "notification", "answer",
    ]  # fmt: skip
    assert await local.commands() == [("running", None)]
    assert (await local.send_hooks("session-end", reason="logout"))["state"] == "ended"
    assert await local.commands() == [("complete", "session-end")]
    assert (await local.send_hooks("user-prompt-submit"))["state"] == "ended", "only session-start leads out of it"
    assert (await local.send_hooks("session-start"))["state"] == "idle"
    assert [each["number"] for each in (await local.get("/agents"))["agents"]] == [1]
    assert (await local.get("/agents/1/turns?after=1&limit=2"))["turns"][-1]["number"] == 3
    for missing in ("/agents/2", "/agents/2/turns", "/agents/0"):
        assert (await local.http.get(missing)).status_code in (404, 422)
    assert (await local.hook("undress")).status_code == 422


async def test_a_hook_correlates_without_a_lock_then_takes_it_and_gives_up_in_time(
    local: LocalReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert records.LOCK_TIMEOUT == 15.0
    async with local.other._reserved_lock("agent", 1, timeout=15.0):
        with monkeypatch.context() as patched:
            patched.setattr(records, "LOCK_TIMEOUT", 0.1)
            busy = await local.hook("session-start")
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        assert busy.headers["content-type"] == "application/problem+json"
        assert busy.json().keys() >= {"title", "detail", "requestId", "agent"}
        assert local.requested_locks == [("agent", 1)]
        agent = await local.get("/agents/1")
        assert (agent["session_id"], agent["state"]) == ("s", "expected"), "correlated, but not processed"
    assert (await local.send_hooks("session-start"))["agent"] == 1
    assert (await local.get("/hook/status"))["busy"] == 1


async def test_state_is_read_under_the_lock_and_not_before_it(local: LocalReplica) -> None:
    await local.send_hooks("user-prompt-submit")
    local.lock_requested.clear()
    async with local.other._reserved_lock("agent", 1, timeout=15.0):
        waits = asyncio.create_task(local.send_hooks("user-prompt-submit"))
        await local.lock_requested.wait()
        await local.amend(turns=41, pending=[])
    assert (await waits)["turn"] == 42


async def test_the_status_takes_no_lock(local: LocalReplica) -> None:
    await local.send_hooks("session-start")
    local.requested_locks.clear()
    async with local.other._reserved_lock("agent", 1, timeout=15.0):
        status = await local.get("/hook/status")
    assert local.requested_locks == []
    assert status["hooks"] == {"session-start": 1}
    assert status["replica"] == local.gateway.replica


async def test_the_first_session_in_a_folder_is_that_of_the_agent_announced_there(local: LocalReplica) -> None:
    announced = await local.http.post("/agents", json={"cwd": "/srv/app"})
    assert (announced.status_code, announced.json()["state"]) == (201, "expected")
    assert (await local.http.post("/agents", json={"cwd": "/srv/app"})).status_code == 409
    assert (await local.http.post("/agents", json={"cwd": "/srv/x", "sandbox": "sb-1"})).status_code == 422
    answers = await asyncio.gather(*(local.hook("session-start", f"s{n}", cwd="/srv/app") for n in range(6)))
    numbers = [answer.json()["agent"] for answer in answers]
    assert len(set(numbers)) == 6
    assert announced.json()["number"] in numbers, "one of them was expected"
    assert (await local.send_hooks("session-start", session="s3"))["agent"] == numbers[3]


async def test_a_hook_is_whole_although_its_replica_fails_in_the_midst_of_it(
    local: LocalReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise holdfast.EngineError("gone")

    await local.send_hooks("session-start")
    with monkeypatch.context() as patch:
        patch.setattr(records, "_write", fails)
        assert (await local.hook("user-prompt-submit")).status_code == 503
    assert await local.other.objects.list("@turn") == []
    assert (await local.get("/agents/1/turns"))["turns"][0]["text"] == SAID["prompt"], "it is committed, and seen"
    assert (await workers.sweep(local.gateway, workers.WATCHDOG)).done == [1]
    assert [len(await local.other.objects.list(kind)) for kind in ("@turn", "@command")] == [1, 1]
    with monkeypatch.context() as patch:
        patch.setattr(records, "_write", fails)
        assert (await local.hook("session-end")).status_code == 503
    assert await local.commands() == [("interrupted", "session-end")]
    await local.send_hooks("session-start")
    assert (await local.other.objects.list("@command"))[0].payload["status"] == "interrupted", (
        "the next one has mended it"
    )


async def test_of_two_injections_at_once_one_is_made_and_told_once(local: LocalReplica) -> None:
    await local.send_hooks("session-start")
    body = {"prompt": "You look after the tests.", "skills": ["pytest"]}
    local.requested_locks.clear()
    async with local.other._reserved_lock("agent", 1, timeout=15.0):
        both = [asyncio.create_task(local.http.post("/agents/1/injection", json=body)) for _ in range(2)]
        while len(local.requested_locks) < 2:  # noqa: ASYNC110 - both have looked before: neither was made
            await asyncio.sleep(0)
    answers = [await each for each in both]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert sorted(answer.json()["injected"] for answer in answers) == [False, True]
    assert len({answer.json()["prompt_injected_at"] for answer in answers}) == 1
    assert (await local.get("/agents/1"))["inbox"] == ["You look after the tests.\nUse the skill pytest."]
    told = [(await local.send_hooks("user-prompt-submit"))["additional_context"] for _ in range(2)]
    assert told == ["You look after the tests.\nUse the skill pytest.", None]
    assert (await local.http.post("/agents/2/injection", json=body)).status_code == 404


async def test_hooks_travel_together_and_reads_do_not_wait_for_them(tmp_path: Path) -> None:
    """They wait for a lock on the table, on every session that may write."""
    url = fresh()
    async with open_local_replica(url, tmp_path) as local, AsyncExitStack() as at_end:
        await local.send_hooks("session-start")
        stuck = at_end.enter_context(psycopg.connect(url))
        stuck.execute("lock table holdfast.object in exclusive mode")
        hooks = [asyncio.create_task(local.send_hooks("session-start", session=f"s-{each}")) for each in range(8)]
        channels = local.gateway.client._engine._dispatcher._channels
        await until(lambda: all(channel.batch for channel in channels[:-1]), "each of them sends a hook")
        assert (await local.get("/agents/1"))["state"] == "idle"
        assert not any(hook.done() for hook in hooks)
        stuck.rollback()
        await asyncio.gather(*hooks)
        [(writes, commits)] = query(url, "select count(*), count(distinct xid::text) from holdfast.object_change")
        assert commits < writes


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_all_locks_that_are_held_are_told_with_their_count(tmp_path: Path, engine: str) -> None:
    url = fresh() if engine == "postgres" else f"sqlite:///{tmp_path / 'app.db'}"
    async with open_local_replica(url, tmp_path) as local:
        await local.send_hooks("session-start")
        async with local.other._reserved_lock("agent", 1, timeout=15.0), local.other.lock(("agent", 1)):
            found = await local.get("/api/advisory-locks")
            assert found["count"] == len(found["locks"]) >= 2
            held = {(each["namespace"], each["entity_id"]) for each in found["locks"]}
            assert held >= {("holdfast:agent", 1), ("agent", 1)}
        left = (await local.get("/api/advisory-locks"))["locks"]
        assert not {"agent", "holdfast:agent"} & {each["namespace"] for each in left}, (
            "but those of the replica's own leases"
        )


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_the_age_of_a_lock_is_the_same_in_the_api_and_on_the_dashboard(tmp_path: Path, engine: str) -> None:
    url = fresh() if engine == "postgres" else f"sqlite:///{tmp_path / 'app.db'}"
    async with open_local_replica(url, tmp_path) as local, local.other.lock("long"):
        since = time.time()
        page = re.compile(r'title="long".*?data-for="([0-9.]+)"', re.DOTALL)

        async def listed(path: str) -> Any:
            async with AsyncExitStack() as short:
                for number in range(10):
                    await short.enter_async_context(local.other.lock(f"short {number}"))
                return next((each for each in (await local.get(path))["locks"] if each["name"] == "long"), {})

        async def has_age() -> bool:
            ages = [(await listed(path)).get("duration") for path in ("/api/advisory-locks", "/api/locks")]
            shown = page.search((await local.http.get("/")).text)
            if shown is None or None in ages:
                return False
            ages.append(time.time() - float(shown[1]))
            return all(time.time() - since - 1 < each < time.time() - since + 1 for each in ages)

        async with asyncio.timeout(PATIENCE):
            while time.time() - since < 2 or not await has_age():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.1)
        every = await listed("/api/locks")
        assert (await listed("/api/advisory-locks")).keys() == every.keys()
        assert every["holder"].split(":")[1] == str(os.getpid())


def test_no_lock_of_this_process_keeps_anybody_from_an_agent() -> None:
    """They would be worth nothing beside a second replica. What there is bounds our own connections."""
    folder = Path(package.__file__).parent
    found = {
        (file.name, node.attr)
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("Lock", "RLock", "Semaphore", "Condition")
    }
    assert found == {("replica_state.py", "Semaphore")}
