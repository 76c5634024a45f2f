"""What a driver says of the things it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class BackendCondition:
    """``status`` None: not known yet. ``terminal``: it will not get better by itself."""

    type: str
    status: bool | None
    reason: str = ""
    message: str = ""
    terminal: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    """What the driver runs for one record, whose id it has. ``details`` are JSON."""

    id: str
    conditions: tuple[BackendCondition, ...] = ()
    deleting: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DriverEvent:
    """A hint that something happened: whoever wants to know how things stand asks."""

    kind: Literal["status", "deleted", "platform"]
    id: str
    reason: str = ""
    message: str = ""
