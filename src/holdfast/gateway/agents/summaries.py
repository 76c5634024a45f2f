"""The summary of a command, made once.

The request that has the lock of the summary makes it. Requests that come meanwhile answer 202 at once, and later ones
return what is stored. The lock lives with a database session of the replica: it is free again when the replica dies.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from pkgutil import resolve_name
from typing import Any

import holdfast
from holdfast.gateway.agents import records
from holdfast.gateway.agents.lifecycle import AgentCommand, Turn
from holdfast.gateway.context import Gateway
from holdfast.problem_json import Problem

Summariser = Callable[[Sequence[Turn]], str | Awaitable[str]]
TIME_LIMIT = 60.0
"""Seconds that a summariser may take."""


def extract(turns: Sequence[Turn]) -> str:
    """The built-in summariser: the first sentence of the first prompt, and the last one of the last answer."""
    prompts = [turn.text for turn in turns if turn.kind == "prompt"]
    answers = [turn.text for turn in turns if turn.kind == "answer"]
    question = _sentences(prompts[0])[0] if prompts else "(no prompt)"
    answer = _sentences(answers[-1])[-1] if answers else "(no answer)"
    return f"{question} → {answer} ({len(turns)} turns, {len(prompts)} by the user)"


def _sentences(text: str) -> list[str]:
    lines = [line.strip() for line in text.replace(". ", ".\n").splitlines()]
    return [line[:200] for line in lines if line] or ["(nothing)"]


def load(name: str | None) -> Summariser:
    """Import ``module:function``. Raises ValueError when it cannot be imported or called."""
    if name is None:
        return extract
    try:
        summariser: Summariser = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"summariser {name!r} cannot be loaded: {error}") from error
    if not callable(summariser):
        raise ValueError(f"summariser {name!r} is no function")
    return summariser


async def summarise(gateway: Gateway, command: AgentCommand, summariser: Summariser) -> dict[str, Any] | None:
    """The summary of a command that has ended; None while another request makes it."""
    id = records.key(command.agent, command.number)
    if (stored := await _stored(gateway, id)) is not None:
        return stored
    lock = gateway.client.lock(f"gateway:summary:{id}")
    async with lock.or_skip() as grant:
        if grant is None:
            return None
        if (stored := await _stored(gateway, id)) is not None:
            return stored
        turns = await records.list_turns(gateway.client, command.agent, after=command.first_turn - 1)
        async with gateway.agents.summarising:
            text = await _call(summariser, [turn for turn in turns if turn.command == command.number])
        summary = {"text": text, "made_at": time.time()}
        try:
            await gateway.client.objects.put_if("@summary", id, summary, holdfast.MustCreate())
        except holdfast.AlreadyExists:  # the lock was lost while the summariser ran
            return await _stored(gateway, id)
        return summary


async def _stored(gateway: Gateway, id: str) -> dict[str, Any] | None:
    record = await gateway.client.objects.get("@summary", id)
    return None if record is None else dict(record.payload)


async def _call(summariser: Summariser, turns: Sequence[Turn]) -> str:
    """Call the summariser in a thread, because it may be slow. Raises Problem 502 when it fails."""
    try:
        async with asyncio.timeout(TIME_LIMIT):
            text = await asyncio.to_thread(summariser, turns)
            return str(await text if inspect.isawaitable(text) else text)
    except Exception as error:
        raise Problem(502, f"the summariser failed: {type(error).__name__}") from error
