"""The examples in examples/locks do what they say, against a real server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import psycopg
import pytest
from flask import Flask

import holdfast
from examples.locks import deferred_stop, fastapi_hooks, flask_hooks, llm_calls, sweeper
from examples.locks.agents import create_table
from tests.children import PATIENCE, query
from tests.cli.command import ROOT

HOOKS = [f"event-{number}" for number in range(12)]


@pytest.fixture
def agents(postgres_url: str) -> str:
    create_table(postgres_url, 7, 8)
    return postgres_url


def agent(url: str, number: int = 7) -> dict[str, Any]:
    [(status, seen, events)] = query(url, "select status, last_seen, events from agent where id = %s", number)
    return {"status": status, "last_seen": seen, "events": events}


@asynccontextmanager
async def fastapi(url: str, patience: float = PATIENCE) -> AsyncIterator[httpx.AsyncClient]:
    app = fastapi_hooks.create_app(url, patience=patience)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        yield http


async def test_fastapi_hooks_of_one_agent_lose_no_event(agents: str) -> None:
    async with fastapi(agents) as one, fastapi(agents) as other:  # two replicas
        posts = [http.post(f"/agents/7/hooks/{event}") for event, http in zip(HOOKS, [one, other] * 6, strict=True)]
        answers = await asyncio.gather(*posts)
        assert [answer.status_code for answer in answers] == [200] * len(HOOKS)
        assert sorted(answer.json()["events"] for answer in answers) == list(range(1, len(HOOKS) + 1))
        assert (await one.post("/agents/9/hooks/x")).status_code == 404
        assert (await one.post(f"/agents/{2**31}/hooks/x")).status_code == 422
    assert sorted(agent(agents)["events"]) == sorted(HOOKS)


async def test_fastapi_hooks_of_another_agent_do_not_wait(agents: str) -> None:
    async with holdfast.AsyncClient(agents) as client, fastapi(agents) as patient, fastapi(agents, 0.2) as hasty:
        async with client.lock(("agent", 7)):
            assert (await patient.post("/agents/8/hooks/x")).json() == {"events": 1}
            busy = await hasty.post("/agents/7/hooks/x")
            assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        assert (await patient.post("/agents/7/hooks/x")).json() == {"events": 1}


@pytest.fixture
def flask(agents: str) -> Iterator[Flask]:
    app = flask_hooks.create_app(agents, patience=PATIENCE)
    yield app
    flask_hooks.close(app)


def test_flask_hooks_of_one_agent_lose_no_event(flask: Flask, agents: str) -> None:
    codes: list[int] = []

    def post(event: str) -> None:
        codes.append(flask.test_client().post(f"/agents/7/hooks/{event}").status_code)

    threads = [threading.Thread(target=post, args=[event]) for event in HOOKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert codes == [200] * len(HOOKS)
    assert sorted(agent(agents)["events"]) == sorted(HOOKS)
    for missing in (9, 2**31):
        assert flask.test_client().post(f"/agents/{missing}/hooks/x").status_code == 404


def test_flask_hooks_of_another_agent_do_not_wait(flask: Flask, agents: str) -> None:
    hasty = flask_hooks.create_app(agents, patience=0.2)
    try:
        with holdfast.Client(agents) as client, client.lock(("agent", 7)):
            assert flask.test_client().post("/agents/8/hooks/x").json == {"events": 1}
            busy = hasty.test_client().post("/agents/7/hooks/x")
            assert (busy.status_code, busy.headers["Retry-After"]) == (503, "1")
    finally:
        flask_hooks.close(hasty)


def test_the_hooks_would_lose_events_without_the_lock(agents: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail."""
    app = flask_hooks.create_app(agents)
    both_have_read = threading.Barrier(2)
    engine = app.extensions["engine"]
    begin = engine.begin
    readers = threading.local()

    def begin_in_step() -> Any:
        if hasattr(readers, "has_read"):  # the second one is to write with
            both_have_read.wait(PATIENCE)
        readers.has_read = True
        return begin()

    monkeypatch.setattr(engine, "begin", begin_in_step)
    threads = [threading.Thread(target=flask_hooks.record, args=[engine, 7, event]) for event in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    flask_hooks.close(app)
    assert len(agent(agents)["events"]) == 1


def test_the_sweeper_skips_who_is_being_served_and_keeps_its_lock_across_commits(agents: str) -> None:
    now = 1000.0
    create_table(agents, 9)
    query(agents, "update agent set last_seen = %s where id = 9", now)
    held: list[object] = []
    with holdfast.Client(agents) as client, holdfast.Client(agents) as other, psycopg.connect(agents) as connection:

        def stop(_: int) -> None:
            held.append(other.lock(("agent", 8)).try_acquire())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweeper, "stop", stop)
            with other.lock(("agent", 7)):
                assert sweeper.sweep(client, connection, now=now) == {"stopped": [8], "skipped": [7], "fine": []}
        assert held == [None], "after its first commit it still has the lock"
        assert [agent(agents, number)["status"] for number in (7, 8, 9)] == ["running", "stopped", "running"]
        assert sweeper.sweep(client, connection, now=now) == {"stopped": [7], "skipped": [], "fine": []}
        assert client.locks.list() == []


def test_the_sweeper_stops_whom_one_before_it_had_only_marked(agents: str) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("the agent's process does not answer")

    with holdfast.Client(agents) as client, psycopg.connect(agents) as connection:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweeper, "stop", fail)
            with pytest.raises(RuntimeError, match="does not answer"):
                sweeper.sweep(client, connection, now=1000.0)
        assert agent(agents, 7)["status"] == "stopping"
        assert sweeper.sweep(client, connection, now=1000.0)["stopped"] == [7, 8]


def test_the_sweeper_runs_as_a_program(agents: str) -> None:
    command = [sys.executable, "-m", "examples.locks.sweeper", agents]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=2 * PATIENCE)
    assert done.stdout.splitlines()[-1] == "{'stopped': [7, 8], 'skipped': [], 'fine': []}"


async def test_a_deferred_stop_does_not_hold_the_lock_while_it_sleeps_and_reads_anew(
    agents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with holdfast.AsyncClient(agents) as client:
        assert await deferred_stop.stop_later(client, agents, 8, delay=0) == "stopped"
        assert agent(agents, 8)["status"] == "stopped"
        assert await deferred_stop.stop_later(client, agents, 8, delay=0) == "gone"

    async with holdfast.AsyncClient(agents) as client, holdfast.AsyncClient(agents) as stopper:
        asked, slept, read = asyncio.Event(), asyncio.Event(), deferred_stop._read

        async def tell(*arguments: Any) -> Any:
            found = await read(*arguments)
            asked.set()
            return found

        async def sleep(delay: float) -> None:
            assert delay == 600
            await slept.wait()

        monkeypatch.setattr(deferred_stop, "_read", tell)
        monkeypatch.setattr(deferred_stop, "asyncio", SimpleNamespace(sleep=sleep))
        waits = asyncio.create_task(deferred_stop.stop_later(stopper, agents, 7, delay=600))
        await asked.wait()
        async with client.lock(("agent", 7), timeout=0):
            slept.set()
            while all(each.granted for each in await client.locks.list()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            query(agents, "update agent set last_seen = 5 where id = 7")
        assert await waits == "used again"
        assert agent(agents)["status"] == "running"


def test_a_model_is_asked_once_and_nobody_waits_for_it(postgres_url: str) -> None:
    query(postgres_url, llm_calls.TABLE)
    asked, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    def model(question: str) -> str:
        calls.append(question)
        asked.set()
        assert go_on.wait(PATIENCE)
        return "42"

    answers: list[str | None] = []
    first = threading.Thread(target=lambda: answers.append(llm_calls.ask(postgres_url, "why?", model)))
    first.start()
    assert asked.wait(PATIENCE)
    assert llm_calls.ask(postgres_url, "why?", model) is None
    go_on.set()
    first.join(PATIENCE)
    assert answers == ["42"]
    assert llm_calls.ask(postgres_url, "why?", model) == "42"
    assert llm_calls.ask(postgres_url, "how?", model) == "42"
    assert calls == ["why?", "how?"]


def test_a_call_that_fails_leaves_the_question_to_the_next(postgres_url: str) -> None:
    query(postgres_url, llm_calls.TABLE)

    def fails(_: str) -> str:
        raise ConnectionError("no answer")

    with pytest.raises(ConnectionError):
        llm_calls.ask(postgres_url, "why?", fails)
    assert llm_calls.ask(postgres_url, "why?", lambda _: "42") == "42"
