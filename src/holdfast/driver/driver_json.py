"""What the process driver says, as values: its answers and the events of a watch, from JSON that was read.

AttributeError, KeyError, TypeError or ValueError for what is none of them: whoever asked knows whom to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.reconciler import Backend, BackendCondition, DriverEvent


def backends(value: Any) -> Sequence[Backend]:
    return [backend(each) for each in value["sandboxes"]]


def backend(value: Any) -> Backend:
    """What a later driver says besides is left away."""
    known = BackendCondition.__slots__
    conditions = tuple(BackendCondition(**{name: each[name] for name in known}) for each in value["conditions"])
    return Backend(value["id"], conditions, value["deleting"], value["details"])


def gone(value: Any) -> bool:
    """By 204. Else it says how it is while it is being ended: what says neither is no answer to a delete."""
    if value is not None:
        backend(value)
    return value is None


def event(told: Any) -> tuple[str, DriverEvent | None]:
    """And the cursor after it; None for a bookmark."""
    if told["kind"] == "bookmark":
        return told["cursor"], None
    return told["cursor"], DriverEvent(told["kind"], told["id"], told.get("reason", ""), told.get("message", ""))
