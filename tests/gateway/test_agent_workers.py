"""What workers do beside the requests to agents, with locks held by others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import holdfast
from holdfast.gateway.agents import records, worker_rules, workers
from holdfast.gateway.context import Gateway
from tests.gateway.local_replica import SAID, LocalReplica, open_local_replica, wait_for_command


async def due_for_reaper(local: LocalReplica, tmp_path: Path) -> None:
    await local.amend(seen_at=time.time() - local.gateway.settings.agent_silence - 1)


async def due_for_reconciler(local: LocalReplica, tmp_path: Path) -> None:
    said = [{"type": "user", "message": {"content": text}} for text in (SAID["prompt"], "hurry")]
    spoken = {"content": [{"type": "text", "text": "yes"}], "usage": {"input_tokens": 900, "output_tokens": 99}}
    lines = [*said, {"type": "assistant", "message": spoken}]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    await local.amend(seen_at=time.time() - 60, transcript_path=str(tmp_path / "t.jsonl"))


async def due_for_watchdog(local: LocalReplica, tmp_path: Path) -> None:
    await local.amend(seen_at=time.time() - local.gateway.settings.command_limit - 1)


@pytest.mark.parametrize(
    ("worker", "make_due", "effect"),
    [
        (workers.REAPER, due_for_reaper, {"state": "ended", "ended_why": "no hook for 86400 s"}),
        (workers.RECONCILER, due_for_reconciler, {"turns": 3, "transcript_turn": 3}),
        (workers.POLLER, due_for_reconciler, {"context_tokens": 999}),
        (workers.WATCHDOG, due_for_watchdog, {"state": "idle", "command": None}),
    ],
    ids=lambda value: value.name if isinstance(value, workers.AgentWorker) else "",
)
async def test_a_worker_skips_a_locked_agent_and_comes_back(
    local: LocalReplica,
    tmp_path: Path,
    worker: workers.AgentWorker,
    make_due: Callable[..., Any],
    effect: dict[str, Any],
) -> None:
    await local.send_hooks("user-prompt-submit")
    assert (await workers.sweep(local.gateway, worker)).done == [], "nothing is wrong with it"
    await make_due(local, tmp_path)
    before = await local.get("/agents/1")
    async with local.other._reserved_lock("agent", 1, timeout=15.0):
        swept = await workers.sweep(local.gateway, worker)
        assert (swept.done, swept.skipped) == ([], [1])
        assert await local.get("/agents/1") == before
    swept = await workers.sweep(local.gateway, worker)
    assert (swept.done, swept.skipped) == ([1], [])
    after = await local.get("/agents/1")
    assert {name: after[name] for name in effect} == effect
    local.requested_locks.clear()
    assert (await workers.sweep(local.gateway, worker)).done == []
    assert local.requested_locks == [], "with whom nothing is wrong is not locked"


async def test_what_workers_do_to_commands_and_turns(local: LocalReplica, tmp_path: Path) -> None:
    await local.send_hooks("user-prompt-submit")
    await due_for_reconciler(local, tmp_path)
    await workers.sweep(local.gateway, workers.RECONCILER)
    turns = (await local.get("/agents/1/turns"))["turns"]
    assert [(each["text"], each["role"], each["source"], each["command"]) for each in turns] == [
        (SAID["prompt"], "user", "hook", 1), ("hurry", "user", "transcript", 1), ("yes", "agent", "transcript", 1),
    ]  # fmt: skip
    await due_for_watchdog(local, tmp_path)
    await workers.sweep(local.gateway, workers.WATCHDOG)
    await local.send_hooks("user-prompt-submit")
    await due_for_reaper(local, tmp_path)
    await workers.sweep(local.gateway, workers.REAPER)
    assert await local.commands() == [("timed_out", "watchdog"), ("interrupted", "reaper")]


async def test_a_long_transcript_is_taken_in_portions_and_keeps_nobody_waiting(
    local: LocalReplica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of short lines: as turns they are more than a record may have."""
    line = f"{json.dumps({'type': 'user', 'message': {'content': 'ü'}})}\n"
    for number, count in ((1, 12_000), (2, 1)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(line * count)
        await local.send_hooks("session-start", session=str(path), transcript_path=str(path))
        await local.amend(number, seen_at=1.0)
    assert (await workers.sweep(local.gateway, workers.RECONCILER)).done == [1, 2]
    some = (await local.get("/agents/1"))["turns"]
    assert 0 < some < 12_000
    assert (await workers.sweep(local.gateway, workers.RECONCILER)).done == [1], "and the rest with the next cycles"
    assert (await local.get("/agents/1"))["turns"] > some

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("of one agent alone")

    await local.amend(2, reconciled_at=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(worker_rules, "reconcile", broken)
        assert (await workers.sweep(local.gateway, workers.RECONCILER)).done == []


async def test_no_transcript_is_read_from_elsewhere(local: LocalReplica, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
    for path in ("/etc/passwd", str(tmp_path / ".." / ".." / "passwd"), str(tmp_path / "link.jsonl"), str(tmp_path)):
        await local.send_hooks("session-start", session=path, transcript_path=path)
        await local.amend((await local.send_hooks("session-start", session=path))["agent"], seen_at=1.0)
    for worker in (workers.RECONCILER, workers.POLLER):
        assert (await workers.sweep(local.gateway, worker)).done == []


async def test_a_worker_has_one_agent_at_a_time_and_reads_it_anew(local: LocalReplica) -> None:
    for session in "abc":
        await local.send_hooks("user-prompt-submit", session=session)
        await local.send_hooks("session-start", session=session)
    for number in (1, 2, 3):
        await local.amend(number, seen_at=1.0)
    held: list[list[bool]] = []

    async def work(gateway: Gateway, stored: records.StoredAgent, now: float) -> None:
        tries = [await local.other._reserved_lock("agent", number, timeout=15.0).try_acquire() for number in (1, 2, 3)]
        held.append([grant is None for grant in tries])
        for grant in tries:
            if grant is not None:
                await grant.release()
        await workers.WATCHDOG.work(gateway, stored, now)
        if stored.agent.number == 1:  # meanwhile the second one is heard of
            await local.amend(2, seen_at=time.time())

    swept = await workers.sweep(local.gateway, workers.WATCHDOG._replace(work=work))
    assert held == [[True, False, False], [False, False, True]]
    assert (swept.done, swept.skipped) == ([1, 3], [])
    assert local.requested_locks[-3:] == [("agent", 1), ("agent", 2), ("agent", 3)], (
        "the second was listed as due, and was not"
    )


async def test_the_reaper_ends_agents_of_sandboxes_that_are_gone_and_forgets_those_of_last_week(
    local: LocalReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await local.other.objects.put_if("@sandbox", "sb-1", {}, holdfast.MustCreate())
    await local.http.post("/agents", json={"cwd": "/srv/app", "sandbox": "sb-1"})
    await local.send_hooks("user-prompt-submit", cwd="/srv/app")
    assert (await workers.sweep(local.gateway, workers.REAPER)).done == []
    await local.other.objects.delete_if("@sandbox", "sb-1", box.version)
    assert (await workers.sweep(local.gateway, workers.REAPER)).done == [1]
    assert (await local.get("/agents/1"))["ended_why"] == "its sandbox sb-1 is gone"
    with monkeypatch.context() as patch:  # there may be very many that ended within a week
        patch.setattr(local.gateway.client.objects, "get", Mock(side_effect=AssertionError("it is asked for again")))
        assert (await workers.sweep(local.gateway, workers.REAPER)).done == []
    assert (await local.http.post("/agents/1/commands/1/summary")).status_code == 200
    await local.amend(ended_at=time.time() - worker_rules.KEEP - 1)
    assert (await workers.sweep(local.gateway, workers.REAPER)).done == [1]
    assert (await local.http.get("/agents/1")).status_code == 404
    for kind in ("@agent", "@command", "@turn", "@summary"):
        assert await local.other.objects.list(kind) == []


async def test_an_announced_agent_that_ended_without_a_session_gives_its_folder_back(local: LocalReplica) -> None:
    """Else the next session there would be its own, and ended with it; and nobody could announce another for a week."""
    box = await local.other.objects.put_if("@sandbox", "sb-1", {}, holdfast.MustCreate())
    await local.http.post("/agents", json={"cwd": "/srv/app", "sandbox": "sb-1"})
    await local.other.objects.delete_if("@sandbox", "sb-1", box.version)
    assert (await workers.sweep(local.gateway, workers.REAPER)).done == [1]
    assert (await local.http.post("/agents", json={"cwd": "/srv/app"})).status_code == 201
    assert (await local.send_hooks("user-prompt-submit", cwd="/srv/app"))["agent"] == 2
    assert (await workers.sweep(local.gateway, workers.REAPER)).done == []


async def test_the_workers_run_beside_the_requests(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "EVERY", 0.01)
    async with open_local_replica(sqlite_url, tmp_path, command_limit=1e-9) as local:
        await local.send_hooks("user-prompt-submit")
        await wait_for_command(local, "timed_out", "watchdog")
        while len(local.gateway.agents.cycles) < len(workers.WORKERS):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert {each.name for each in workers.WORKERS} == (await local.get("/hook/status"))["workers"].keys()
