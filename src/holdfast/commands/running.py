"""How a command runs: actor and reason, audit entry, runtime lease, gate window; and the exceptions to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast import PolicyDenied
from holdfast.commands.account import Account, Stage
from holdfast.commands.registry import Command, Parameter, commands, windows

if TYPE_CHECKING:
    from holdfast import Client

log = logging.getLogger("holdfast.commands")

RUNTIME = "holdfast:runtime"
"""The lease that every command runs inside: one operator at a time."""
BREAK_GLASS = "break-glass"
"""The gate of what ends a lease that commands themselves need, without having it."""
MIGRATE, REVERT = "schema.migrate", "schema.revert"
"""Those about the tables that govern them all."""
_PATIENCE = 5.0
_ACTOR, _REASON = Parameter("who asks"), Parameter("why", most=1000)
_TOLD = 500
"""Changes that the audit has room for, however long their names are."""


class Window:
    """What a command has while it runs: the database, who asks and why, and the entry of the audit. Until it may do
    something, ``client`` is one that only looks."""

    def __init__(
        self, command: Command, client: Client, looking: Client, actor: str, reason: str, *, break_glass: bool
    ) -> None:
        self.command, self.actor, self.reason, self.break_glass = command, actor, reason, break_glass
        self._client, self._looking = client, looking
        self.entry: int | None = None

    @property
    def client(self) -> Client:
        return self._client if windows.get(self) else self._looking


@dataclass(frozen=True, slots=True)
class Outcome:
    """``changes`` are what was, or on a dry run would be, changed. ``doubt``: what went wrong after it was done."""

    command: str
    changes: list[str]
    dry_run: bool
    fence: int | None = None
    entry: int | None = None
    doubt: str | None = None


def run(
    client: Client, name: str, parameters: Mapping[str, Any] | None = None, *, actor: str, reason: str,
    dry_run: bool = False, break_glass: bool = False,
) -> Outcome:  # fmt: skip
    """Run a governed command. ``dry_run`` only looks: no lease, no audit, and the database refuses all else.
    ``break_glass`` has one purpose: to release the runtime lease, or a gate's, when whoever has it does not let go."""
    command = commands().get(name)
    if command is None:
        raise ValueError(f"there is no command {name!r}; there are: {', '.join(commands())}")
    for what, declared, value in (("actor", _ACTOR, actor), ("reason", _REASON, reason)):
        if not declared.check(what, value).strip():
            raise ValueError(f"{what} must not be empty: {name} leaves an entry in the audit")
    values = command.check(parameters or {})
    if break_glass and not (name == "lease.release" and for_break_glass(values["name"])):
        raise PolicyDenied(
            f"break-glass is for lease.release of {RUNTIME!r} or of a gate's lease, '@gate:…', and for nothing else"
        )
    if dry_run:
        with _window(command, client, actor, reason, break_glass) as window:
            return Outcome(name, next(command.steps(window, **values)), dry_run=True)
    if name == MIGRATE:
        return _migrate(client, command, values, actor, reason)
    outcome = governed(client, command, values, actor, reason, break_glass=break_glass)
    if name == REVERT:
        _abolish(client, values["to"], actor, reason)
    return outcome


def for_break_glass(lease: str) -> bool:
    return lease == RUNTIME or lease.startswith("@gate:")


def governed(
    client: Client, command: Command, values: dict[str, Any], actor: str, reason: str, *, break_glass: bool = False
) -> Outcome:
    """The one way in which anything is done."""
    action = f"{BREAK_GLASS} {command.name}" if break_glass else command.name
    detail: dict[str, Any] = {"parameters": command.told(values), "destructive": command.destructive}
    entry = client.audit.begin(action, _subject(command, values), actor=actor, reason=reason, detail=detail)
    with Account(client, entry, atomic=command.atomic) as account, ExitStack() as stack:
        grants = []
        if not break_glass:
            grants.append(stack.enter_context(client.gates.runtime(timeout=_PATIENCE)))
        gate = BREAK_GLASS if break_glass else command.gate
        grants.append(stack.enter_context(client.gate(gate, actor=actor, reason=reason)))
        client.audit.note(entry, fence=grants[0].fence)
        window = stack.enter_context(_window(command, client, actor, reason, break_glass))
        window.entry = entry
        steps = command.steps(window, **values)
        changes = next(steps)
        more = [f"and {len(changes) - _TOLD} more"] if len(changes) > _TOLD else []
        client.audit.note(entry, detail={**detail, "changes": [*changes[:_TOLD], *more]})
        client.gates.require(gate)
        for grant in grants:
            grant.check()
        account.stage = Stage.DOING
        _finish(window, steps)
        account.stage = Stage.DONE
        for grant in grants:  # done, but perhaps not alone
            grant.check()
    return Outcome(command.name, changes, dry_run=False, fence=grants[0].fence, entry=entry, doubt=account.doubt)


def _migrate(client: Client, command: Command, values: dict[str, Any], actor: str, reason: str) -> Outcome:
    """Tables that are missing cannot hold a lease nor an audit. The first ones, up to those, are made behind the
    migrations' own lock, and told as soon as there is where to tell it; all later ones are governed by them."""
    foundation = client.migrations.foundation
    made: list[str] = []
    with client.migrations.governed():
        if client.migrations.version() < foundation:
            made = [
                f"migration {each.version:04} {each.name} is applied" for each in client.migrations.up(to=foundation)
            ]
        first = _told(client, command, made, actor, reason) if made else None
        if first is not None and client.migrations.version() >= client.migrations.scripts()[-1].version:
            return first
        later = governed(client, command, values, actor, reason)
    return replace(later, changes=[*made, *later.changes])


def _told(client: Client, command: Command, made: list[str], actor: str, reason: str) -> Outcome:
    detail = {"parameters": {}, "bootstrap": True, "changes": made}
    entry = client.audit.begin(command.name, _subject(command, {}), actor=actor, reason=reason, detail=detail)
    fence = None
    with Account(client, entry, atomic=True) as account:
        account.stage = Stage.DONE
        with client.gates.runtime(timeout=_PATIENCE) as grant:
            client.audit.note(entry, fence=(fence := grant.fence))
    return Outcome(command.name, made, dry_run=False, fence=fence, entry=entry, doubt=account.doubt)


def _abolish(client: Client, to: int, actor: str, reason: str) -> None:
    """The other end of it: what was governed down to those tables has the audit to tell it in, and they have not."""
    for each in client.migrations.down(to=to) if to < client.migrations.foundation else ():
        log.warning(
            "migration %04d %s is taken back, for %s: %s",
            each.version,
            each.name,
            actor,
            reason,
            extra={"event": "migration.reverted", "version": each.version, "actor": actor, "reason": reason},
        )


@contextmanager
def _window(command: Command, client: Client, actor: str, reason: str, break_glass: bool) -> Iterator[Window]:
    """In it the command may look; that it may do something is said elsewhere."""
    with client.looking() as looking:
        window = Window(command, client, looking, actor, reason, break_glass=break_glass)
        windows[window] = False
        try:
            yield window
        finally:
            del windows[window]


def _finish(window: Window, steps: Iterator[list[str]]) -> None:
    windows[window] = True
    try:
        next(steps, None)
    finally:
        windows[window] = False


def _subject(command: Command, values: Mapping[str, Any]) -> str:
    return command.subject.format(**values)[:200]
