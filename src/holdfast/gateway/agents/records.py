"""Agents, commands and turns in the store.

The agent's record is the commit: what a hook does to commands and turns is in it, too, and is written to their own
records after it. Whoever has the lock next writes what is still missing then, so no replica that dies in between leaves
half of a hook. Commands and turns are written so that a second time, or a late one, changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import holdfast
from holdfast.gateway.agents.lifecycle import Agent, Command, Step, Turn
from holdfast.gateway.context import Gateway
from holdfast.gateway.problem import Problem

PATIENCE = 15.0
PAGE = 1000
_MODELS: dict[str, type[Command | Turn]] = {"command": Command, "turn": Turn}


class Known(NamedTuple):
    """An agent as it is at this version, with what its last commit has to write elsewhere."""

    agent: Agent
    version: int
    pending: tuple[Command | Turn, ...]


def key(number: int, part: int | None = None) -> str:
    """Of the record: commands and turns of an agent stand next to each other, in their order."""
    return f"{number:010d}" if part is None else f"{number:010d}.{part:010d}"


@asynccontextmanager
async def locked(client: holdfast.AsyncClient, number: int) -> AsyncIterator[None]:
    """The agent is ours: for every replica, hook and worker. A 503 problem when it is not to be had in time."""
    busy = {"Retry-After": "1"}
    try:
        async with client.lock(("agent", number), timeout=PATIENCE):
            yield
    except holdfast.AcquireTimeout as error:
        raise Problem(503, f"agent {number} is busy: {error}; ask again", headers=busy, agent=number) from error
    except holdfast.Conflict as error:  # the lock was lost, or an expected agent has just got its session
        raise Problem(503, f"agent {number} was changed meanwhile; ask again", headers=busy, agent=number) from error


def payload(step: Step) -> dict[str, Any]:
    pending = [{"type": session_class(each), "payload": each.model_dump(mode="json")} for each in step.writes]
    return {**step.agent.model_dump(mode="json"), "pending": pending}


def known(record: Any) -> Known:
    pending = [_MODELS[each["type"]].model_validate(each["payload"]) for each in record.payload["pending"]]
    return Known(Agent.model_validate(record.payload), record.version, tuple(pending))


async def read(client: holdfast.AsyncClient, number: int) -> Known | None:
    record = await client.objects.get("agent", key(number))
    return None if record is None else known(record)


async def must_read(client: holdfast.AsyncClient, number: int) -> Known:
    """A 404 problem when there is none."""
    if (found := await read(client, number)) is None:
        raise Problem(404, f"there is no agent {number}")
    return found


async def commit(here: Gateway, before: Known, step: Step) -> None:
    """Under the agent's lock. Nothing is written when nothing has changed. One that ends without ever having had a
    session gives its folder back, or the next one there would be it."""
    client, number = here.client, before.agent.number
    await asyncio.gather(*(_write(client, each) for each in await unsettled(here, before)))
    if step.agent == before.agent and not step.writes:
        return
    condition = holdfast.MatchVersion(before.version)
    freed: dict[str, Any] = {"name": None} if step.agent.state == "ended" and step.agent.session_id is None else {}
    written = await client.objects.put_if("agent", key(number), payload(step), condition, **freed)
    await asyncio.gather(*(_write(client, each) for each in step.writes))
    here.agents.settled(number, written.version)


async def unsettled(here: Gateway, agent: Known) -> list[Command | Turn]:
    """What the agent's last commit has left to be written."""
    if here.agents.is_settled(agent.agent.number, agent.version):
        return []
    there = await asyncio.gather(*(_is_there(here.client, each) for each in agent.pending))
    missing = [each for each, found in zip(agent.pending, there, strict=True) if not found]
    if not missing:
        here.agents.settled(agent.agent.number, agent.version)
    return missing


async def listed(client: holdfast.AsyncClient) -> AsyncIterator[Known]:
    """All agents, page by page."""
    after: str | None = None
    while records := await client.objects.list("agent", after=after, most=PAGE):
        for record in records:
            yield known(record)
        after = records[-1].id


async def parts(client: holdfast.AsyncClient, kind: str, number: int, *, after: int = 0, most: int = PAGE) -> list[Any]:
    """The records of commands or turns of one agent, after the one of that number."""
    found = await client.objects.list(kind, after=key(number, after), most=most)
    return [record for record in found if record.id.startswith(f"{key(number)}.")]


async def turns(client: holdfast.AsyncClient, number: int, *, after: int) -> list[Turn]:
    """All of them."""
    found: list[Turn] = []
    while page := await parts(client, "turn", number, after=after):
        found += [Turn.model_validate(record.payload) for record in page]
        after = found[-1].number
    return found


async def forget(client: holdfast.AsyncClient, agent: Known) -> None:
    """An agent, with all that is known of it. Its own record last: until then this is done again."""
    number = agent.agent.number
    for kind in ("turn", "command", "summary"):
        while found := await parts(client, kind, number):
            for record in found:
                with suppress(holdfast.Conflict):
                    await client.objects.delete_if(kind, record.id, record.version)
    await client.objects.delete_if("agent", key(number), agent.version)


def session_class(each: Command | Turn) -> str:
    return "command" if isinstance(each, Command) else "turn"


def is_newer(each: Command | Turn, stored: Mapping[str, Any] | None) -> bool:
    """A turn never changes, and a command only when it is over."""
    return stored is None or (_is_final(each) and stored["status"] == "running")


async def _is_there(client: holdfast.AsyncClient, each: Command | Turn) -> bool:
    record = await client.objects.get(session_class(each), key(each.agent, each.number))
    return not is_newer(each, None if record is None else record.payload)


async def _write(client: holdfast.AsyncClient, each: Command | Turn) -> None:
    """So that once more, or late, changes nothing."""
    how = holdfast.Unconditional() if _is_final(each) else holdfast.MustCreate()
    with suppress(holdfast.AlreadyExists):
        await client.objects.put_if(
            session_class(each), key(each.agent, each.number), each.model_dump(mode="json"), how
        )


def _is_final(each: Command | Turn) -> bool:
    return isinstance(each, Command) and each.status != "running"
