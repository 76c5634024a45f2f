"""Hooks: correlation without a lock, then the agent's lock, then its state as it is under that lock.

A stop is not the end yet: an agent may go on, and its session may end meanwhile. Its completion sleeps first, takes the
lock then, reads anew, and leaves alone what is complete already. One that is lost with its replica is for the watchdog.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field

import holdfast
from holdfast.gateway.agents import lifecycle, records
from holdfast.gateway.agents.correlate import correlate
from holdfast.gateway.agents.desk import DueStop, Swept
from holdfast.gateway.agents.lifecycle import Hook, Kind, Turn
from holdfast.gateway.context import Gateway, Here
from holdfast.gateway.logs import say
from holdfast.gateway.problem import Problem, documented

router = APIRouter(tags=["hooks"])
Printable = r"^[^\x00-\x1f\x7f-\x9f]*$"


class HookBody(Hook):
    """As agents send it; members that are not named here are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"session_id": "5f1c…", "cwd": "/srv/app", "prompt": "make the tests pass"},
                {"session_id": "5f1c…", "tool_name": "Bash"},
                {"session_id": "5f1c…", "last_assistant_message": "All 12 tests pass."},
            ]
        }
    )
    session_id: Annotated[str, Field(min_length=1, max_length=180, pattern=Printable)]
    cwd: Annotated[str | None, Field(min_length=1, max_length=4096, pattern=Printable)] = None
    transcript_path: Annotated[str | None, Field(min_length=1, max_length=4096, pattern=Printable)] = None
    tool_name: Annotated[str | None, Field(max_length=200)] = None
    reason: Annotated[str | None, Field(max_length=1000)] = None


class HookAnswer(BaseModel):
    agent: int
    state: str
    command: int | None
    """The one that is open."""
    turn: int | None
    """The one that this hook has made."""
    additional_context: str | None
    """What the agent is to be told: an injected prompt, once."""


class WorkerCycle(BaseModel):
    at: float
    done: list[int]
    skipped: list[int]


class HookStatus(BaseModel):
    """Of this replica alone, and since its start."""

    replica: str
    hooks: dict[str, int]
    under_way: int
    busy: int
    waiting_stops: int
    workers: dict[str, WorkerCycle]


@router.get("/hook/status")
async def status(here: Here) -> HookStatus:
    """What this replica has done for its agents. Takes no lock and asks no database, so it answers at once."""
    desk = here.agents
    cycles = {name: _told(cycle) for name, cycle in desk.cycles.items()}
    return HookStatus(
        replica=here.replica, hooks=dict(desk.hooks), under_way=desk.under_way, busy=desk.busy,
        waiting_stops=desk.waiting_stops, workers=cycles,
    )  # fmt: skip


@router.post("/hook/{kind}", responses=documented(422, 503))
async def hook(kind: Annotated[Kind, Path()], body: HookBody, here: Here, response: Response) -> HookAnswer:
    """What an agent reports. Hooks of one agent are handled one after the other, on whichever replica."""
    desk, asked = here.agents, time.perf_counter()
    desk.hooks[kind] += 1
    desk.under_way += 1
    try:
        number = await correlate(here.client, body.session_id, body.cwd)
        correlated = time.perf_counter()
        async with records.locked(here.client, number):
            held = time.perf_counter()
            answer = await _handle(here, number, kind, body)
            worked = time.perf_counter()
        done = time.perf_counter()
    except Problem:
        desk.busy += 1
        raise
    finally:
        desk.under_way -= 1
    spent = {"correlate": correlated - asked, "lock": held - correlated, "work": worked - held, "unlock": done - worked}
    response.headers["Server-Timing"] = ", ".join(f"{name};dur={1000 * took:.3f}" for name, took in spent.items())
    return answer


async def _handle(here: Gateway, number: int, kind: Kind, body: HookBody) -> HookAnswer:
    """Under the lock."""
    before = await records.read(here.client, number)
    if before is None:  # forgotten since it was correlated: the next time it is a new one
        raise Problem(503, f"agent {number} has just been removed; ask again", headers={"Retry-After": "1"})
    step = lifecycle.apply(before.agent, kind, body, now=time.time(), delay=here.settings.stop_delay)
    await records.commit(here, before, step)
    agent = step.agent
    if agent.command is not None and agent.stop_at is not None and agent.stop_at != before.agent.stop_at:
        due = DueStop(number, agent.command.number, agent.stop_at, here.settings.stop_delay)
        here.agents.stops.put_nowait(due)
    turn = next((each.number for each in step.writes if isinstance(each, Turn)), None)
    open_command = None if agent.command is None else agent.command.number
    return HookAnswer(agent=number, state=agent.state, command=open_command, turn=turn, additional_context=step.context)


async def run_stops(here: Gateway) -> None:
    """All that wait, until we end."""
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(_stop_later(here, await here.agents.stops.get()))


async def _stop_later(here: Gateway, due: DueStop) -> None:
    here.agents.waiting_stops += 1
    try:
        await asyncio.sleep(due.delay)
        await stop(here, due)
    except (Problem, holdfast.HoldfastError) as error:
        say("agent.stop_left_to_watchdog", logging.WARNING, agent=due.agent, command=due.command, why=str(error))
    finally:
        here.agents.waiting_stops -= 1


async def stop(here: Gateway, due: DueStop) -> Literal["completed", "nothing"]:
    """After the sleep: what was true before it may not be any more."""
    async with records.locked(here.client, due.agent):
        before = await records.read(here.client, due.agent)
        if before is None:
            return "nothing"
        step = lifecycle.finish(before.agent, due.command, due.at, time.time())
        await records.commit(here, before, step)
        return "completed" if step.writes else "nothing"


def _told(cycle: Swept) -> WorkerCycle:
    return WorkerCycle(at=cycle.at, done=cycle.done, skipped=cycle.skipped)
