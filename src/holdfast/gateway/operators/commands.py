"""Governed commands over HTTP, run as on the command line: with an actor and a reason, under the runtime lease and the
command's gate, with an entry in the audit.

Commands that belong to the machine or to the deployment, and those that need a secret, are refused.
"""

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
from holdfast import commands as governed
from holdfast.gateway.context import CurrentGateway, Gateway, Loop
from holdfast.gateway.problem import documented, problem_from
from holdfast.problem_json import Problem

router = APIRouter(prefix="/api/commands", tags=["operators"])

MAX_RUNNING = 4
"""Commands that run at once; each has a thread."""
_MAX_CHANGES = 500
_CLOSE_WITHIN = 5.0
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*$"
_REFUSED = {
    "wal.archive": "it writes a file on the machine that runs it",
    "schema.migrate": "migrations belong to the deployment, not to the service",
    "schema.revert": "migrations belong to the deployment, not to the service",
}


def _with_example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})


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
    elsewhere: str | None = Field(description="Why it is refused over HTTP; null: it is not.")
    model_config = _with_example(
        name="lease.release", summary="Release a lease that another process holds.", gate="leases", destructive=True,
        parameters=[{"name": "name", "help": "the lease", "kind": "str", "optional": False, "default": None}],
        elsewhere=None,
    )  # fmt: skip


class CommandList(BaseModel):
    commands: list[CommandAnswer]


class CommandRequest(BaseModel):
    actor: str | None = Field(
        None, min_length=1, max_length=200, pattern=_PRINTABLE,
        description="Who asks. With tokens it is the name of the token, and this is ignored.",
    )  # fmt: skip
    reason: str = Field(min_length=1, max_length=1000, pattern=_PRINTABLE, description="Why: for the audit.")
    parameters: dict[str, StrictStr | StrictInt | StrictFloat] = Field(default_factory=dict, max_length=20)
    dry_run: bool = Field(False, description="Return what would be changed, and change nothing.")
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


class CommandResult(BaseModel):
    command: str
    actor: str
    dry_run: bool
    changes: list[str] = Field(description="What was changed, or on a dry run would be.")
    fence: int | None = Field(description="Of the runtime lease under which it was done.")
    entry: int | None = Field(description="Of the audit; null after a dry run, which is not audited.")
    doubt: str | None = Field(description="What went wrong after it was done.")
    model_config = _with_example(
        command="lease.release", actor="jane", dry_run=False,
        changes=["lease 'nightly-import', held by worker-1 with fence 42, is released"], fence=43, entry=17,
        doubt=None,
    )  # fmt: skip


class CommandRunner:
    """Runs commands in threads, on a synchronous client of their own, because they block on the database."""

    def __init__(self, gateway: Gateway) -> None:
        self._settings = gateway.settings
        self._client: holdfast.Client | None = None
        self._running: set[Future[Any]] = set()
        self._closed = False

    async def run(self, work: Callable[[holdfast.Client], Any]) -> Any:
        """Run ``work`` in a thread and return its result. Raises Problem 503 when too many run, or at the end."""
        if self._closed or len(self._running) >= MAX_RUNNING:
            reason = "this replica is stopping" if self._closed else f"{MAX_RUNNING} commands run: wait for one to end"
            raise Problem(503, reason, headers={"Retry-After": "1"})
        if self._client is None:
            settings = self._settings
            self._client = holdfast.Client(settings.url, schema=settings.schema, policy=settings.policy)
        return await asyncio.wrap_future(self._start(work, self._client))

    def _start(self, work: Callable[[holdfast.Client], Any], client: holdfast.Client) -> Future[Any]:
        """Not an executor: its threads would keep the process alive. A command runs to its end also when the request
        is cancelled."""
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
        except RuntimeError as error:  # the system has no more threads
            self._running.discard(future)
            raise Problem(503, f"the command cannot start now: {error}", headers={"Retry-After": "1"}) from error
        return future

    async def close_on_cancel(self) -> None:
        """A loop of the gateway. On cancellation it waits a while for running commands, then closes the client."""
        try:
            await asyncio.Event().wait()
        finally:
            self._closed = True
            if self._running:
                await asyncio.wait([asyncio.wrap_future(each) for each in self._running], timeout=_CLOSE_WITHIN)
            if self._client is not None:
                client, self._client = self._client, None
                await asyncio.to_thread(client.close)


def loops(gateway: Gateway) -> list[Loop]:
    gateway.commands = CommandRunner(gateway)
    return [Loop("commands", gateway.commands.close_on_cancel)]


@router.get("", summary="The commands and their parameters", responses=documented(503))
async def commands() -> CommandList:
    return CommandList(commands=[_describe(command) for command in governed.commands().values()])


@router.post(
    "/{name}", summary="Run a command, or see what it would do", responses=documented(403, 404, 409, 422, 500, 503)
)
async def command(
    gateway: CurrentGateway,
    request: Request,
    name: Annotated[str, Path(min_length=1, max_length=200, examples=["lease.release"])],
    body: CommandRequest,
) -> CommandResult:
    declared = governed.commands().get(name)
    if declared is None:
        raise Problem(404, f"there is no command {name!r:.200}; GET /api/commands lists them")
    if reason := _refusal(declared):
        raise Problem(403, f"{name} is refused over HTTP, because {reason}: use holdfast do {name}")
    actor = request.state.principal if gateway.settings.tokens else body.actor
    if actor is None:
        raise Problem(422, "actor must be given: who asks for this, for the audit")

    def work(client: holdfast.Client) -> governed.CommandOutcome:
        try:
            return governed.run(client, name, body.parameters, actor=actor, reason=body.reason, dry_run=body.dry_run)
        except holdfast.HoldfastError as error:
            raise problem_from_run(error, lambda: _audit_entry(client, name, actor, body)) from error

    outcome: governed.CommandOutcome = await gateway.commands.run(work)
    hidden = len(outcome.changes) - _MAX_CHANGES
    changes = [*outcome.changes[:_MAX_CHANGES], *([f"and {hidden} more"] if hidden > 0 else [])]
    return CommandResult(
        command=name, actor=actor, dry_run=outcome.dry_run, changes=changes, fence=outcome.fence, entry=outcome.entry,
        doubt=outcome.doubt,
    )  # fmt: skip


def problem_from_run(error: holdfast.HoldfastError, audit_entry: Callable[[], dict[str, Any]]) -> Problem:
    """The problem for an error of a command. ``audit_entry`` is called when the outcome of the command is unknown."""
    match error:
        case (
            governed.CommandRefused()
            | holdfast.Conflict()
            | holdfast.LeaseLost()
            | holdfast.OperationFailed()
            | holdfast.OperationInProgress()
        ):
            return Problem(409, str(error), title="Refused")
        case holdfast.PolicyDenied():
            return problem_from(error)
        case holdfast.NotAcquired():
            leases = {governed.RUNTIME, *(f"@gate:{command.gate}" for command in governed.commands().values())}
            busy = "another command is under way, one at a time: " if error.name in leases else ""
            return Problem(409, f"{busy}{error}", title="Refused", headers={"Retry-After": "1"})
        case governed.CommandUnsettled() | holdfast.OwnershipUnknown():
            detail = f"the command has begun, and its end was not seen: {error}"
            return Problem(500, detail, title="Unsettled", **audit_entry())
        case holdfast.EngineError(certain=False):
            detail = f"the database has not answered, and the command may or may not have happened: {error}"
            return Problem(503, detail, title="Unsettled", headers={"Retry-After": "5"}, **audit_entry())
    return problem_from(error)


def _audit_entry(client: holdfast.Client, name: str, actor: str, body: CommandRequest) -> dict[str, Any]:
    """The latest entry of this command, actor and reason in the audit; nulls when that cannot be read."""
    with suppress(holdfast.HoldfastError):
        for entry in client.audit.list(limit=20):
            if (entry.action, entry.actor, entry.reason) == (name, actor, body.reason):
                return {"entry": entry.id, "outcome": entry.outcome}
    return {"entry": None, "outcome": None}


def _refusal(command: governed.Command) -> str | None:
    """Why a command is refused over HTTP, or None."""
    if any(parameter.secret for parameter in command.parameters.values()):
        return "it needs a secret, which is not for requests"
    return _REFUSED.get(command.name)


def _describe(command: governed.Command) -> CommandAnswer:
    parameters = [
        ParameterAnswer(
            name=name, help=parameter.help, kind=parameter.kind.__name__, optional=parameter.optional,
            default=parameter.default,
        )
        for name, parameter in command.parameters.items()
    ]  # fmt: skip
    return CommandAnswer(
        name=command.name, summary=command.summary, gate=command.gate, destructive=command.destructive,
        parameters=parameters, elsewhere=_refusal(command),
    )  # fmt: skip
