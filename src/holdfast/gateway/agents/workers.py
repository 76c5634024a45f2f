"""What looks after agents in the background, on every replica.

Each worker lists the agents, and asks for the lock of those alone with whom something is wrong. One that is locked is
being served: it is skipped, and looked at again in the next cycle. Under the lock the agent is read anew; one lock, one
piece of work, one commit, one release an agent. Two replicas that find the same thing skip each other, or the second
finds nothing left to do.

reaper       ends agents whose sandbox is gone or that were not heard of for ``agent_silence`` seconds; removes those
             that ended a week ago, with their turns, commands and summaries
reconciler   adds as turns what the transcript says and no hook told, once the agent has been quiet for 5 s
poller       notes how many tokens of context the agent used last, from its transcript
watchdog     completes commands whose deferred stop was lost with its replica, ends those of agents that have been
             silent for ``command_limit`` seconds, writes what a replica that died has left to be written
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import holdfast
from holdfast.gateway.agents import records, transcript, upkeep
from holdfast.gateway.agents.desk import Swept
from holdfast.gateway.agents.lifecycle import Agent, Turn
from holdfast.gateway.agents.records import Known
from holdfast.gateway.context import Gateway, Loop
from holdfast.gateway.logs import say

EVERY = 10.0


class Worker(NamedTuple):
    name: str
    wants: Callable[[Gateway, Known, float], Awaitable[bool]]
    """Asked twice: of the agent as it was listed, and again under its lock."""
    work: Callable[[Gateway, Known, float], Awaitable[None]]


def loops(here: Gateway) -> list[Loop]:
    return [Loop(f"agents:{worker.name}", partial(_run, here, worker)) for worker in WORKERS]


async def _run(here: Gateway, worker: Worker) -> None:
    while True:
        await asyncio.sleep(EVERY * random.uniform(0.8, 1.2))  # replicas that started together drift apart
        here.agents.cycles[worker.name] = await sweep(here, worker)


async def sweep(here: Gateway, worker: Worker) -> Swept:
    """One cycle."""
    swept = Swept(time.time())
    async for listed in records.listed(here.client):
        if not await worker.wants(here, listed, swept.at):
            continue
        number = listed.agent.number
        async with here.client.lock(("agent", number)).or_skip() as grant:
            if grant is None:
                swept.skipped.append(number)
            elif await _tend(here, worker, number, swept.at):
                swept.done.append(number)
    return swept


async def _tend(here: Gateway, worker: Worker, number: int, now: float) -> bool:
    """Under the lock: what was listed may not be so any more."""
    agent = await records.read(here.client, number)
    if agent is None or not await worker.wants(here, agent, now):
        return False
    try:
        await worker.work(here, agent, now)
    except holdfast.Conflict:  # an expected agent has just got its session
        return False
    except (OSError, ValueError) as error:  # of its transcript, or its own; the others are looked after
        say("agent.skipped", logging.WARNING, worker=worker.name, agent=number, why=str(error))
        return False
    return True


async def _is_homeless(here: Gateway, agent: Agent) -> bool:
    if agent.sandbox is None or agent.state == "ended":
        return False
    return await here.client.objects.get("sandbox", agent.sandbox) is None


async def _wants_reaper(here: Gateway, known: Known, now: float) -> bool:
    if upkeep.is_forgotten(known.agent, now):
        return True
    step = upkeep.reap(known.agent, now, here.settings.agent_silence, homeless=await _is_homeless(here, known.agent))
    return step.agent != known.agent


async def _reap(here: Gateway, known: Known, now: float) -> None:
    if upkeep.is_forgotten(known.agent, now):
        await records.forget(here.client, known)
        return
    homeless = await _is_homeless(here, known.agent)
    step = upkeep.reap(known.agent, now, here.settings.agent_silence, homeless=homeless)
    await records.commit(here, known, step)


async def _wants_watchdog(here: Gateway, known: Known, now: float) -> bool:
    step = upkeep.watch(known.agent, now, here.settings.command_limit)
    return step.agent != known.agent or bool(await records.unsettled(here, known))


async def _watch(here: Gateway, known: Known, now: float) -> None:
    await records.commit(here, known, upkeep.watch(known.agent, now, here.settings.command_limit))


async def _wants_reconciler(here: Gateway, known: Known, now: float) -> bool:
    return upkeep.is_settled(known.agent, now) and _file(here, known.agent) is not None


async def _reconcile(here: Gateway, known: Known, now: float) -> None:
    agent, file = known.agent, _file(here, known.agent)
    if file is None:
        return
    data = await asyncio.to_thread(transcript.read_from, file, agent.transcript_offset)
    lines = transcript.whole_lines(data)
    turns = await records.turns(here.client, agent.number, after=agent.transcript_turn)
    turns += [each for each in await records.unsettled(here, known) if isinstance(each, Turn)]
    offset = agent.transcript_offset + len(lines)
    whole = len(data) < transcript.CHUNK and b"\n" not in data[len(lines) :]
    step = upkeep.reconcile(agent, transcript.entries(lines), turns, now, offset=offset, whole=whole)
    await records.commit(here, known, step)


async def _wants_poller(here: Gateway, known: Known, now: float) -> bool:
    return upkeep.is_unpolled(known.agent) and _file(here, known.agent) is not None


async def _poll(here: Gateway, known: Known, now: float) -> None:
    if (file := _file(here, known.agent)) is not None:
        tokens = transcript.tokens(await asyncio.to_thread(transcript.read_end, file))
        await records.commit(here, known, upkeep.poll(known.agent, tokens, now))


def _file(here: Gateway, agent: Agent) -> Path | None:
    path = agent.transcript_path
    return None if path is None else transcript.confined(path, here.settings.transcripts)


REAPER = Worker("reaper", _wants_reaper, _reap)
RECONCILER = Worker("reconciler", _wants_reconciler, _reconcile)
POLLER = Worker("poller", _wants_poller, _poll)
WATCHDOG = Worker("watchdog", _wants_watchdog, _watch)
WORKERS = (REAPER, RECONCILER, POLLER, WATCHDOG)
