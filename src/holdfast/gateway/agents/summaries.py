"""What became of a command, in a few words, made once.

There is a record from the first question on. Whoever has its row makes the summary, in the transaction that has it:
whoever asks meanwhile is told so at once, whoever asks later gets what is there, and when the maker dies the row is
free with its session. SQLite has no locks on rows, only one writer a file, which a slow summariser must not be: there
it is a lock of the record's name, and the same otherwise.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pkgutil import resolve_name
from typing import Any, NamedTuple

import holdfast
from holdfast.gateway.agents import records
from holdfast.gateway.agents.lifecycle import Command, Turn
from holdfast.gateway.context import Gateway
from holdfast.gateway.problem import Problem

Summariser = Callable[[Sequence[Turn]], str | Awaitable[str]]
LIMIT = 60.0
"""Seconds that a summariser may take."""
_OPTIONS = {"application_name": "holdfast-summary", "connect_timeout": "5", "target_session_attrs": "read-write"}


class Held(NamedTuple):
    payload: dict[str, Any]
    version: int
    tx: Any


def extract(turns: Sequence[Turn]) -> str:
    """The summariser unless another one is set: the first sentence of the first prompt, the last of the last answer."""
    prompts = [turn.text for turn in turns if turn.kind == "prompt"]
    answers = [turn.text for turn in turns if turn.kind == "answer"]
    asked = _sentences(prompts[0])[0] if prompts else "(no prompt)"
    answered = _sentences(answers[-1])[-1] if answers else "(no answer)"
    return f"{asked} → {answered} ({len(turns)} turns, {len(prompts)} by the user)"


def _sentences(text: str) -> list[str]:
    lines = [line.strip() for line in text.replace(". ", ".\n").splitlines()]
    return [line[:200] for line in lines if line] or ["(nothing)"]


def load(name: str | None) -> Summariser:
    """``module:function``; ValueError when there is none such."""
    if name is None:
        return extract
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"summariser {name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise ValueError(f"summariser {name!r} is no function")
    summariser: Summariser = found
    return summariser


async def summarise(here: Gateway, command: Command, summariser: Summariser) -> dict[str, Any] | None:
    """The summary of a command that is over; None while somebody else is making it."""
    objects, id = here.client.objects, records.key(command.agent, command.number)
    known = await objects.get("summary", id)
    if known is not None and known.payload["text"] is not None:
        return dict(known.payload)
    if known is None:
        with suppress(holdfast.AlreadyExists):
            await objects.put_if("summary", id, {"text": None, "made_at": None}, holdfast.MustCreate())
    async with here.agents.summarising, _held(here, id) as held:
        if held is None or held.payload["text"] is not None:
            return None if held is None else held.payload
        said = await records.turns(here.client, command.agent, after=command.first_turn - 1)
        turns = [turn for turn in said if turn.command == command.number]
        made = {"text": await _ask(summariser, turns), "made_at": time.time()}
        await objects.put_if("summary", id, made, holdfast.MatchVersion(held.version), tx=held.tx)
        return made


async def _ask(summariser: Summariser, turns: Sequence[Turn]) -> str:
    """In a thread: it may be slow. What is wrong with it is not the fault of whoever asks."""
    try:
        async with asyncio.timeout(LIMIT):
            text = await asyncio.to_thread(summariser, turns)
            return str(await text if inspect.isawaitable(text) else text)
    except Exception as error:
        raise Problem(502, f"the summariser failed: {type(error).__name__}") from error


@asynccontextmanager
async def _held(here: Gateway, id: str) -> AsyncIterator[Held | None]:
    """The record for ourselves; None when somebody has it."""
    if here.settings.single:
        async with here.client.lock(f"gateway:summary:{id}").or_skip() as grant:
            record = None if grant is None else await here.client.objects.get("summary", id)
            yield None if record is None else Held(dict(record.payload), record.version, None)
        return
    async with _connection(here) as connection:
        row = await holdfast.row_lock(connection, (here.settings.schema, "object"), type="summary", id=id)
        yield None if row is None else Held(json.loads(row["body"]), row["version"], connection)


@asynccontextmanager
async def _connection(here: Gateway) -> AsyncIterator[Any]:
    """Of our own, for one transaction: committed at the end, rolled back by an error."""
    import psycopg
    from psycopg.conninfo import make_conninfo

    url = f"postgresql://{here.settings.url.partition('://')[2]}"
    try:
        async with await psycopg.AsyncConnection.connect(make_conninfo(url, **_OPTIONS)) as made:
            yield made
    except psycopg.Error as error:
        told = f"the database did not do it: {type(error).__name__}"
        raise Problem(503, told, headers={"Retry-After": "1"}) from error
