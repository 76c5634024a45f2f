"""How things are said on the page: spans of time, numbers, and what a record says of itself, whatever it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def span(seconds: float | None) -> str:
    """As the page's own script says it, too."""
    if seconds is None:
        return "?"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h} h"
    return f"{h} h {m:02} m" if h else f"{m} m {s:02} s"


def number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def moment(seconds: float) -> str:
    """For machines, and for whoever points at it."""
    return datetime.fromtimestamp(round(seconds), UTC).isoformat().replace("+00:00", "Z")


def within(payload: Any, *path: str) -> Any:
    """What is there, or None, whatever the payload is."""
    for each in path:
        payload = payload.get(each) if isinstance(payload, Mapping) else None
    return payload


def text(value: Any) -> str:
    """One line of it."""
    return "" if value is None else " ".join(str(value).split())[:200]


def in_order(name: str) -> list[str | int]:
    """To sort names by as people count: 9 before 10."""
    return [int(each) if each.isdecimal() else each for each in re.split(r"(\d+)", name)]


def phase(payload: Any) -> str:
    """Of a sandbox; one that nobody has looked at yet is being provisioned."""
    return text(within(payload, "status", "phase")) or "Provisioning"


def condition(payload: Any) -> str:
    """Why a sandbox is not ready."""
    conditions = within(payload, "status", "conditions")
    for each in conditions if isinstance(conditions, list) else ():
        if within(each, "type") == "Ready" and within(each, "status") is not True:
            return text(within(each, "message")) or text(within(each, "reason"))
    return ""


def state(payload: Any) -> str:
    """Of an agent or a session."""
    return text(within(payload, "state")) or "unknown"


def called(record: Any) -> str:
    """An agent has the number that the API knows it by, and its session; what else there is has a name or an id."""
    number = within(record.payload, "number")
    if not isinstance(number, int):
        return record.name or str(record.id)
    return f"agent {number} {(record.name or '').removeprefix('session:')}".rstrip()


def doing(payload: Any) -> str:
    """The tool that an agent uses, or why it has ended."""
    return text(within(payload, "ended_why")) or text(within(payload, "tool"))


_TONES = {
    "good": ("ready", "success", "idle", "running", "active", "working"),
    "bad": ("error", "partial", "failed"),
    "poor": ("failure", "waiting"),
    "moving": ("provisioning", "deleting", "expected"),
}


def tone(name: str) -> str:
    """How a state is shown, beside its word; those that nobody knows are plain."""
    return next((tone for tone, names in _TONES.items() if name.lower() in names), "plain")
