"""holdfast gates: the gates that are open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import holdfast
from holdfast.cli.app import listing_options, open_client, watch_options

if TYPE_CHECKING:
    from holdfast import Client

Gates = list[dict[str, Any]]
PREFIX = "@gate:"
"""Of the lease behind a gate."""
WINDOW = "gate.window"
"""The action under which the audit log has the window of a block of code or of a command."""
WINDOWS = 1000
"""The latest windows among which the reason of an open one is looked up."""


@click.command()
@watch_options
@listing_options
@click.pass_context
def gates(context: click.Context, /, **options: Any) -> None:
    """List the gates that are open: by whom, why, and until when.

    A gate that an operator opened for a time closes when that time is over, or with `holdfast do gate.close`. A gate
    that a command or a program holds open closes when its work ends.

    \b
    Examples:
      holdfast gates
      holdfast gates --watch
      holdfast gates --json | jq -r '.[] | select(.timed) | .name'
    """
    from holdfast.cli.output import Column
    from holdfast.cli.watch_mode import View, show

    columns = (
        Column("gate", 10), Column("actor", 10), Column("closes in"), Column("reason", 16), Column("since (UTC)"),
        Column("fence"),
    )  # fmt: skip
    with open_client(context) as client:
        show(View(lambda: _fetch(client), columns, _rows, _identity, _count), **options)


def _fetch(client: Client) -> Gates:
    leases = client.gates.list()
    reasons = {} if all("for" in lease.info for lease in leases) else _window_reasons(client)
    return [
        {
            "name": lease.name.removeprefix(PREFIX),
            "actor": lease.holder,
            "reason": lease.info.get("reason") if "for" in lease.info else reasons.get(lease.fence),
            "timed": "for" in lease.info,
            "since": lease.acquired_at,
            "expires_at": lease.expires_at,
            "remaining": round(lease.remaining, 3),
            "fence": lease.fence,
        }
        for lease in leases
    ]


def _window_reasons(client: Client) -> dict[int | None, str]:
    """By fence: why a window was opened. Empty for a role that may not read the audit log."""
    try:
        return {entry.fence: entry.reason for entry in client.audit.list(action=WINDOW, limit=WINDOWS)}
    except holdfast.Refused:
        return {}


def _rows(gates: Gates) -> list[tuple[object, ...]]:
    from holdfast.cli.output import format_duration, format_time

    return [
        (gate["name"], gate["actor"], format_duration(gate["remaining"]) if gate["timed"] else "when done",
         gate["reason"], format_time(gate["since"]), gate["fence"])
        for gate in gates
    ]  # fmt: skip


def _identity(gates: Gates) -> object:
    """With the reason: that of a window is found only once the audit log has its fence, a moment after it is open."""
    return [(gate["name"], gate["fence"], gate["reason"]) for gate in gates]


def _count(gates: Gates) -> str:
    return "no gate is open" if not gates else f"{len(gates)} gate{'s' if len(gates) > 1 else ''} open"
