"""Finds the agent of a hook, before the agent's lock and without it: compare-and-swap decides between replicas.

The name of an agent's record is its session, and names are unique. An agent that was announced and has no session yet
has the name of its folder; the first session that begins there renames the record, and is the session of that agent.
"""

from __future__ import annotations

import time
from contextlib import suppress
from hashlib import sha256

import holdfast
from holdfast.gateway.agents.lifecycle import Agent, AgentStep
from holdfast.gateway.agents.records import key, parse, payload

_COUNTER = ("@gateway", "agent-number")
_TRIES = 5


async def correlate(client: holdfast.AsyncClient, session_id: str, cwd: str | None) -> int:
    """The number of the agent of this session, which is created if there is none.

    Raises EngineError when other sessions won every attempt.
    """
    objects = client.objects
    for _ in range(_TRIES):
        if record := await objects.get_by_name("@agent", session_name(session_id)):
            return int(record.id)
        if cwd is not None and (expected := await objects.get_by_name("@agent", folder_name(cwd))):
            stored = parse(expected)
            step = AgentStep(stored.agent.but(session_id=session_id), stored.pending)
            with suppress(holdfast.Conflict, holdfast.AlreadyExists):
                condition = holdfast.MatchVersion(stored.version)
                await objects.put_if("@agent", expected.id, payload(step), condition, name=session_name(session_id))
                return stored.agent.number
            continue  # another request was faster, with this session or another one
        return await create(client, session_name(session_id), session_id=session_id, cwd=cwd)
    raise holdfast.EngineError(
        f"session {session_id!r} has no agent yet: too many sessions begin in {cwd!r} at once; try again"
    )


async def create(
    client: holdfast.AsyncClient, name: str, *, session_id: str | None, cwd: str | None, sandbox: str | None = None
) -> int:
    """Create an agent, and return its number; that of the existing one when the session has an agent by now.

    Raises AlreadyExists when an agent without a session is announced twice for one folder.
    """
    number, now = await _next_number(client), time.time()
    agent = Agent(
        number=number, session_id=session_id, cwd=cwd, sandbox=sandbox, created_at=now, seen_at=now,
    )  # fmt: skip
    try:
        await client.objects.put_if("@agent", key(number), payload(AgentStep(agent)), holdfast.MustCreate(), name=name)
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
    """A number that no other request gets, by compare-and-swap. A number that is not used is skipped for good."""
    for _ in range(_TRIES):
        try:
            counter = await client.objects.update(*_COUNTER, lambda record: {"last": record.payload["last"] + 1})
        except holdfast.Conflict as error:
            if error.current is None:
                with suppress(holdfast.AlreadyExists):
                    await client.objects.put_if(*_COUNTER, {"last": 0}, holdfast.MustCreate())
        else:
            number: int = counter.payload["last"]
            return number
    raise holdfast.EngineError("too many agents begin at once")
