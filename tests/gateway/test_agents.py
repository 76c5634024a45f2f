"""Agents in one replica: each sentence about hooks, workers, stops and injections, shown with locks held by others."""

from __future__ import annotations

import ast
import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.gateway import agents as package
from holdfast.gateway.agents import hooks, records, upkeep, workers
from holdfast.gateway.agents.desk import DueStop
from holdfast.gateway.app import create_app
from holdfast.gateway.context import Gateway
from holdfast.gateway.settings import Settings
from tests.conftest import fresh

SAID = {"prompt": "make it green", "message": "may I?", "last_assistant_message": "It is green.", "tool_name": "Bash"}


class House:
    """A replica inside the test, and another client of its database: for locks that are somebody else's."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient, other: holdfast.AsyncClient) -> None:
        self.gateway, self.http, self.other = gateway, http, other
        self.asked: list[Any] = []
        """The locks that the replica has asked for."""
        self.asks = asyncio.Event()
        lock = gateway.client.lock

        def spy(name: Any, **options: Any) -> Any:
            self.asked.append(name)
            self.asks.set()
            return lock(name, **options)

        gateway.client.lock = spy  # type: ignore[method-assign]

    async def hook(self, kind: str, session: str = "s", **more: Any) -> httpx.Response:
        return await self.http.post(f"/hook/{kind}", json={"session_id": session, **SAID, **more})

    async def tell(self, *kinds: str, session: str = "s", **more: Any) -> dict[str, Any]:
        for kind in kinds:
            answer = await self.hook(kind, session, **more)
            assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def see(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def commands(self, number: int = 1) -> list[tuple[str, str | None]]:
        found = (await self.see(f"/agents/{number}/commands"))["commands"]
        return [(each["status"], each["ended_by"]) for each in found]

    async def amend(self, number: int = 1, **changes: Any) -> None:
        """As another replica would have: straight in the store."""
        await self.other.objects.update("agent", records.key(number), lambda record: {**record.payload, **changes})


@asynccontextmanager
async def house_of(url: str, tmp_path: Path, **settings: Any) -> AsyncIterator[House]:
    app = create_app(Settings(url, driver=f"unix:{tmp_path / 'none.sock'}", **{"stop_delay": 3600.0, **settings}))
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        holdfast.AsyncClient(url) as other,
    ):
        yield House(app.state.gateway, http, other)


@pytest.fixture
async def house(sqlite_url: str, tmp_path: Path) -> AsyncIterator[House]:
    async with house_of(sqlite_url, tmp_path, transcripts=str(tmp_path)) as made:
        yield made


async def test_hooks_make_agents_commands_and_turns(house: House) -> None:
    started = await house.tell("session-start", cwd="/srv/app")
    assert started == {"agent": 1, "state": "idle", "command": None, "turn": None, "additional_context": None}
    assert (await house.tell("user-prompt-submit"))["state"] == "working"
    assert (await house.tell("pre-tool-use", "permission-request"))["state"] == "waiting"
    assert (await house.tell("post-tool-use"))["state"] == "working"
    await house.tell("notification", "pre-tool-use", "post-tool-use", "stop")
    agent = await house.see("/agents/1")
    assert (agent["cwd"], agent["tools"], agent["turns"], agent["state"]) == ("/srv/app", 2, 4, "working")
    assert [each["kind"] for each in (await house.see("/agents/1/turns"))["turns"]] == [
        "prompt", "permission", "notification", "answer",
    ]  # fmt: skip
    assert await house.commands() == [("running", None)]
    assert (await house.tell("session-end", reason="logout"))["state"] == "ended"
    assert await house.commands() == [("complete", "session-end")]
    assert (await house.tell("user-prompt-submit"))["state"] == "ended", "only session-start leads out of it"
    assert (await house.tell("session-start"))["state"] == "idle"
    assert [each["number"] for each in (await house.see("/agents"))["agents"]] == [1]
    assert (await house.see("/agents/1/turns?after=1&limit=2"))["turns"][-1]["number"] == 3
    for missing in ("/agents/2", "/agents/2/turns", "/agents/0"):
        assert (await house.http.get(missing)).status_code in (404, 422)
    assert (await house.hook("undress")).status_code == 422


async def test_a_hook_correlates_without_a_lock_then_takes_it_and_gives_up_in_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert records.PATIENCE == 15.0
    monkeypatch.setattr(records, "PATIENCE", 0.1)
    async with house.other.lock(("agent", 1)):
        busy = await house.hook("session-start")
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        assert busy.headers["content-type"] == "application/problem+json"
        assert busy.json().keys() >= {"title", "detail", "requestId", "agent"}
        assert house.asked == [("agent", 1)]
        agent = await house.see("/agents/1")
        assert (agent["session_id"], agent["state"]) == ("s", "expected"), "correlated, but not processed"
    assert (await house.tell("session-start"))["agent"] == 1
    assert (await house.see("/hook/status"))["busy"] == 1


async def test_state_is_read_under_the_lock_and_not_before_it(house: House) -> None:
    await house.tell("user-prompt-submit")
    house.asks.clear()
    async with house.other.lock(("agent", 1)):
        waits = asyncio.create_task(house.tell("user-prompt-submit"))
        await house.asks.wait()
        await house.amend(turns=41, pending=[])
    assert (await waits)["turn"] == 42


async def test_the_status_takes_no_lock(house: House) -> None:
    await house.tell("session-start")
    house.asked.clear()
    async with house.other.lock(("agent", 1)):
        status = await house.see("/hook/status")
    assert house.asked == []
    assert status["hooks"] == {"session-start": 1}
    assert status["replica"] == house.gateway.replica


async def test_the_first_session_in_a_folder_is_that_of_the_agent_announced_there(house: House) -> None:
    announced = await house.http.post("/agents", json={"cwd": "/srv/app"})
    assert (announced.status_code, announced.json()["state"]) == (201, "expected")
    assert (await house.http.post("/agents", json={"cwd": "/srv/app"})).status_code == 409
    assert (await house.http.post("/agents", json={"cwd": "/srv/x", "sandbox": "sb-1"})).status_code == 422
    answers = await asyncio.gather(*(house.hook("session-start", f"s{n}", cwd="/srv/app") for n in range(6)))
    numbers = [answer.json()["agent"] for answer in answers]
    assert len(set(numbers)) == 6
    assert announced.json()["number"] in numbers, "one of them was expected"
    assert (await house.tell("session-start", session="s3"))["agent"] == numbers[3]


async def test_a_hook_is_whole_although_its_replica_fails_in_the_midst_of_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise holdfast.EngineError("gone")

    await house.tell("session-start")
    with monkeypatch.context() as patch:
        patch.setattr(records, "_write", fails)
        assert (await house.hook("user-prompt-submit")).status_code == 503
    assert await house.other.objects.list("turn") == []
    assert (await house.see("/agents/1/turns"))["turns"][0]["text"] == SAID["prompt"], "it is committed, and seen"
    assert (await workers.sweep(house.gateway, workers.WATCHDOG)).done == [1]
    assert [len(await house.other.objects.list(kind)) for kind in ("turn", "command")] == [1, 1]
    with monkeypatch.context() as patch:
        patch.setattr(records, "_write", fails)
        assert (await house.hook("session-end")).status_code == 503
    assert await house.commands() == [("interrupted", "session-end")]
    await house.tell("session-start")
    assert (await house.other.objects.list("command"))[0].payload["status"] == "interrupted", (
        "the next one has mended it"
    )


async def due_for_reaper(house: House, tmp_path: Path) -> None:
    await house.amend(seen_at=time.time() - house.gateway.settings.agent_silence - 1)


async def due_for_reconciler(house: House, tmp_path: Path) -> None:
    said = [{"type": "user", "message": {"content": text}} for text in (SAID["prompt"], "hurry")]
    spoken = {"content": [{"type": "text", "text": "yes"}], "usage": {"input_tokens": 900, "output_tokens": 99}}
    lines = [*said, {"type": "assistant", "message": spoken}]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    await house.amend(seen_at=time.time() - 60, transcript_path=str(tmp_path / "t.jsonl"))


async def due_for_watchdog(house: House, tmp_path: Path) -> None:
    await house.amend(seen_at=time.time() - house.gateway.settings.command_limit - 1)


@pytest.mark.parametrize(
    ("worker", "make_due", "effect"),
    [
        (workers.REAPER, due_for_reaper, {"state": "ended", "ended_why": "not heard of for 86400 s"}),
        (workers.RECONCILER, due_for_reconciler, {"turns": 3, "transcript_turn": 3}),
        (workers.POLLER, due_for_reconciler, {"context_tokens": 999}),
        (workers.WATCHDOG, due_for_watchdog, {"state": "idle", "command": None}),
    ],
    ids=lambda value: value.name if isinstance(value, workers.Worker) else "",
)
async def test_a_worker_skips_a_locked_agent_and_comes_back(
    house: House, tmp_path: Path, worker: workers.Worker, make_due: Callable[..., Any], effect: dict[str, Any]
) -> None:
    await house.tell("user-prompt-submit")
    assert (await workers.sweep(house.gateway, worker)).done == [], "nothing is wrong with it"
    await make_due(house, tmp_path)
    before = await house.see("/agents/1")
    async with house.other.lock(("agent", 1)):
        swept = await workers.sweep(house.gateway, worker)
        assert (swept.done, swept.skipped) == ([], [1])
        assert await house.see("/agents/1") == before
    swept = await workers.sweep(house.gateway, worker)
    assert (swept.done, swept.skipped) == ([1], [])
    after = await house.see("/agents/1")
    assert {name: after[name] for name in effect} == effect
    house.asked.clear()
    assert (await workers.sweep(house.gateway, worker)).done == []
    assert house.asked == [], "with whom nothing is wrong is not locked"


async def test_what_workers_do_to_commands_and_turns(house: House, tmp_path: Path) -> None:
    await house.tell("user-prompt-submit")
    await due_for_reconciler(house, tmp_path)
    await workers.sweep(house.gateway, workers.RECONCILER)
    turns = (await house.see("/agents/1/turns"))["turns"]
    assert [(each["text"], each["role"], each["source"], each["command"]) for each in turns] == [
        (SAID["prompt"], "user", "hook", 1), ("hurry", "user", "transcript", 1), ("yes", "agent", "transcript", 1),
    ]  # fmt: skip
    await due_for_watchdog(house, tmp_path)
    await workers.sweep(house.gateway, workers.WATCHDOG)
    await house.tell("user-prompt-submit")
    await due_for_reaper(house, tmp_path)
    await workers.sweep(house.gateway, workers.REAPER)
    assert await house.commands() == [("timed_out", "watchdog"), ("interrupted", "reaper")]


async def test_a_long_transcript_is_taken_in_portions_and_keeps_nobody_waiting(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of short lines: as turns they are more than a record may have."""
    line = f"{json.dumps({'type': 'user', 'message': {'content': 'ü'}})}\n"
    for number, count in ((1, 12_000), (2, 1)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(line * count)
        await house.tell("session-start", session=str(path), transcript_path=str(path))
        await house.amend(number, seen_at=1.0)
    assert (await workers.sweep(house.gateway, workers.RECONCILER)).done == [1, 2]
    some = (await house.see("/agents/1"))["turns"]
    assert 0 < some < 12_000
    assert (await workers.sweep(house.gateway, workers.RECONCILER)).done == [1], "and the rest with the next cycles"
    assert (await house.see("/agents/1"))["turns"] > some

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("of one agent alone")

    await house.amend(2, reconciled_at=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "reconcile", broken)
        assert (await workers.sweep(house.gateway, workers.RECONCILER)).done == []


async def test_no_transcript_is_read_from_elsewhere(house: House, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
    for path in ("/etc/passwd", str(tmp_path / ".." / ".." / "passwd"), str(tmp_path / "link.jsonl"), str(tmp_path)):
        await house.tell("session-start", session=path, transcript_path=path)
        await house.amend((await house.tell("session-start", session=path))["agent"], seen_at=1.0)
    for worker in (workers.RECONCILER, workers.POLLER):
        assert (await workers.sweep(house.gateway, worker)).done == []


async def test_a_worker_has_one_agent_at_a_time_and_reads_it_anew(house: House) -> None:
    for session in "abc":
        await house.tell("user-prompt-submit", session=session)
        await house.tell("session-start", session=session)
    for number in (1, 2, 3):
        await house.amend(number, seen_at=1.0)
    held: list[list[bool]] = []

    async def work(here: Gateway, known: records.Known, now: float) -> None:
        tries = [await house.other.lock(("agent", number)).try_acquire() for number in (1, 2, 3)]
        held.append([grant is None for grant in tries])
        for grant in tries:
            if grant is not None:
                await grant.release()
        await workers.WATCHDOG.work(here, known, now)
        if known.agent.number == 1:  # meanwhile the second one is heard of
            await house.amend(2, seen_at=time.time())

    swept = await workers.sweep(house.gateway, workers.WATCHDOG._replace(work=work))
    assert held == [[True, False, False], [False, False, True]]
    assert (swept.done, swept.skipped) == ([1, 3], [])
    assert house.asked[-3:] == [("agent", 1), ("agent", 2), ("agent", 3)], "the second was listed as due, and was not"


async def test_the_reaper_ends_agents_of_sandboxes_that_are_gone_and_forgets_those_of_last_week(house: House) -> None:
    box = await house.other.objects.put_if("sandbox", "sb-1", {}, holdfast.MustCreate())
    await house.http.post("/agents", json={"cwd": "/srv/app", "sandbox": "sb-1"})
    await house.tell("user-prompt-submit", cwd="/srv/app")
    assert (await workers.sweep(house.gateway, workers.REAPER)).done == []
    await house.other.objects.delete_if("sandbox", "sb-1", box.version)
    assert (await workers.sweep(house.gateway, workers.REAPER)).done == [1]
    assert (await house.see("/agents/1"))["ended_why"] == "its sandbox sb-1 is gone"
    assert (await house.http.post("/agents/1/commands/1/summary")).status_code == 200
    await house.amend(ended_at=time.time() - upkeep.KEEP - 1)
    assert (await workers.sweep(house.gateway, workers.REAPER)).done == [1]
    assert (await house.http.get("/agents/1")).status_code == 404
    for kind in ("agent", "command", "turn", "summary"):
        assert await house.other.objects.list(kind) == []


async def seen(house: House, status: str, by: str) -> None:
    """That the command ends so, by what goes on beside the requests."""
    async with asyncio.timeout(30):
        while await house.commands() != [(status, by)]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def stopped(house: House) -> DueStop:
    await house.tell("user-prompt-submit", "stop")
    agent = await house.see("/agents/1")
    return DueStop(1, 1, agent["stop_at"], 3600.0)


async def test_a_deferred_stop_sleeps_without_the_lock(house: House) -> None:
    await stopped(house)
    while house.gateway.agents.waiting_stops == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    async with house.other.lock(("agent", 1), timeout=0):
        assert (await house.see("/hook/status"))["waiting_stops"] == 1
    assert await house.commands() == [("running", None)]


async def test_a_deferred_stop_that_comes_second_does_nothing(house: House) -> None:
    due = await stopped(house)
    await house.tell("session-end")
    before = await house.other.objects.get("agent", records.key(1))
    assert await hooks.stop(house.gateway, due) == "nothing"
    assert await house.other.objects.get("agent", records.key(1)) == before
    assert await house.commands() == [("complete", "session-end")]


async def test_a_deferred_stop_that_comes_first_leaves_nothing_to_the_end_of_the_session(house: House) -> None:
    due = await stopped(house)
    assert await hooks.stop(house.gateway, due) == "completed"
    assert (await house.tell("session-end"))["command"] is None
    assert await house.commands() == [("complete", "stop")]


async def test_a_deferred_stop_reads_anew_under_the_lock(house: House) -> None:
    due = await stopped(house)
    house.asks.clear()
    async with house.other.lock(("agent", 1)):
        waits = asyncio.create_task(hooks.stop(house.gateway, due))
        await house.asks.wait()
        await house.amend(stop_at=None)  # the agent goes on, says another replica
    assert await waits == "nothing"
    assert await house.commands() == [("running", None)]


async def test_a_stop_completes_its_command_by_itself(sqlite_url: str, tmp_path: Path) -> None:
    async with house_of(sqlite_url, tmp_path, stop_delay=0.01) as house:
        await house.tell("user-prompt-submit", "stop")
        await seen(house, "complete", "stop")


async def test_a_stop_that_is_lost_with_its_replica_is_for_the_watchdog(sqlite_url: str, tmp_path: Path) -> None:
    async with house_of(sqlite_url, tmp_path) as house:
        await stopped(house)
    async with house_of(sqlite_url, tmp_path) as house:
        assert (await workers.sweep(house.gateway, workers.WATCHDOG)).done == [], "it is not late yet"
        await house.amend(stop_at=time.time() - upkeep.GRACE - 1)
        assert (await workers.sweep(house.gateway, workers.WATCHDOG)).done == [1]
        assert await house.commands() == [("complete", "watchdog")]
        assert (await house.tell("session-end"))["command"] is None


async def test_the_workers_run_beside_the_requests(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "EVERY", 0.01)
    async with house_of(sqlite_url, tmp_path, command_limit=1e-9) as house:
        await house.tell("user-prompt-submit")
        await seen(house, "timed_out", "watchdog")
        while len(house.gateway.agents.cycles) < len(workers.WORKERS):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert {each.name for each in workers.WORKERS} == (await house.see("/hook/status"))["workers"].keys()


async def test_of_two_injections_at_once_one_is_made_and_told_once(house: House) -> None:
    await house.tell("session-start")
    body = {"prompt": "You look after the tests.", "skills": ["pytest"]}
    house.asked.clear()
    async with house.other.lock(("agent", 1)):
        both = [asyncio.create_task(house.http.post("/agents/1/injection", json=body)) for _ in range(2)]
        while len(house.asked) < 2:  # noqa: ASYNC110 - both have looked before: neither was made
            await asyncio.sleep(0)
    answers = [await each for each in both]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert sorted(answer.json()["injected"] for answer in answers) == [False, True]
    assert len({answer.json()["prompt_injected_at"] for answer in answers}) == 1
    assert (await house.see("/agents/1"))["inbox"] == ["You look after the tests.\nUse the skill pytest."]
    told = [(await house.tell("user-prompt-submit"))["additional_context"] for _ in range(2)]
    assert told == ["You look after the tests.\nUse the skill pytest.", None]
    assert (await house.http.post("/agents/2/injection", json=body)).status_code == 404


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_all_locks_that_are_held_are_told_with_their_count(tmp_path: Path, engine: str) -> None:
    url = fresh() if engine == "postgres" else f"sqlite:///{tmp_path / 'app.db'}"
    async with house_of(url, tmp_path) as house:
        await house.tell("session-start")
        async with house.other.lock(("agent", 1)), house.other.lock(("agent", -2)):
            found = await house.see("/api/advisory-locks")
            assert found["count"] == len(found["locks"]) >= 2
            held = {(each["namespace"], each["entity_id"]) for each in found["locks"]}
            assert held >= {("agent", 1), ("agent", -2)}
        left = (await house.see("/api/advisory-locks"))["locks"]
        assert not {"agent"} & {each["namespace"] for each in left}, "but those of the replica's own leases"


def test_no_lock_of_this_process_keeps_anybody_from_an_agent() -> None:
    """They would be worth nothing beside a second replica. What there is bounds our own connections."""
    folder = Path(package.__file__).parent
    found = {
        (file.name, node.attr)
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("Lock", "RLock", "Semaphore", "Condition")
    }
    assert found == {("desk.py", "Semaphore")}
