"""Agents of three real replicas on one PostgreSQL."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.gateway.agents import worker_rules, workers
from tests.children import eventually
from tests.conftest import fresh
from tests.gateway.local_replica import open_local_replica
from tests.gateway.replicas import Replica, fleet

PATIENT = """
    from holdfast.gateway.agents import records
    records.LOCK_TIMEOUT = 600.0
"""
"""A hook waits for its agent, however slow the machine is."""


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[list[Replica]]:
    """Three on one PostgreSQL. A stop that is put off is put off for longer than any test takes."""
    with fleet(fresh(), folder, feature=PATIENT, HOLDFAST_STOP_DELAY="3600") as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as made:
        yield made


@pytest.fixture
def client(replicas: list[Replica]) -> Iterator[holdfast.Client]:
    with holdfast.Client(replicas[0].url) as made:
        yield made


def hook(replica: Replica, kind: str, session: str, **more: Any) -> httpx.Response:
    return replica.http.post(f"/hook/{kind}", json={"session_id": session, **more})


def all_wait(client: holdfast.Client, number: int) -> None:
    """Until each of the replicas stands in the server's line for the agent."""

    def in_line() -> int:
        locks = client.locks.list()
        return sum(
            not each.granted and (each.namespace, each.entity_id) == ("holdfast:agent", number) for each in locks
        )

    eventually(lambda: in_line() == 3, "each replica waits for the lock")


def test_hooks_of_one_agent_are_handled_one_after_the_other(
    replicas: list[Replica], client: holdfast.Client, pool: ThreadPoolExecutor
) -> None:
    starts = [pool.submit(hook, each, "session-start", "one", cwd="/srv/one") for each in replicas * 3]
    [number] = {start.result().json()["agent"] for start in starts}  # nine at once have found, or made, the same one

    with client._reserved_lock("agent", number, timeout=15.0):
        prompts: list[Future[httpx.Response]] = [
            pool.submit(hook, each, "user-prompt-submit", "one", prompt="go on") for each in replicas * 7
        ]
        all_wait(client, number)
        assert not any(each.done() for each in prompts)
    answers = [each.result() for each in prompts]
    assert [answer.status_code for answer in answers] == [200] * len(prompts)
    assert sorted(answer.json()["turn"] for answer in answers) == list(range(1, len(prompts) + 1))
    assert {answer.json()["command"] for answer in answers} == {1}
    for each in replicas:
        assert each.http.get(f"/agents/{number}").json()["turns"] == len(prompts)
        turns = each.http.get(f"/agents/{number}/turns").json()["turns"]
        assert [turn["number"] for turn in turns] == list(range(1, len(prompts) + 1))


def test_hooks_of_different_agents_do_not_wait_for_each_other(
    replicas: list[Replica], client: holdfast.Client, pool: ThreadPoolExecutor
) -> None:
    busy, idle = (hook(replicas[0], "session-start", session).json()["agent"] for session in ("busy", "idle"))
    assert busy != idle
    with client._reserved_lock("agent", busy, timeout=15.0):
        waits = [pool.submit(hook, each, "user-prompt-submit", "busy", prompt="?") for each in replicas]
        all_wait(client, busy)
        for each in replicas:
            assert hook(each, "user-prompt-submit", "idle", prompt="!").status_code == 200
            assert each.http.get("/hook/status").json()["under_way"] == 1
        assert not any(each.done() for each in waits)
        held = replicas[0].http.get("/api/advisory-locks").json()
        assert held["count"] == len(held["locks"])
        assert [each["entity_id"] for each in held["locks"] if each["namespace"] == "holdfast:agent"] == [busy]
        assert held["waiting"] >= 3, "beside those who stand by to lead"
    assert sorted(each.result().json()["turn"] for each in waits) == [1, 2, 3]


def test_of_injections_through_all_replicas_one_is_made(
    replicas: list[Replica], client: holdfast.Client, pool: ThreadPoolExecutor
) -> None:
    number = hook(replicas[0], "session-start", "injected").json()["agent"]
    with client._reserved_lock("agent", number, timeout=15.0):
        path, body = f"/agents/{number}/injection", {"prompt": "be brief"}
        answers = [pool.submit(each.http.post, path, json=body) for each in replicas]
        all_wait(client, number)  # and each has read the record before
    assert sorted(each.result().json()["injected"] for each in answers) == [False, False, True]
    told = [hook(each, "user-prompt-submit", "injected").json()["additional_context"] for each in replicas]
    assert told == ["be brief", None, None]


async def test_a_deferred_stop_outlives_the_replica_it_came_to(replicas: list[Replica], tmp_path: Path) -> None:
    number = hook(replicas[1], "user-prompt-submit", "left", prompt="do it").json()["agent"]
    assert hook(replicas[1], "stop", "left", last_assistant_message="done").status_code == 200
    replicas[1].end(signal.SIGKILL)
    assert replicas[0].http.get(f"/agents/{number}").json()["command"]["status"] == "running"
    async with open_local_replica(
        replicas[0].url, tmp_path
    ) as local:  # a fourth replica, to whose watchdog it is late already
        assert (await local.get(f"/agents/{number}"))["stop_at"] > time.time()
        await local.amend(number, stop_at=time.time() - 2 * worker_rules.GRACE)
        await workers.sweep(local.gateway, workers.WATCHDOG)
    eventually(  # by that watchdog, or by one of the others, which look every 10 s
        lambda: replicas[0].http.get(f"/agents/{number}").json()["command"] is None, "the stop is carried out"
    )
    replicas[1].restart()
    assert hook(replicas[1], "session-end", "left").json()["state"] == "ended"
    [command] = replicas[2].http.get(f"/agents/{number}/commands").json()["commands"]
    assert (command["status"], command["ended_by"]) == ("complete", "watchdog")
