"""Run a command: check actor and reason, begin the audit entry, take the runtime lease, open the gate, plan, apply.

    audit.begin ─▶ runtime lease ─▶ gate ─▶ plan (read-only) ─▶ audit.note ─▶ check grants ─▶ apply ─▶ audit.end

Every change goes through ``execute``, except the migrations up to ``client.migrations.foundation``: they create and
remove the tables of leases and of the audit, and run without them. A dry run ends with the plan. Break-glass runs
without the runtime lease, because it releases that lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast import PolicyDenied
from holdfast.commands.audit_entry import AuditEntry, Stage
from holdfast.commands.registry import Command, Parameter, Window, allow_writes, commands, open_window
from holdfast.telemetry import WARNING, logger

if TYPE_CHECKING:
    from holdfast import Client

log = logger("holdfast.commands")

RUNTIME = "holdfast:runtime"
"""The lease that every command runs under: one operator at a time."""
BREAK_GLASS = "break-glass"
"""The gate that is open while break-glass releases the runtime lease or a gate's lease."""
MIGRATE, REVERT = "schema.migrate", "schema.revert"
_RUNTIME_TIMEOUT = 5.0
"""Seconds to wait for the runtime lease."""
_ACTOR, _REASON = Parameter("name of the operator"), Parameter("reason", maximum=1000)
_AUDITED_CHANGES = 500
"""The number of changes that an audit entry lists; it fits however long their lines are."""
_SUBJECT_LENGTH = 200


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """``changes`` are the changes made or, on a dry run, planned. ``doubt`` is an error that came after them."""

    command: str
    changes: list[str]
    dry_run: bool
    fence: int | None = None
    entry: int | None = None
    doubt: str | None = None


def run(
    client: Client, name: str, parameters: Mapping[str, Any] | None = None, *, actor: str, reason: str,
    dry_run: bool = False, break_glass: bool = False,
) -> CommandOutcome:  # fmt: skip
    """Run a governed command.

    ``dry_run`` only plans: it takes no lease, leaves no audit entry, and the database refuses it every write.
    ``break_glass`` releases the runtime lease, or a gate's lease, of a holder that hangs; it does nothing else.

    Raises ValueError for a wrong name, parameter, actor or reason, CommandRefused or PolicyDenied when the command must
    not run, NotAcquired when another command is running, CommandUnsettled when its end was not seen.
    """
    command = commands().get(name)
    if command is None:
        raise ValueError(f"there is no command {name!r}; the commands are: {', '.join(commands())}")
    for argument, parameter, value in (("actor", _ACTOR, actor), ("reason", _REASON, reason)):
        if not parameter.check(argument, value).strip():
            raise ValueError(f"{argument} must not be empty: {name} writes it to the audit log")
    values = command.check(parameters or {})
    if break_glass and not (name == "lease.release" and is_for_break_glass(values["name"])):
        raise PolicyDenied(f"break-glass is only for lease.release of {RUNTIME!r} or of a gate's lease, '@gate:…'")
    if dry_run:
        with open_window(command, client, actor, reason, break_glass=break_glass) as window:
            return CommandOutcome(name, next(command.steps(window, **values)), dry_run=True)
    if name == MIGRATE:
        return _migrate(client, command, values, actor, reason)
    outcome = execute(client, command, values, actor, reason, break_glass=break_glass)
    if name == REVERT:
        _revert_foundation(client, values["to"], actor, reason)
    return outcome


def is_for_break_glass(lease: str) -> bool:
    """Whether commands themselves run under this lease."""
    return lease == RUNTIME or lease.startswith("@gate:")


def execute(
    client: Client, command: Command, values: dict[str, Any], actor: str, reason: str, *, break_glass: bool = False
) -> CommandOutcome:
    """Plan and make the change, under the runtime lease and the command's gate, with an audit entry."""
    action = f"{BREAK_GLASS} {command.name}" if break_glass else command.name
    detail: dict[str, Any] = {"parameters": command.mask_secrets(values), "destructive": command.destructive}
    number = client.audit.begin(action, _subject(command, values), actor=actor, reason=reason, detail=detail)
    with AuditEntry(client, number, atomic=command.atomic) as entry, ExitStack() as stack:
        grants = []
        if not break_glass:
            grants.append(stack.enter_context(client.gates.runtime(timeout=_RUNTIME_TIMEOUT)))
        gate = BREAK_GLASS if break_glass else command.gate
        grants.append(stack.enter_context(client.gate(gate, actor=actor, reason=reason)))
        client.audit.note(number, fence=grants[0].fence)
        window = stack.enter_context(open_window(command, client, actor, reason, break_glass=break_glass))
        window.entry = number
        steps = command.steps(window, **values)
        changes = next(steps)
        more = [f"and {len(changes) - _AUDITED_CHANGES} more"] if len(changes) > _AUDITED_CHANGES else []
        client.audit.note(number, detail={**detail, "changes": [*changes[:_AUDITED_CHANGES], *more]})
        client.gates.require(gate)
        for grant in grants:
            grant.check()
        entry.stage = Stage.APPLYING
        _apply(window, steps)
        entry.stage = Stage.DONE
        for grant in grants:  # a grant lost meanwhile: the change is made, but perhaps not by us alone
            grant.check()
    return CommandOutcome(command.name, changes, dry_run=False, fence=grants[0].fence, entry=number, doubt=entry.doubt)


def _apply(window: Window, steps: Iterator[list[str]]) -> None:
    with allow_writes(window):
        next(steps, None)


def _migrate(client: Client, command: Command, values: dict[str, Any], actor: str, reason: str) -> CommandOutcome:
    """Apply the missing migrations of the foundation, and record them in the audit that they create. ``migrations.up``
    locks the schema, so two processes cannot both apply them. Then execute the command, which applies the rest."""
    foundation = client.migrations.foundation
    applied: list[str] = []
    with client.migrations.governed():
        if client.migrations.version() < foundation:
            scripts = client.migrations.up(to=foundation)
            applied = [f"migration {script.version:04} {script.name} is applied" for script in scripts]
        bootstrap = _record_bootstrap(client, command, applied, actor, reason) if applied else None
        if bootstrap is not None and client.migrations.version() >= client.migrations.scripts()[-1].version:
            return bootstrap
        outcome = execute(client, command, values, actor, reason)
    return replace(outcome, changes=[*applied, *outcome.changes])


def _record_bootstrap(client: Client, command: Command, applied: list[str], actor: str, reason: str) -> CommandOutcome:
    detail = {"parameters": {}, "bootstrap": True, "changes": applied}
    number = client.audit.begin(command.name, _subject(command, {}), actor=actor, reason=reason, detail=detail)
    fence = None
    with AuditEntry(client, number, atomic=True) as entry:
        entry.stage = Stage.DONE
        with client.gates.runtime(timeout=_RUNTIME_TIMEOUT) as grant:
            fence = grant.fence
            client.audit.note(number, fence=fence)
    return CommandOutcome(command.name, applied, dry_run=False, fence=fence, entry=number, doubt=entry.doubt)


def _revert_foundation(client: Client, to: int, actor: str, reason: str) -> None:
    """Revert the migrations of the foundation down to ``to``; ``execute`` has reverted the later ones. The audit is
    dropped with them, so each one is logged instead."""
    if to >= client.migrations.foundation:
        return
    for script in client.migrations.down(to=to):
        log.event(
            "migration.reverted", WARNING,
            "migration %(version)04d %(script)s was reverted by %(actor)s: %(reason)s",
            version=script.version, script=script.name, actor=actor, reason=reason,
        )  # fmt: skip


def _subject(command: Command, values: Mapping[str, Any]) -> str:
    return command.subject.format(**values)[:_SUBJECT_LENGTH]
