"""A stop that is put off: it sleeps without the lock, and reads anew under it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from holdfast.gateway.agents import hooks, records, worker_rules, workers
from holdfast.gateway.agents.replica_state import DueStop
from tests.gateway.house import House, house_of, seen


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
        await house.amend(stop_at=time.time() - worker_rules.GRACE - 1)
        assert (await workers.sweep(house.gateway, workers.WATCHDOG)).done == [1]
        assert await house.commands() == [("complete", "watchdog")]
        assert (await house.tell("session-end"))["command"] is None
