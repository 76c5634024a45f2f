"""Whose hook it is. Before the agent's lock, and without one: the database decides between replicas.

An agent's session is the name of its record, and names are unique. One that was announced and has no session yet has
the name of its folder: the first session that begins there is its own, by compare-and-swap.
"""

from __future__ import annotations

import time
from contextlib import suppress
from hashlib import sha256

import holdfast
from holdfast.gateway.agents.lifecycle import Agent, Step
from holdfast.gateway.agents.records import key, known, payload

_COUNTER = ("gateway", "agent-number")
_TRIES = 5


async def correlate(client: holdfast.AsyncClient, session_id: str, cwd: str | None) -> int:
    """The number of the agent of this session; there is one from now on."""
    objects = client.objects
    for _ in range(_TRIES):
        if found := await objects.get_by_name("agent", session_name(session_id)):
            return int(found.id)
        if cwd is not None and (expected := await objects.get_by_name("agent", folder_name(cwd))):
            was = known(expected)
            step = Step(was.agent.but(session_id=session_id), was.pending)
            with suppress(holdfast.Conflict, holdfast.AlreadyExists):
                condition = holdfast.MatchVersion(was.version)
                await objects.put_if("agent", expected.id, payload(step), condition, name=session_name(session_id))
                return was.agent.number
            continue  # somebody else was faster, with this session or another one
        return await create(client, session_name(session_id), session_id=session_id, cwd=cwd)
    raise holdfast.EngineError(f"session {session_id!r} was not correlated: too many begin in {cwd!r} at once")


async def create(
    client: holdfast.AsyncClient, name: str, *, session_id: str | None, cwd: str | None, sandbox: str | None = None
) -> int:
    """A new agent, or the one that somebody else has just created under that name."""
    number, now = await _next_number(client), time.time()
    agent = Agent(
        number=number, session_id=session_id, cwd=cwd, sandbox=sandbox, created_at=now, seen_at=now,
    )  # fmt: skip
    try:
        await client.objects.put_if("agent", key(number), payload(Step(agent)), holdfast.MustCreate(), name=name)
    except holdfast.AlreadyExists as error:
        if session_id is None:
            raise
        return int(error.owner)
    return number


def session_name(session_id: str) -> str:
    return f"session:{session_id}"


def folder_name(cwd: str) -> str:
    return f"cwd:{sha256(cwd.encode()).hexdigest()}"


async def _next_number(client: holdfast.AsyncClient) -> int:
    """Given once, whoever asks: by compare-and-swap. One that is not used is lost, which harms nobody."""
    for _ in range(_TRIES):
        try:
            counted = await client.objects.update(*_COUNTER, lambda record: {"last": record.payload["last"] + 1})
        except holdfast.Conflict as error:
            if error.current is None:
                with suppress(holdfast.AlreadyExists):
                    await client.objects.put_if(*_COUNTER, {"last": 0}, holdfast.MustCreate())
        else:
            number: int = counted.payload["last"]
            return number
    raise holdfast.EngineError("too many agents begin at once")
