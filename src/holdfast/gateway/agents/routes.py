"""Agents over HTTP, as one room of the gateway."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field, JsonValue

import holdfast
from holdfast.gateway.agents import config_editor, hooks, records, summaries, workers
from holdfast.gateway.agents.correlate import create, folder_name
from holdfast.gateway.agents.hooks import Printable
from holdfast.gateway.agents.inject import inject
from holdfast.gateway.agents.lifecycle import Agent, Command, Turn
from holdfast.gateway.context import Gateway, Here, Loop
from holdfast.gateway.problem import Problem, documented

router = APIRouter(tags=["agents"])
router.routes.extend(hooks.router.routes)

Number = Annotated[int, Path(ge=1, lt=1 << 31)]
After = Annotated[int, Query(ge=0, lt=1 << 31)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=Printable)]
ConfigName = Annotated[str, Path(pattern=config_editor.NAME)]


def loops(gateway: Gateway) -> list[Loop]:
    return [Loop("agents:stops", partial(hooks.run_stops, gateway)), *workers.loops(gateway)]


class Announcement(BaseModel):
    """An agent that is about to begin in this folder: its first session there becomes its own."""

    cwd: Annotated[str, Field(min_length=1, max_length=4096, pattern=Printable, examples=["/srv/app"])]
    sandbox: Name | None = None
    """The agent ends when this sandbox is gone."""


class Agents(BaseModel):
    agents: list[Agent]


class Commands(BaseModel):
    commands: list[Command]


class Turns(BaseModel):
    turns: list[Turn]


class Injection(BaseModel):
    prompt: Annotated[str, Field(max_length=10_000, examples=["You look after the tests."])]
    skills: Annotated[list[Name], Field(max_length=20)] = []


class Injected(BaseModel):
    injected: bool
    """False: it was done before."""
    prompt_injected_at: float


class Summary(BaseModel):
    text: str | None
    """None: it is being made."""
    made_at: float | None


class HeldLock(BaseModel):
    pid: int | None
    application_name: str | None
    state: str | None
    namespace: str | None
    entity_id: int | None
    name: str | None
    mode: str
    duration: float | None


class AdvisoryLocks(BaseModel):
    count: int
    locks: list[HeldLock]
    waiting: int


@router.get("/api/advisory-locks", responses=documented(503))
async def advisory_locks(here: Here) -> AdvisoryLocks:
    """All locks that are held, whoever holds them, and how many; and how many wait for one."""
    found = await here.client.locks.list()
    held = [HeldLock.model_validate(each, from_attributes=True) for each in found if each.granted]
    return AdvisoryLocks(count=len(held), locks=held, waiting=len(found) - len(held))


@router.get("/agents", responses=documented(422, 503))
async def agents(here: Here, after: After = 0, limit: Limit = 100) -> Agents:
    """In the order of their numbers; the next page begins ``after`` the last one."""
    found = await here.client.objects.list("agent", after=records.key(after), most=limit)
    return Agents(agents=[records.known(record).agent for record in found])


@router.post("/agents", status_code=201, responses=documented(409, 422, 503))
async def announce(body: Announcement, here: Here) -> Agent:
    if body.sandbox is not None and await here.client.objects.get("sandbox", body.sandbox) is None:
        raise Problem(422, f"there is no sandbox {body.sandbox!r}")
    number = await create(here.client, folder_name(body.cwd), session_id=None, cwd=body.cwd, sandbox=body.sandbox)
    return (await records.must_read(here.client, number)).agent


@router.get("/agents/config/{name}", responses=documented(404, 409, 422))
async def config(name: ConfigName, here: Here) -> dict[str, JsonValue]:
    return config_editor.read(config_editor.file_of(here.settings.agent_config, name))


@router.patch("/agents/config/{name}", responses=documented(404, 409, 413, 422, 503))
async def edit_config(name: ConfigName, body: dict[str, JsonValue], here: Here) -> dict[str, JsonValue]:
    """Merged into what is there (RFC 7396); the answer is what is there then."""
    return await config_editor.edit(config_editor.file_of(here.settings.agent_config, name), body)


@router.get("/agents/{number}", responses=documented(404, 422, 503))
async def agent(number: Number, here: Here) -> Agent:
    return (await records.must_read(here.client, number)).agent


@router.get("/agents/{number}/commands", responses=documented(404, 422, 503))
async def commands(number: Number, here: Here, after: After = 0, limit: Limit = 100) -> Commands:
    return Commands(commands=await _parts(here.client, "command", number, after, limit))


@router.get("/agents/{number}/turns", responses=documented(404, 422, 503))
async def turns(number: Number, here: Here, after: After = 0, limit: Limit = 100) -> Turns:
    return Turns(turns=await _parts(here.client, "turn", number, after, limit))


@router.post("/agents/{number}/injection", responses=documented(404, 422, 503))
async def injection(number: Number, body: Injection, here: Here) -> Injected:
    """A prompt and skills for the agent, once; told with the answer to its next session-start or prompt."""
    done, at = await inject(here, number, body.prompt, body.skills)
    return Injected(injected=done, prompt_injected_at=at)


@router.post(
    "/agents/{number}/commands/{command}/summary",
    responses={202: {"model": Summary, "description": "It is being made."}, **documented(404, 409, 422, 502, 503)},
)
async def summary(number: Number, command: Number, here: Here, response: Response) -> Summary:
    """Made by the first who asks; 202 while that one is at it."""
    found = await here.client.objects.get("command", records.key(number, command))
    if found is None:
        raise Problem(404, f"agent {number} has no command {command}")
    asked = Command.model_validate(found.payload)
    if asked.status == "running":
        raise Problem(409, f"command {command} of agent {number} is still running: ask when it is over")
    made = await summaries.summarise(here, asked, summaries.load(here.settings.summariser))
    if made is None:
        response.status_code, response.headers["Retry-After"] = 202, "1"
        return Summary(text=None, made_at=None)
    return Summary(**made)


async def _parts(client: holdfast.AsyncClient, kind: str, number: int, after: int, limit: int) -> list[Any]:
    """What the agent's last commit is still writing is there already."""
    known = await records.must_read(client, number)
    found = {
        record.payload["number"]: record.payload
        for record in await records.parts(client, kind, number, after=after, most=limit)
    }
    for each in known.pending:
        if (
            records.session_class(each) == kind
            and each.number > after
            and records.is_newer(each, found.get(each.number))
        ):
            found[each.number] = each
    return [found[number] for number in sorted(found)][:limit]
