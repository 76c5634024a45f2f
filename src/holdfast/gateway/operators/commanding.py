"""Governed commands over HTTP. Each is run as on the command line: by somebody, for a reason, under the runtime lease
and its gate, with an entry in the audit. Not what belongs to the machine or to the deployment, and no break-glass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

import holdfast
from holdfast import commands as operator
from holdfast.gateway.context import Gateway, Here, Loop
from holdfast.gateway.operators.answers import example
from holdfast.gateway.problem import Problem, documented, problem_of

router = APIRouter(prefix="/api/commands", tags=["operators"])

MOST = 4
"""That are under way at once; each has a thread."""
_TOLD = 500
_PATIENCE = 5.0
_NAME = r"^[^\x00-\x1f\x7f-\x9f]*$"
_ELSEWHERE = {
    "wal.archive": "it writes a file on the machine that it runs on",
    "schema.migrate": "the tables belong to the deployment, not to the service that stands on them",
    "schema.revert": "the tables belong to the deployment, not to the service that stands on them",
}


class ParameterAnswer(BaseModel):
    name: str
    help: str
    kind: str = Field(description="str, int or float")
    optional: bool
    default: str | int | float | None


class CommandAnswer(BaseModel):
    name: str
    summary: str
    gate: str = Field(description="The gate that is open while it runs.")
    destructive: bool
    parameters: list[ParameterAnswer]
    elsewhere: str | None = Field(description="Why it is not to be had over HTTP; null: it is.")
    model_config = example(
        name="lease.release", summary="Take a lease away from its holder.", gate="leases", destructive=True,
        parameters=[{"name": "name", "help": "the lease", "kind": "str", "optional": False, "default": None}],
        elsewhere=None,
    )  # fmt: skip


class Commands(BaseModel):
    commands: list[CommandAnswer]


class Order(BaseModel):
    actor: str | None = Field(
        None, min_length=1, max_length=200, pattern=_NAME,
        description="Who asks. Where tokens are in use it is whose token it is, and need not be said.",
    )  # fmt: skip
    reason: str = Field(min_length=1, max_length=1000, pattern=_NAME, description="Why: for the audit.")
    parameters: dict[str, StrictStr | StrictInt | StrictFloat] = Field(default_factory=dict, max_length=20)
    dry_run: bool = Field(False, description="Only look: tells what would be changed, and changes nothing.")
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "actor": "jane", "reason": "its machine is gone", "parameters": {"name": "nightly-import"},
                    "dry_run": True,
                }
            ]
        },
    )  # fmt: skip


class Result(BaseModel):
    command: str
    actor: str
    dry_run: bool
    changes: list[str] = Field(description="What was, or on a dry run would be, changed.")
    fence: int | None = Field(description="Of the runtime lease under which it was done.")
    entry: int | None = Field(description="Of the audit; null after a dry run, which leaves none.")
    doubt: str | None = Field(description="What went wrong after it was done.")
    model_config = example(
        command="lease.release", actor="jane", dry_run=False,
        changes=["lease 'nightly-import', held by worker-1 with fence 42, is taken away"], fence=43, entry=17,
        doubt=None,
    )  # fmt: skip


class Desk:
    """Runs commands beside the loop, in threads and on a client of their own, because they wait for the database."""

    def __init__(self, gateway: Gateway) -> None:
        self._settings = gateway.settings
        self._client: holdfast.Client | None = None
        self._running: set[Future[Any]] = set()
        self._closed = False

    async def run(self, work: Callable[[holdfast.Client], Any]) -> Any:
        if self._closed or len(self._running) >= MOST:
            why = "this replica ends" if self._closed else f"{MOST} commands are under way: wait until one has ended"
            raise Problem(503, why, headers={"Retry-After": "1"})
        if self._client is None:
            place = self._settings
            self._client = holdfast.Client(place.url, schema=place.schema, policy=place.policy)
        return await asyncio.wrap_future(self._begin(work, self._client))

    def _begin(self, work: Callable[[holdfast.Client], Any], client: holdfast.Client) -> Future[Any]:
        """It goes on to its end, whether somebody still waits for the answer or not; but keeps no process alive."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self._running.add(future)
        future.add_done_callback(self._running.discard)

        def thread() -> None:
            try:
                future.set_result(work(client))
            except BaseException as error:
                future.set_exception(error)

        try:
            threading.Thread(target=thread, name="holdfast command", daemon=True).start()
        except RuntimeError as error:  # no thread to be had now: its place is another's
            self._running.discard(future)
            raise Problem(503, f"it cannot be begun now: {error}", headers={"Retry-After": "1"}) from error
        return future

    async def serve(self) -> None:
        """Until we are told to end: what is under way may finish, for a while."""
        try:
            await asyncio.Event().wait()
        finally:
            self._closed = True
            if self._running:
                await asyncio.wait([asyncio.wrap_future(each) for each in self._running], timeout=_PATIENCE)
            if self._client is not None:
                client, self._client = self._client, None
                await asyncio.to_thread(client.close)


def loops(gateway: Gateway) -> list[Loop]:
    desk = gateway.rooms["commands"] = Desk(gateway)
    return [Loop("commands", desk.serve)]


@router.get("", summary="Which commands there are, and what each needs", responses=documented(503))
async def commands() -> Commands:
    return Commands(commands=[_told(each) for each in operator.commands().values()])


@router.post("/{name}", summary="Run one, or see what it would do", responses=documented(403, 404, 409, 422, 500, 503))
async def command(
    here: Here,
    request: Request,
    name: Annotated[str, Path(min_length=1, max_length=200, examples=["lease.release"])],
    order: Order,
) -> Result:
    declared = operator.commands().get(name)
    if declared is None:
        raise Problem(404, f"there is no command {name!r:.200}; GET /api/commands tells which there are")
    if why := _elsewhere(declared):
        raise Problem(403, f"{name} is not to be had over HTTP, because {why}: use holdfast do {name}")
    actor = request.state.principal if here.settings.tokens else order.actor
    if actor is None:
        raise Problem(422, "actor must be given: who asks for this, for the audit")

    def work(client: holdfast.Client) -> operator.Outcome:
        try:
            return operator.run(client, name, order.parameters, actor=actor, reason=order.reason, dry_run=order.dry_run)
        except holdfast.HoldfastError as error:
            raise problem_of_run(error, lambda: _entry(client, name, actor, order)) from error

    outcome: operator.Outcome = await here.rooms["commands"].run(work)
    more = [f"and {len(outcome.changes) - _TOLD} more"] if len(outcome.changes) > _TOLD else []
    return Result(
        command=name, actor=actor, dry_run=outcome.dry_run, changes=[*outcome.changes[:_TOLD], *more],
        fence=outcome.fence, entry=outcome.entry, doubt=outcome.doubt,
    )  # fmt: skip


def problem_of_run(error: holdfast.HoldfastError, known: Callable[[], dict[str, Any]]) -> Problem:
    """What an error says to whoever asked. ``known``: asked when it is not certain what has become of it."""
    match error:
        case (
            operator.CommandRefused()
            | holdfast.Conflict()
            | holdfast.LeaseLost()
            | holdfast.OperationFailed()
            | holdfast.OperationInProgress()
        ):
            return Problem(409, str(error), title="Refused")
        case holdfast.PolicyDenied():
            return problem_of(error)
        case holdfast.NotAcquired():
            needed = {operator.RUNTIME, *(f"@gate:{each.gate}" for each in operator.commands().values())}
            busy = "another command is under way, one at a time: " if error.name in needed else ""
            return Problem(409, f"{busy}{error}", title="Refused", headers={"Retry-After": "1"})
        case operator.CommandUnsettled() | holdfast.OwnershipUnknown():
            return Problem(500, f"it was begun, and its end was not seen: {error}", title="Unsettled", **known())
        case holdfast.EngineError(certain=False):
            told = f"the database has not answered, and it may or may not have happened: {error}"
            return Problem(503, told, title="Unsettled", headers={"Retry-After": "5"}, **known())
    return problem_of(error)


def _entry(client: holdfast.Client, name: str, actor: str, order: Order) -> dict[str, Any]:
    """What the audit says of it, where that can be had: the latest entry of this command, by them, for this reason."""
    with suppress(holdfast.HoldfastError):
        for each in client.audit.list(most=20):
            if (each.action, each.actor, each.reason) == (name, actor, order.reason):
                return {"entry": each.id, "outcome": each.outcome}
    return {"entry": None, "outcome": None}


def _elsewhere(declared: operator.Command) -> str | None:
    if any(each.secret for each in declared.parameters.values()):
        return "it needs a secret, which is not for requests"
    return _ELSEWHERE.get(declared.name)


def _told(each: operator.Command) -> CommandAnswer:
    parameters = [
        ParameterAnswer(
            name=name, help=one.help, kind=one.kind.__name__, optional=one.optional, default=one.default
        )
        for name, one in each.parameters.items()
    ]  # fmt: skip
    return CommandAnswer(
        name=each.name, summary=each.summary, gate=each.gate, destructive=each.destructive, parameters=parameters,
        elsewhere=_elsewhere(each),
    )  # fmt: skip
