"""The commands over the gateway's records: sandboxes and sessions.

They only write records. The leading replica acts on them: it ends the sandboxes that are marked as Deleting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast import Conflict, MatchVersion
from holdfast.commands.registry import CommandRefused, Parameter, Steps, Window, command

ACTIVE = "ACTIVE"
_PAGE = 1000


def to_be_deleted(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A sandbox's payload with the phase Deleting. It has no conditions, so that it differs from the driver's and the
    reconciler looks at it."""
    status = {name: value for name, value in payload.get("status", {}).items() if name != "conditions"}
    return {**payload, "status": {**status, "phase": "Deleting"}}


def ended(payload: Mapping[str, Any], state: str, reason: str) -> dict[str, Any]:
    """A session's payload with a terminal state, and when and why it ended."""
    return {**payload, "state": state, "reason": reason, "ended_at": datetime.now(UTC).isoformat()}


@command("session.cancel", gate="sessions", subject="session {id}", destructive=True, id=Parameter("id of the session"))
def session_cancel(window: Window, *, id: str) -> Steps:
    """End an active session and free its slot."""
    record = window.client.objects.get("@session", id)
    if record is None:
        raise CommandRefused(f"there is no session {id!r}")
    session = record.payload
    if session["state"] != ACTIVE:
        raise CommandRefused(f"session {id!r} is already {session['state']}")
    yield [f"session {id!r} is cancelled, and slot {session['slot']} of pool {session['pool']!r} is freed"]
    try:
        window.client.objects.put_if(
            "@session", id, ended(session, "CANCELLED", window.reason), MatchVersion(record.version),
            labels={**record.labels, "state": "CANCELLED"},
        )  # fmt: skip
    except Conflict:
        raise CommandRefused(f"session {id!r} was changed by another request: check its state and try again") from None
    slot = f"@slot:{session['pool']}:{session['slot']}"
    window.client.leases.force_release(slot, actor=window.actor, reason=window.reason, fence=session["fence"])


@command(
    "sandbox.prune", gate="sandboxes", subject="sandboxes that ended {older} s ago", destructive=True,
    older=Parameter(
        "minimum number of seconds since they ended", float, default=3600.0, optional=True, minimum=0,
        maximum=100 * 365 * 86400,
    ),
)  # fmt: skip
def sandbox_prune(window: Window, *, older: float) -> Steps:
    """Delete ended sandboxes, with their logs and exit codes."""
    before = datetime.now(UTC) - timedelta(seconds=older)
    records = [record for record in _sandboxes(window) if _has_ended(record, before)]
    yield [f"ended sandbox {record.id!r} is deleted" for record in records]
    for record in records:
        try:
            window.client.objects.put_if(
                "@sandbox", record.id, to_be_deleted(record.payload), MatchVersion(record.version)
            )
        except Conflict:  # it was changed since the plan, and may be running again
            continue


def _sandboxes(window: Window) -> Iterator[Any]:
    after: str | None = None
    while page := window.client.objects.list("@sandbox", after=after, limit=_PAGE):
        yield from page
        after = page[-1].id


def _has_ended(record: Any, before: datetime) -> bool:
    status = record.payload.get("status", {})
    finished = status.get("details", {}).get("finished_at")
    return status.get("phase") in ("Completed", "Error") and finished is not None and finished < before.timestamp()
