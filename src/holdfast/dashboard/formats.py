"""Formats values for the page: spans of time, numbers, and the fields of records, whatever their payload is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_plus

_LONGEST_TTL = 86400


def format_span(seconds: float | None) -> str:
    """The same text as ``span`` in page.js."""
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


def format_number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def format_time(seconds: float) -> str:
    """ISO 8601, for ``<time datetime>`` and tooltips."""
    return datetime.fromtimestamp(round(seconds), UTC).isoformat().replace("+00:00", "Z")


def format_clock(seconds: float, shape: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A point in time for people, in UTC."""
    return datetime.fromtimestamp(round(seconds), UTC).strftime(shape)


def truncate(name: str, length: int = 64) -> str:
    """A long name without its middle: its ends tell names apart."""
    if len(name) <= length:
        return name
    tail = length // 3
    return f"{name[: length - tail - 1]}…{name[-tail:]}"


def ends_with_process(info: Mapping[str, Any]) -> bool:
    """Whether a lease with this ``info`` has no time left to show: it has the longest TTL, and ends with its process,
    as that of a leader on SQLite does."""
    ttl = info.get("ttl")
    return info.get("failover") == "session" and isinstance(ttl, int | float) and ttl >= _LONGEST_TTL


def link(path: str, **query: str) -> str:
    """A link inside the dashboard, from its root."""
    # hot: a filter builds 10,000 of them; urlencode takes more than twice as long
    return f"{path}?{'&'.join(f'{name}={quote_plus(str(value))}' for name, value in query.items())}" if query else path


def get_path(payload: Any, *path: str) -> Any:
    """The value at ``path``, or None, whatever the payload is."""
    for name in path:
        payload = payload.get(name) if isinstance(payload, Mapping) else None
    return payload


def one_line(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split())[:200]


def error_text(error: Any) -> str:
    """The error of an operation, its type and its message; in an entry of the log it is a text."""
    if isinstance(error, str):
        return one_line(error)
    kind, message = one_line(get_path(error, "type")), one_line(get_path(error, "message"))
    return f"{kind}: {message}" if kind and message else kind or message


def natural_order(name: str) -> list[str | int]:
    """A sort key that puts sb-9 before sb-10."""
    return [int(each) if each.isdecimal() else each for each in re.split(r"(\d+)", name)]


def sandbox_phase(payload: Any) -> str:
    """A sandbox that has no status yet is being provisioned."""
    return one_line(get_path(payload, "status", "phase")) or "Provisioning"


def sandbox_reason(payload: Any) -> str:
    """Why a sandbox is not ready; empty when its conditions do not say."""
    conditions = get_path(payload, "status", "conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        if get_path(condition, "type") == "Ready" and get_path(condition, "status") is not True:
            return one_line(get_path(condition, "message")) or one_line(get_path(condition, "reason"))
    return ""


def record_state(payload: Any) -> str:
    """The state of an agent or a session."""
    return one_line(get_path(payload, "state")) or "unknown"


def record_name(record: Any) -> str:
    """The number and session of an agent; the name or id of any other record."""
    number = get_path(record.payload, "number")
    if not isinstance(number, int):
        return record.name or str(record.id)
    return f"agent {number} {(record.name or '').removeprefix('session:')}".rstrip()


def agent_activity(payload: Any) -> str:
    """Why an agent has ended, or the tool that it uses."""
    return one_line(get_path(payload, "ended_why")) or one_line(get_path(payload, "tool"))


_TONES = {
    "good": (
        "ready", "success", "idle", "running", "active", "working", "released", "done", "held", "approved", "leads",
        "complete", "completed",
    ),
    "bad": ("error", "partial", "failed", "expired", "session_lost", "forced", "overdue", "gone"),
    "poor": (
        "failure", "waiting", "waits", "paused", "skipped", "rejected", "refused", "undone", "interrupted", "timed_out",
    ),
    "moving": ("provisioning", "deleting", "expected", "open", "reentered"),
}  # fmt: skip


def tone(name: str) -> str:
    """The CSS class of a state; unknown states are plain."""
    return next((tone for tone, names in _TONES.items() if name.lower() in names), "plain")
