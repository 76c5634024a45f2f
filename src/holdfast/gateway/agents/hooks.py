"""Hooks: find the agent without a lock, acquire the agent's lock, then read the agent and apply the hook.

A stop does not complete a command at once: the agent may continue, and its session may end. The completion sleeps
first, then acquires the lock and reads the agent again; a command that is over is left alone. The watchdog completes
those that were lost with their replica.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field

import holdfast
from holdfast.gateway.agents import lifecycle, records
from holdfast.gateway.agents.correlation import correlate
from holdfast.gateway.agents.lifecycle import Hook, Kind, Turn
from holdfast.gateway.agents.replica_state import DueStop, WorkerCycle
from holdfast.gateway.context import CurrentGateway, Gateway
from holdfast.gateway.logs import WARNING, log
from holdfast.gateway.problem import documented
from holdfast.problem_json import Problem

router = APIRouter(tags=["hooks"])
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"


class HookBody(Hook):
    """As agents send it; other members are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"session_id": "5f1c…", "cwd": "/srv/app", "prompt": "make the tests pass"},
                {"session_id": "5f1c…", "tool_name": "Bash"},
                {"session_id": "5f1c…", "last_assistant_message": "All 12 tests pass."},
            ]
        }
    )
    session_id: Annotated[str, Field(min_length=1, max_length=180, pattern=PRINTABLE)]
    cwd: Annotated[str | None, Field(min_length=1, max_length=4096, pattern=PRINTABLE)] = None
    transcript_path: Annotated[str | None, Field(min_length=1, max_length=4096, pattern=PRINTABLE)] = None
    tool_name: Annotated[str | None, Field(max_length=200)] = None
    reason: Annotated[str | None, Field(max_length=1000)] = None


class HookAnswer(BaseModel):
    agent: int
    state: str
    command: int | None
    """The one that is open."""
    turn: int | None
    """The one that this hook has added."""
    additional_context: str | None
    """Text for the agent's context: an injected prompt, once."""


class HookStatus(BaseModel):
    """Of this replica alone, since its start."""

    replica: str
    hooks: dict[str, int]
    under_way: int
    busy: int
    waiting_stops: int
    workers: dict[str, WorkerCycle]


@router.get("/hook/status")
async def status(gateway: CurrentGateway) -> HookStatus:
    """What this replica has done for its agents. Acquires no lock and asks no database, so it answers at once."""
    state = gateway.agents
    return HookStatus(
        replica=gateway.replica, hooks=dict(state.hooks), under_way=state.under_way, busy=state.busy,
        waiting_stops=state.waiting_stops, workers=state.cycles,
    )  # fmt: skip


@router.post("/hook/{kind}", responses=documented(422, 503))
async def hook(
    kind: Annotated[Kind, Path()], body: HookBody, gateway: CurrentGateway, response: Response
) -> HookAnswer:
    """What an agent reports. Hooks of one agent are handled one after the other, on whichever replica."""
    state, began = gateway.agents, time.perf_counter()
    state.hooks[kind] += 1
    state.under_way += 1
    try:
        number = await correlate(gateway.client, body.session_id, body.cwd)
        correlated = time.perf_counter()
        async with records.locked(gateway.client, number):
            locked = time.perf_counter()
            answer = await _apply(gateway, number, kind, body)
            applied = time.perf_counter()
        ended = time.perf_counter()
    except Problem:
        state.busy += 1
        raise
    finally:
        state.under_way -= 1
    spans = {
        "correlate": correlated - began, "lock": locked - correlated, "work": applied - locked,
        "unlock": ended - applied,
    }  # fmt: skip
    response.headers["Server-Timing"] = ", ".join(f"{name};dur={1000 * span:.3f}" for name, span in spans.items())
    return answer


async def _apply(gateway: Gateway, number: int, kind: Kind, body: HookBody) -> HookAnswer:
    """Apply the hook under the agent's lock. Raises Problem 503 when the agent was deleted since its correlation."""
    before = await records.read(gateway.client, number)
    if before is None:
        raise Problem(503, f"agent {number} has just been removed; ask again", headers={"Retry-After": "1"})
    step = lifecycle.apply(before.agent, kind, body, now=time.time(), delay=gateway.settings.stop_delay)
    await records.commit(gateway, before, step)
    agent, command = step.agent, step.agent.command
    if command is not None and agent.stop_at is not None and agent.stop_at != before.agent.stop_at:
        due = DueStop(number, command.number, agent.stop_at, gateway.settings.stop_delay)
        gateway.agents.stops.put_nowait(due)
    return HookAnswer(
        agent=number, state=agent.state, command=None if command is None else command.number,
        turn=next((part.number for part in step.writes if isinstance(part, Turn)), None),
        additional_context=step.context,
    )  # fmt: skip


async def run_stops(gateway: Gateway) -> None:
    """Complete each pending stop after its delay, until cancelled."""
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(_stop_later(gateway, await gateway.agents.stops.get()))


async def _stop_later(gateway: Gateway, due: DueStop) -> None:
    gateway.agents.waiting_stops += 1
    try:
        await asyncio.sleep(due.delay)
        await stop(gateway, due)
    except (Problem, holdfast.HoldfastError) as error:
        log.event("agent.stop_left_to_watchdog", WARNING, agent=due.agent, command=due.command, why=str(error))
    finally:
        gateway.agents.waiting_stops -= 1


async def stop(gateway: Gateway, due: DueStop) -> Literal["completed", "nothing"]:
    """Complete the command under the agent's lock, unless that is over or the agent has continued."""
    async with records.locked(gateway.client, due.agent):
        before = await records.read(gateway.client, due.agent)
        if before is None:
            return "nothing"
        step = lifecycle.finish(before.agent, due.command, due.at, time.time())
        await records.commit(gateway, before, step)
        return "completed" if step.writes else "nothing"
