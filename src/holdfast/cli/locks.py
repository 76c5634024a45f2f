"""holdfast locks: the locks that are held, the sessions that wait for them, and the end of a session that hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import completion
from holdfast.cli.app import Integer, actor_option, listing_options, open_client, reason_option, watch_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.cli.watch_mode import View

Locks = list[Any]


@click.group(invoke_without_command=True)
@watch_options
@listing_options
@click.pass_context
def locks(context: click.Context, /, **options: Any) -> None:
    """List advisory locks, with holders and waiters.

    Shows all advisory locks in the database, also those of other programs: each holder, then the sessions that wait for
    the same lock, with the pids of the sessions that block them. Locks of other programs have numbers instead of names.
    Open transactions that protect or have acquired a lease are listed as "transaction under" or "acquire of" it.
    PIDs are those of server sessions; on SQLite, of processes.

    \b
    Examples:
      holdfast locks
      holdfast locks --watch
      holdfast locks --json | jq '.[] | select(.granted | not) | {pid, name, blocked_by}'
      holdfast locks end 4242 --reason "host is gone"
    """
    if context.invoked_subcommand is not None:
        return
    from holdfast.cli.watch_mode import show

    with open_client(context) as client:
        show(view(client.locks.list), **options)


@locks.command()
@click.argument("pid", type=Integer(1, 2**31 - 1), shell_complete=completion.lock_sessions)
@reason_option
@actor_option
@click.pass_context
def end(context: click.Context, pid: int, reason: str, actor: str) -> None:
    """End the database session PID, which frees its locks.

    The session must hold or wait for an advisory lock. Its transaction is rolled back and its connection breaks. A
    holder that uses holdfast is notified at once that its locks are lost, and may still be running.

    This is the audited command `holdfast do lock.end`. Exit code 1 when the session was not ended; on SQLite always:
    end the process instead.

    \b
    Example:
      holdfast locks end 4242 --reason "host is gone"
    """
    from holdfast.cli import output
    from holdfast.cli.do import run_governed

    with open_client(context) as client:
        of_session = [lock for lock in client.locks.list() if lock.pid == pid]
        run_governed(client, "lock.end", {"pid": pid}, actor=actor, reason=reason)
    parts = []
    for word, granted in (("held", True), ("waited for", False)):
        if names := [output.clean(lock.label) for lock in of_session if lock.granted is granted]:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"{word} {', '.join(names[:5])}{more}")
    description = f", which {' and '.join(parts)}" if parts else ""
    click.echo(f"ended session {pid}{description}; recorded: {output.clean(actor)}: {output.clean(reason)}")


def view(fetch: Callable[[], Locks]) -> View:
    from holdfast.cli.output import Column
    from holdfast.cli.watch_mode import View

    columns = (
        Column("lock", 14), Column("pid"), Column("granted"), Column("for"), Column("holder", 8), Column("waiting"),
        Column("blocked by", 10), Column("mode"), Column("state", 6),
    )  # fmt: skip
    return View(fetch, columns, _rows, _identity, _count, _as_json)


def _as_json(records: Locks) -> list[dict[str, Any]]:
    rows = [lock.as_dict() for lock in records]
    for row in rows:
        row["duration"] = None if row["duration"] is None else round(row["duration"], 3)
    return rows


def _rows(records: Locks) -> list[tuple[object, ...]]:
    from holdfast.cli.output import duration, state

    return [
        (lock.label, lock.pid, state("yes" if lock.granted else "waits"), duration(lock.duration),
         lock.holder or lock.application_name or lock.role, lock.waiting or None,
         ", ".join(map(str, lock.blocked_by)), lock.mode, lock.state)
        for lock in records
    ]  # fmt: skip


def _identity(records: Locks) -> object:
    return [(lock.label, lock.pid, lock.granted, lock.waiting, lock.blocked_by) for lock in records]


def _count(records: Locks) -> str:
    if not records:
        return "no lock is held"
    held = sum(lock.granted for lock in records)
    waiting = sum({(lock.namespace, lock.entity_id, lock.name): lock.waiting for lock in records}.values())
    return f"{held} lock{'s' if held != 1 else ''} held" + (f", {waiting} waiting" if waiting else "")
