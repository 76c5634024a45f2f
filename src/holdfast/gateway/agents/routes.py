"""The routes of agents other than hooks."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field, JsonValue

from holdfast.gateway.agents import config_editor, hooks, records, summaries, workers
from holdfast.gateway.agents.correlation import create, folder_name
from holdfast.gateway.agents.hooks import PRINTABLE
from holdfast.gateway.agents.injection import inject
from holdfast.gateway.agents.lifecycle import Agent, AgentCommand, Turn
from holdfast.gateway.context import CurrentGateway, Gateway, Loop
from holdfast.gateway.operators.models import LockAnswer
from holdfast.gateway.problem import documented
from holdfast.gateway.record_page import list_page
from holdfast.problem_json import Problem

router = APIRouter(tags=["agents"])
router.routes.extend(hooks.router.routes)

Number = Annotated[int, Path(ge=1, lt=1 << 31)]
After = Annotated[int, Query(ge=0, lt=1 << 31)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=PRINTABLE)]
ConfigName = Annotated[str, Path(pattern=config_editor.NAME)]


def loops(gateway: Gateway) -> list[Loop]:
    return [Loop("agents:stops", partial(hooks.run_stops, gateway)), *workers.loops(gateway)]


class Announcement(BaseModel):
    """An agent that is about to start in this folder: the next session that begins there is its session."""

    cwd: Annotated[str, Field(min_length=1, max_length=4096, pattern=PRINTABLE, examples=["/srv/app"])]
    sandbox: Name | None = None
    """The agent ends when this sandbox is gone."""


class AgentPage(BaseModel):
    agents: list[Agent]
    next: int | None = Field(description="`after` of the next page; null at the end.")


class AgentCommandPage(BaseModel):
    commands: list[AgentCommand]
    next: int | None = Field(description="`after` of the next page; null at the end.")


class TurnPage(BaseModel):
    turns: list[Turn]
    next: int | None = Field(description="`after` of the next page; null at the end.")


class Injection(BaseModel):
    prompt: Annotated[str, Field(max_length=10_000, examples=["You look after the tests."])]
    skills: Annotated[list[Name], Field(max_length=20)] = []


class Injected(BaseModel):
    injected: bool
    """False: an earlier request did."""
    prompt_injected_at: float


class Summary(BaseModel):
    text: str | None
    """Null while another request makes it."""
    made_at: float | None


class AdvisoryLocks(BaseModel):
    count: int
    locks: list[LockAnswer]
    waiting: int
    """How many requests wait for any lock, in all processes."""


@router.get("/api/advisory-locks", responses=documented(503))
async def advisory_locks(gateway: CurrentGateway) -> AdvisoryLocks:
    """All advisory locks of the database that are held, their number, and the number of waiting requests."""
    locks = await gateway.client.locks.list()
    held = [LockAnswer.model_validate(lock, from_attributes=True) for lock in locks if lock.granted]
    waiting = sum({(lock.namespace, lock.entity_id, lock.name): lock.waiting for lock in locks}.values())
    return AdvisoryLocks(count=len(held), locks=held, waiting=waiting)


@router.get("/agents", responses=documented(422, 503))
async def agents(gateway: CurrentGateway, after: After = 0, limit: Limit = 100) -> AgentPage:
    """In the order of their numbers; the next page begins ``after`` the last one."""
    page, next = await list_page(gateway, "@agent", records.key(after), limit)
    agents = [records.parse(record).agent for record in page]
    return AgentPage(agents=agents, next=agents[-1].number if next else None)


@router.post("/agents", status_code=201, responses=documented(409, 422, 503))
async def announce(body: Announcement, gateway: CurrentGateway) -> Agent:
    if body.sandbox is not None and await gateway.client.objects.get("@sandbox", body.sandbox) is None:
        raise Problem(422, f"there is no sandbox {body.sandbox!r}")
    number = await create(gateway.client, folder_name(body.cwd), session_id=None, cwd=body.cwd, sandbox=body.sandbox)
    return (await records.read_or_404(gateway.client, number)).agent


@router.get("/agents/config/{name}", responses=documented(404, 409, 422))
async def config(name: ConfigName, gateway: CurrentGateway) -> dict[str, JsonValue]:
    return config_editor.read(config_editor.find_file(gateway.settings.agent_config, name))


@router.patch("/agents/config/{name}", responses=documented(404, 409, 413, 422, 503))
async def edit_config(name: ConfigName, body: dict[str, JsonValue], gateway: CurrentGateway) -> dict[str, JsonValue]:
    """Apply a JSON merge patch (RFC 7396) and return the result."""
    return await config_editor.edit(config_editor.find_file(gateway.settings.agent_config, name), body)


@router.get("/agents/{number}", responses=documented(404, 422, 503))
async def agent(number: Number, gateway: CurrentGateway) -> Agent:
    return (await records.read_or_404(gateway.client, number)).agent


@router.get("/agents/{number}/commands", responses=documented(404, 422, 503))
async def commands(number: Number, gateway: CurrentGateway, after: After = 0, limit: Limit = 100) -> AgentCommandPage:
    parts, next = await _list_parts(gateway, "@command", number, after, limit)
    return AgentCommandPage(commands=parts, next=next)


@router.get("/agents/{number}/turns", responses=documented(404, 422, 503))
async def turns(number: Number, gateway: CurrentGateway, after: After = 0, limit: Limit = 100) -> TurnPage:
    parts, next = await _list_parts(gateway, "@turn", number, after, limit)
    return TurnPage(turns=parts, next=next)


@router.post("/agents/{number}/injection", responses=documented(404, 422, 503))
async def injection(number: Number, body: Injection, gateway: CurrentGateway) -> Injected:
    """Give the agent a prompt and skills, once, with the answer to its next session-start or prompt."""
    is_done, at = await inject(gateway, number, body.prompt, body.skills)
    return Injected(injected=is_done, prompt_injected_at=at)


@router.post(
    "/agents/{number}/commands/{command}/summary",
    responses={
        202: {"model": Summary, "description": "Another request makes it."},
        **documented(404, 409, 422, 502, 503),
    },
)
async def summary(number: Number, command: Number, gateway: CurrentGateway, response: Response) -> Summary:
    """Made by the first request; 202 while that makes it."""
    record = await gateway.client.objects.get("@command", records.key(number, command))
    if record is None:
        raise Problem(404, f"agent {number} has no command {command}")
    ended = AgentCommand.model_validate(record.payload)
    if ended.status == "running":
        raise Problem(409, f"command {command} of agent {number} is still running: ask when it is over")
    stored = await summaries.summarise(gateway, ended, summaries.load(gateway.settings.summariser))
    if stored is None:
        response.status_code, response.headers["Retry-After"] = 202, "1"
        return Summary(text=None, made_at=None)
    return Summary(**stored)


async def _list_parts(gateway: Gateway, kind: str, number: int, after: int, limit: int) -> tuple[list[Any], int | None]:
    """A page of commands or turns of an agent, with those that the agent's last commit has not written yet, and where
    the next page begins."""
    stored, of_agent = await records.read_or_404(gateway.client, number), f"{records.key(number)}."
    page, next = await list_page(gateway, kind, records.key(number, after), limit)
    parts = {record.payload["number"]: record.payload for record in page if record.id.startswith(of_agent)}
    is_last = next is None or not next.startswith(of_agent)
    for part in stored.pending:
        is_here = part.number > after and (is_last or part.number <= max(parts))
        if records.kind_of(part) == kind and is_here and records.is_newer(part, parts.get(part.number)):
            parts[part.number] = part
    numbers = sorted(parts)[:limit]
    return [parts[each] for each in numbers], None if is_last and len(parts) <= limit else numbers[-1]
