"""The commands over the gateway's records: sandboxes and sessions.

They write records, and whoever leads the replicas does the rest: what is to be deleted is ended there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from holdfast import Conflict, MatchVersion
from holdfast.commands.registry import CommandRefused, Parameter, Steps, command

if TYPE_CHECKING:
    from holdfast.commands.running import Window

ACTIVE = "ACTIVE"
_PAGE = 1000


def to_be_deleted(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A sandbox's payload from the moment on when its end is certain. Without its conditions: so it differs from what
    the driver says, and is looked at."""
    status = {name: value for name, value in payload.get("status", {}).items() if name != "conditions"}
    return {**payload, "status": {**status, "phase": "Deleting"}}


def ended(payload: Mapping[str, Any], state: str, reason: str) -> dict[str, Any]:
    """A session's payload when it is over."""
    return {**payload, "state": state, "reason": reason, "ended_at": datetime.now(UTC).isoformat()}


@command("session.cancel", gate="sessions", subject="session {id}", destructive=True, id=Parameter("the session"))
def session_cancel(window: Window, *, id: str) -> Steps:
    """End a session that has not ended, and free its slot."""
    record = window.client.objects.get("session", id)
    if record is None:
        raise CommandRefused(f"there is no session {id!r}")
    told = record.payload
    if told["state"] != ACTIVE:
        raise CommandRefused(f"session {id!r} is {told['state']} already")
    yield [f"session {id!r} is CANCELLED, and slot {told['slot']} of pool {told['pool']!r} is free"]
    try:
        window.client.objects.put_if(
            "session", id, ended(told, "CANCELLED", window.reason), MatchVersion(record.version),
            labels={**record.labels, "state": "CANCELLED"},
        )  # fmt: skip
    except Conflict:
        raise CommandRefused(f"session {id!r} was changed meanwhile: look again") from None
    slot = f"@slot:{told['pool']}:{told['slot']}"
    window.client.leases.force_release(slot, actor=window.actor, reason=window.reason, fence=told["fence"])


@command(
    "sandbox.prune", gate="sandboxes", subject="sandboxes that ended {older} s ago", destructive=True,
    older=Parameter("seconds since they ended", float, default=3600.0, optional=True, least=0, most=100 * 365 * 86400),
)  # fmt: skip
def sandbox_prune(window: Window, *, older: float) -> Steps:
    """Delete the sandboxes whose programs have ended, with their logs and exit codes."""
    before = datetime.now(UTC) - timedelta(seconds=older)
    found = [each for each in _sandboxes(window) if _has_ended(each, before)]
    yield [f"sandbox {each.id!r}, which has ended, is deleted" for each in found]
    for each in found:
        try:
            window.client.objects.put_if("sandbox", each.id, to_be_deleted(each.payload), MatchVersion(each.version))
        except Conflict:  # somebody else is at it: then it is not what was told
            continue


def _sandboxes(window: Window) -> Iterator[Any]:
    after: str | None = None
    while page := window.client.objects.list("sandbox", after=after, most=_PAGE):
        yield from page
        after = page[-1].id


def _has_ended(record: Any, before: datetime) -> bool:
    status = record.payload.get("status", {})
    finished = status.get("details", {}).get("finished_at")
    return status.get("phase") == "Error" and finished is not None and finished < before.timestamp()
