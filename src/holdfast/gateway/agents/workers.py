"""Background workers for agents, on every replica.

Each worker lists the agents and acquires the lock of those that need work. An agent that is locked is being served: it
is skipped until the next cycle. Under the lock the agent is read again. A worker does one piece of work and one commit
per lock. When two replicas see the same need, one skips the agent, or finds nothing left to do.

reaper       ends agents whose sandbox is gone or that have sent no hook for ``agent_silence`` seconds; deletes those
             that ended a week ago, with their turns, commands and summaries
reconciler   adds messages of the transcript that no hook reported, as turns, after 5 s without a hook
poller       records how many tokens of context the agent used last, from its transcript
watchdog     completes commands whose pending stop was lost with its replica, times out those of agents that have sent
             no hook for ``command_limit`` seconds, writes commands and turns that a dead replica has not written
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import holdfast
from holdfast.gateway.agents import records, transcript
from holdfast.gateway.agents import worker_rules as rules
from holdfast.gateway.agents.lifecycle import Agent, AgentStep, Turn
from holdfast.gateway.agents.records import StoredAgent
from holdfast.gateway.agents.replica_state import WorkerCycle
from holdfast.gateway.context import Gateway, Loop
from holdfast.gateway.logs import WARNING, log

EVERY = 10.0


class AgentWorker(NamedTuple):
    name: str
    needs_work: Callable[[Gateway, StoredAgent, float], Awaitable[bool]]
    """Called for the agent as it was listed, and again under its lock."""
    work: Callable[[Gateway, StoredAgent, float], Awaitable[None]]


def loops(gateway: Gateway) -> list[Loop]:
    return [Loop(f"agents:{worker.name}", partial(_run, gateway, worker)) for worker in WORKERS]


async def _run(gateway: Gateway, worker: AgentWorker) -> None:
    while True:
        await asyncio.sleep(EVERY * random.uniform(0.8, 1.2))  # replicas that started together drift apart
        gateway.agents.cycles[worker.name] = await sweep(gateway, worker)


async def sweep(gateway: Gateway, worker: AgentWorker) -> WorkerCycle:
    """Run one cycle of a worker."""
    cycle = WorkerCycle(time.time())
    async for stored in records.list_all(gateway.client):
        if not await worker.needs_work(gateway, stored, cycle.at):
            continue
        number = stored.agent.number
        async with records.agent_lock(gateway.client, number).or_skip() as grant:
            if grant is None:
                cycle.skipped.append(number)
            elif await _work_under_lock(gateway, worker, number, cycle.at):
                cycle.done.append(number)
    return cycle


async def _work_under_lock(gateway: Gateway, worker: AgentWorker, number: int, now: float) -> bool:
    """Read the agent again, and do the work if it is still needed. True when it was done."""
    stored = await records.read(gateway.client, number)
    if stored is None or not await worker.needs_work(gateway, stored, now):
        return False
    try:
        await worker.work(gateway, stored, now)
    except holdfast.Conflict:  # an announced agent has just got its session
        return False
    except (OSError, ValueError) as error:  # of its transcript or its record; the other agents must not wait for it
        log.event("agent.skipped", WARNING, worker=worker.name, agent=number, why=str(error))
        return False
    return True


async def _reap_step(gateway: Gateway, stored: StoredAgent, now: float) -> AgentStep:
    agent = stored.agent
    is_sandbox_gone = (
        agent.sandbox is not None
        and agent.state != "ended"
        and await gateway.client.objects.get("@sandbox", agent.sandbox) is None
    )
    return rules.reap(agent, now, gateway.settings.agent_silence, sandbox_gone=is_sandbox_gone)


async def _needs_reaper(gateway: Gateway, stored: StoredAgent, now: float) -> bool:
    return rules.is_expired(stored.agent, now) or (await _reap_step(gateway, stored, now)).agent != stored.agent


async def _reap(gateway: Gateway, stored: StoredAgent, now: float) -> None:
    if rules.is_expired(stored.agent, now):
        await records.forget(gateway.client, stored)
    else:
        await records.commit(gateway, stored, await _reap_step(gateway, stored, now))


async def _needs_watchdog(gateway: Gateway, stored: StoredAgent, now: float) -> bool:
    step = rules.watch(stored.agent, now, gateway.settings.command_limit)
    return step.agent != stored.agent or bool(await records.missing_parts(gateway, stored))


async def _watch(gateway: Gateway, stored: StoredAgent, now: float) -> None:
    await records.commit(gateway, stored, rules.watch(stored.agent, now, gateway.settings.command_limit))


async def _needs_reconciler(gateway: Gateway, stored: StoredAgent, now: float) -> bool:
    return rules.needs_reconciling(stored.agent, now) and _transcript(gateway, stored.agent) is not None


async def _reconcile(gateway: Gateway, stored: StoredAgent, now: float) -> None:
    agent, file = stored.agent, _transcript(gateway, stored.agent)
    if file is None:
        return
    data = await asyncio.to_thread(transcript.read_from, file, agent.transcript_offset)
    lines = transcript.whole_lines(data)
    turns = await records.list_turns(gateway.client, agent.number, after=agent.transcript_turn)
    turns += [part for part in await records.missing_parts(gateway, stored) if isinstance(part, Turn)]
    offset = agent.transcript_offset + len(lines)
    is_end = len(data) < transcript.CHUNK and b"\n" not in data[len(lines) :]
    step = rules.reconcile(agent, transcript.entries(lines), turns, now, offset=offset, is_end=is_end)
    await records.commit(gateway, stored, step)


async def _needs_poller(gateway: Gateway, stored: StoredAgent, now: float) -> bool:
    return rules.needs_polling(stored.agent) and _transcript(gateway, stored.agent) is not None


async def _poll(gateway: Gateway, stored: StoredAgent, now: float) -> None:
    if (file := _transcript(gateway, stored.agent)) is not None:
        tokens = transcript.tokens(await asyncio.to_thread(transcript.read_end, file))
        await records.commit(gateway, stored, rules.poll(stored.agent, tokens, now))


def _transcript(gateway: Gateway, agent: Agent) -> Path | None:
    path = agent.transcript_path
    return None if path is None else transcript.find_file(path, gateway.settings.transcripts)


REAPER = AgentWorker("reaper", _needs_reaper, _reap)
RECONCILER = AgentWorker("reconciler", _needs_reconciler, _reconcile)
POLLER = AgentWorker("poller", _needs_poller, _poll)
WATCHDOG = AgentWorker("watchdog", _needs_watchdog, _watch)
WORKERS = (REAPER, RECONCILER, POLLER, WATCHDOG)
