"""Agents, commands and turns in the store.

The agent's record is the commit. It also contains the commands and turns that a hook has changed (``pending``), which
are written to records of their own after it. The next holder of the agent's lock writes those that are still missing,
so a replica that dies in between leaves no half of a hook. Writing a command or a turn twice, or late, changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import holdfast
from holdfast.gateway.agents.lifecycle import Agent, AgentCommand, AgentStep, Turn
from holdfast.gateway.context import Gateway
from holdfast.problem_json import Problem

LOCK_TIMEOUT = 15.0
PAGE, PAGE_BYTES = 1000, 4 << 20
_MODELS: dict[str, type[AgentCommand | Turn]] = {"@command": AgentCommand, "@turn": Turn}


class StoredAgent(NamedTuple):
    """An agent at a version of its record, and what the commit of this version writes to other records."""

    agent: Agent
    version: int
    pending: tuple[AgentCommand | Turn, ...]


def key(number: int, part: int | None = None) -> str:
    """The id of a record. Commands and turns of an agent are listed next to each other, in their order."""
    return f"{number:010d}" if part is None else f"{number:010d}.{part:010d}"


def agent_lock(client: holdfast.AsyncClient, number: int, timeout: float = 0.0) -> holdfast.AsyncLock:
    """The lock of an agent. Its namespace is reserved, so no lock of an application meets it."""
    return client._reserved_lock("agent", number, timeout=timeout)


@asynccontextmanager
async def locked(client: holdfast.AsyncClient, number: int) -> AsyncIterator[None]:
    """Hold the agent's lock, which excludes every replica, hook and worker. Raises Problem 503 after a timeout, and
    when the agent was changed without the lock."""
    retry = {"Retry-After": "1"}
    try:
        async with agent_lock(client, number, LOCK_TIMEOUT):
            yield
    except holdfast.AcquireTimeout as error:
        raise Problem(503, f"agent {number} is busy: {error}; ask again", headers=retry, agent=number) from error
    except holdfast.Conflict as error:  # the lock was lost, or an announced agent has just got its session
        raise Problem(503, f"agent {number} was changed meanwhile; ask again", headers=retry, agent=number) from error


def payload(step: AgentStep) -> dict[str, Any]:
    pending = [{"type": kind_of(part), "payload": part.model_dump(mode="json")} for part in step.writes]
    return {**step.agent.model_dump(mode="json"), "pending": pending}


def parse(record: holdfast.ObjectRecord) -> StoredAgent:
    pending = [_MODELS[part["type"]].model_validate(part["payload"]) for part in record.payload["pending"]]
    return StoredAgent(Agent.model_validate(record.payload), record.version, tuple(pending))


async def read(client: holdfast.AsyncClient, number: int) -> StoredAgent | None:
    record = await client.objects.get("@agent", key(number))
    return None if record is None else parse(record)


async def read_or_404(client: holdfast.AsyncClient, number: int) -> StoredAgent:
    """Raises Problem 404 when there is no such agent."""
    if (stored := await read(client, number)) is None:
        raise Problem(404, f"there is no agent {number}")
    return stored


async def commit(gateway: Gateway, before: StoredAgent, step: AgentStep) -> None:
    """Write ``step`` under the agent's lock, and first what the commit before has left. No change writes nothing.

    An agent that ends without ever having had a session gives the name of its folder back: the next session there is
    not its session.
    """
    client, number = gateway.client, before.agent.number
    await asyncio.gather(*(_write(client, part) for part in await missing_parts(gateway, before)))
    if step.agent == before.agent and not step.writes:
        return
    condition = holdfast.MatchVersion(before.version)
    is_unclaimed = step.agent.state == "ended" and step.agent.session_id is None
    rename: dict[str, Any] = {"name": None} if is_unclaimed else {}
    written = await client.objects.put_if("@agent", key(number), payload(step), condition, **rename)
    await asyncio.gather(*(_write(client, part) for part in step.writes))
    gateway.agents.mark_complete(number, written.version)


async def missing_parts(gateway: Gateway, stored: StoredAgent) -> list[AgentCommand | Turn]:
    """The commands and turns that the agent's last commit has not written yet."""
    if gateway.agents.is_complete(stored.agent.number, stored.version):
        return []
    are_written = await asyncio.gather(*(_is_written(gateway.client, part) for part in stored.pending))
    missing = [part for part, is_written in zip(stored.pending, are_written, strict=True) if not is_written]
    if not missing:
        gateway.agents.mark_complete(stored.agent.number, stored.version)
    return missing


async def list_all(client: holdfast.AsyncClient) -> AsyncIterator[StoredAgent]:
    """All agents, page by page."""
    after: str | None = None
    while page := await client.objects.list("@agent", after=after, limit=PAGE, max_bytes=PAGE_BYTES):
        for record in page:
            yield parse(record)
        after = page[-1].id


async def list_parts(
    client: holdfast.AsyncClient, kind: str, number: int, *, after: int = 0, limit: int = PAGE
) -> list[Any]:
    """The records of commands, turns or summaries of one agent, after the one of that number."""
    page = await client.objects.list(kind, after=key(number, after), limit=limit, max_bytes=PAGE_BYTES)
    return [record for record in page if record.id.startswith(f"{key(number)}.")]


async def list_turns(client: holdfast.AsyncClient, number: int, *, after: int) -> list[Turn]:
    """All turns of an agent after the one of that number."""
    turns: list[Turn] = []
    while page := await list_parts(client, "@turn", number, after=after):
        turns += [Turn.model_validate(record.payload) for record in page]
        after = turns[-1].number
    return turns


async def forget(client: holdfast.AsyncClient, stored: StoredAgent) -> None:
    """Delete an agent with its turns, commands and summaries. Its own record is last: until then this is repeated."""
    number = stored.agent.number
    for kind in ("@turn", "@command", "@summary"):
        while page := await list_parts(client, kind, number):
            for record in page:
                with suppress(holdfast.Conflict):
                    await client.objects.delete_if(kind, record.id, record.version)
    await client.objects.delete_if("@agent", key(number), stored.version)


def kind_of(part: AgentCommand | Turn) -> str:
    return "@command" if isinstance(part, AgentCommand) else "@turn"


def is_newer(part: AgentCommand | Turn, stored: Mapping[str, Any] | None) -> bool:
    """Whether ``part`` has to replace ``stored``: a turn never changes, and a command only when it ends."""
    return stored is None or (_is_final(part) and stored["status"] == "running")


async def _is_written(client: holdfast.AsyncClient, part: AgentCommand | Turn) -> bool:
    record = await client.objects.get(kind_of(part), key(part.agent, part.number))
    return not is_newer(part, None if record is None else record.payload)


async def _write(client: holdfast.AsyncClient, part: AgentCommand | Turn) -> None:
    """Idempotent, also when it comes late: a running command never replaces an ended one."""
    condition = holdfast.Unconditional() if _is_final(part) else holdfast.MustCreate()
    with suppress(holdfast.AlreadyExists):
        await client.objects.put_if(
            kind_of(part), key(part.agent, part.number), part.model_dump(mode="json"), condition
        )


def _is_final(part: AgentCommand | Turn) -> bool:
    return isinstance(part, AgentCommand) and part.status != "running"
