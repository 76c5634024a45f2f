"""Builds values from the parsed JSON of the process driver: its responses and the events of a watch.

Raises AttributeError, KeyError, TypeError or ValueError for anything else; the client turns these into DriverError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.reconciler import Backend, BackendCondition, DriverEvent


def backends(value: Any) -> Sequence[Backend]:
    return [backend(each) for each in value["sandboxes"]]


def backend(value: Any) -> Backend:
    """Members that a later version of the driver may add are ignored."""
    fields = BackendCondition.__slots__
    conditions = tuple(BackendCondition(**{name: each[name] for name in fields}) for each in value["conditions"])
    return Backend(value["id"], conditions, value["deleting"], value["details"])


def has_ended(value: Any) -> bool:
    """The response to a delete: None for 204, else the description of a sandbox that is ending."""
    if value is not None:
        backend(value)
    return value is None


def event(value: Any) -> tuple[str, DriverEvent | None]:
    """The cursor after the event, and the event; None for a bookmark."""
    if value["kind"] == "bookmark":
        return value["cursor"], None
    return value["cursor"], DriverEvent(value["kind"], value["id"], value.get("reason", ""), value.get("message", ""))
