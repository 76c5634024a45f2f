"""A stop that is put off: it sleeps without the lock, and reads anew under it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from holdfast.gateway.agents import hooks, records, worker_rules, workers
from holdfast.gateway.agents.replica_state import DueStop
from tests.gateway.local_replica import LocalReplica, open_local_replica, wait_for_command


async def stopped(local: LocalReplica) -> DueStop:
    await local.send_hooks("user-prompt-submit", "stop")
    agent = await local.get("/agents/1")
    return DueStop(1, 1, agent["stop_at"], 3600.0)


async def test_a_deferred_stop_sleeps_without_the_lock(local: LocalReplica) -> None:
    await stopped(local)
    while local.gateway.agents.waiting_stops == 0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    async with local.other._reserved_lock("agent", 1, timeout=0):
        assert (await local.get("/hook/status"))["waiting_stops"] == 1
    assert await local.commands() == [("running", None)]


async def test_a_deferred_stop_that_comes_second_does_nothing(local: LocalReplica) -> None:
    due = await stopped(local)
    await local.send_hooks("session-end")
    before = await local.other.objects.get("@agent", records.key(1))
    assert await hooks.stop(local.gateway, due) == "nothing"
    assert await local.other.objects.get("@agent", records.key(1)) == before
    assert await local.commands() == [("complete", "session-end")]


async def test_a_deferred_stop_that_comes_first_leaves_nothing_to_the_end_of_the_session(local: LocalReplica) -> None:
    due = await stopped(local)
    assert await hooks.stop(local.gateway, due) == "completed"
    assert (await local.send_hooks("session-end"))["command"] is None
    assert await local.commands() == [("complete", "stop")]


async def test_a_deferred_stop_reads_anew_under_the_lock(local: LocalReplica) -> None:
    due = await stopped(local)
    local.lock_requested.clear()
    async with local.other._reserved_lock("agent", 1, timeout=15.0):
        waits = asyncio.create_task(hooks.stop(local.gateway, due))
        await local.lock_requested.wait()
        await local.amend(stop_at=None)  # the agent goes on, says another replica
    assert await waits == "nothing"
    assert await local.commands() == [("running", None)]


async def test_a_stop_completes_its_command_by_itself(sqlite_url: str, tmp_path: Path) -> None:
    async with open_local_replica(sqlite_url, tmp_path, stop_delay=0.01) as local:
        await local.send_hooks("user-prompt-submit", "stop")
        await wait_for_command(local, "complete", "stop")


async def test_a_stop_that_is_lost_with_its_replica_is_for_the_watchdog(sqlite_url: str, tmp_path: Path) -> None:
    async with open_local_replica(sqlite_url, tmp_path) as local:
        await stopped(local)
    async with open_local_replica(sqlite_url, tmp_path) as local:
        assert (await workers.sweep(local.gateway, workers.WATCHDOG)).done == [], "it is not late yet"
        await local.amend(stop_at=time.time() - worker_rules.GRACE - 1)
        assert (await workers.sweep(local.gateway, workers.WATCHDOG)).done == [1]
        assert await local.commands() == [("complete", "watchdog")]
        assert (await local.send_hooks("session-end"))["command"] is None
