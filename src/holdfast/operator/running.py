"""How a command runs: actor and reason, audit entry, runtime lease, gate window; and the two exceptions to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import holdfast
from holdfast import HoldfastError, PolicyDenied
from holdfast.operator.registry import Command, commands, open_windows

if TYPE_CHECKING:
    from holdfast import Client

RUNTIME = "holdfast:runtime"
"""The lease that every command runs inside: one operator at a time."""
BREAK_GLASS = "break-glass"
"""The gate of what ends a lease that commands themselves need, without having it."""
_PATIENCE = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """What a command has while it runs: the database, who asks and why, and the entry of the audit."""

    command: Command
    client: Client
    actor: str
    reason: str
    entry: int | None
    break_glass: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """``changes`` are what was, or on a dry run would be, changed."""

    command: str
    changes: list[str]
    dry_run: bool
    fence: int | None = None
    entry: int | None = None


def run(
    client: Client, name: str, parameters: Mapping[str, Any] | None = None, *, actor: str, reason: str,
    dry_run: bool = False, break_glass: bool = False,
) -> Outcome:  # fmt: skip
    """Run a governed command. ``dry_run`` only looks: no lease, no audit. ``break_glass`` has one purpose: to release
    the runtime lease, or a gate's, when whoever has it does not let go."""
    command = commands().get(name)
    if command is None:
        raise ValueError(f"there is no command {name!r}; there are: {', '.join(commands())}")
    values = command.check(parameters or {})
    for what, value in (("actor", actor), ("reason", reason)):
        if not value.strip():
            raise ValueError(f"{what} must have 1 character or more: {name} leaves an entry in the audit")
    if break_glass and not (name == "lease.release" and for_break_glass(values["name"])):
        raise PolicyDenied(
            f"break-glass is for lease.release of {RUNTIME!r} or of a gate's lease, '@gate:…', and for nothing else"
        )
    if dry_run:
        steps = command.steps(Window(command, client, actor, reason, None, break_glass), **values)
        return Outcome(name, next(steps), dry_run=True)
    if command.bootstrap and any(applied is None for _, applied in client.migrations.status()):
        return _bootstrap(client, command, values, actor, reason)
    return _governed(client, command, values, actor, reason, break_glass)


def for_break_glass(lease: str) -> bool:
    return lease == RUNTIME or lease.startswith("@gate:")


def _governed(
    client: Client, command: Command, values: dict[str, Any], actor: str, reason: str, break_glass: bool
) -> Outcome:
    action = f"{BREAK_GLASS} {command.name}" if break_glass else command.name
    detail: dict[str, Any] = {"parameters": values, "destructive": command.destructive}
    entry = client.audit.begin(action, _subject(command, values), actor=actor, reason=reason, detail=detail)
    with _told(client, entry), ExitStack() as stack:
        grants = []
        if not break_glass:
            grants.append(stack.enter_context(client.lease(RUNTIME, timeout=_PATIENCE)))
        gate = BREAK_GLASS if break_glass else command.gate
        grants.append(stack.enter_context(client.gate(gate, actor=actor, reason=reason)))
        window = Window(command, client, actor, reason, entry, break_glass)
        steps = command.steps(window, **values)
        changes = next(steps)
        client.audit.note(entry, fence=grants[0].fence, detail={**detail, "changes": changes[:1000]})
        client.gates.require(gate)
        for grant in grants:
            grant.check()
        _finish(window, steps)
        for grant in grants:  # done, but perhaps not alone: it is told
            grant.check()
    return Outcome(command.name, changes, dry_run=False, fence=grants[0].fence, entry=entry)


def _bootstrap(client: Client, command: Command, values: dict[str, Any], actor: str, reason: str) -> Outcome:
    """Tables that are missing cannot hold a lease nor an audit: they are made first, behind the migrations' own lock,
    and told as soon as there is where to tell it."""
    window = Window(command, client, actor, reason, None, break_glass=False)
    steps = command.steps(window, **values)
    changes = next(steps)
    _finish(window, steps)
    detail = {"parameters": values, "bootstrap": True, "changes": changes}
    entry = client.audit.begin(command.name, _subject(command, values), actor=actor, reason=reason, detail=detail)
    with _told(client, entry), client.lease(RUNTIME, timeout=_PATIENCE) as grant:
        client.audit.note(entry, fence=grant.fence)
    return Outcome(command.name, changes, dry_run=False, fence=grant.fence, entry=entry)


def _finish(window: Window, steps: Iterator[list[str]]) -> None:
    open_windows.add(window)
    try:
        next(steps, None)
    finally:
        open_windows.discard(window)


@contextmanager
def _told(client: Client, entry: int) -> Iterator[None]:
    """Whatever comes of it, the entry says so; unless the database is gone, and then its end is open."""
    try:
        yield
    except BaseException as error:
        kind = "refused" if isinstance(error, HoldfastError) else f"failed: {type(error).__name__}"
        with suppress(holdfast.EngineError):
            client.audit.end(entry, f"{kind}: {error}")
        raise
    client.audit.end(entry, "done")


def _subject(command: Command, values: Mapping[str, Any]) -> str:
    return command.subject.format(**values)[:200]
