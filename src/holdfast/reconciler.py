"""What a driver says about the thing it runs for a record, as values, and the phase that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

READY = "Ready"


class Phase(StrEnum):
    """What a record says of the thing that is run for it, as ``phase_of`` judges it."""

    PROVISIONING = "Provisioning"
    READY = "Ready"
    ERROR = "Error"
    DELETING = "Deleting"
    DELETED = "Deleted"


@dataclass(frozen=True, slots=True)
class BackendCondition:
    """One thing that is so, is not so, or is not known. Phases follow from "Ready"; the others are only stored."""

    type: str
    status: bool | None
    """None: not known, or not yet."""
    reason: str = ""
    """One word for programs: "Started", "Exited"."""
    message: str = ""
    terminal: bool = False
    """It will not get better by itself."""

    def stored(self) -> dict[str, Any]:
        """As a record keeps it. Not ``asdict``, which copies deeply: a sweep does this for every record."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Backend:
    """What the driver runs for the record of the same ``id``."""

    id: str
    conditions: tuple[BackendCondition, ...] = ()
    deleting: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    """Anything that JSON has: a pid, an exit code. Stored beside the conditions."""

    @property
    def ready(self) -> BackendCondition | None:
        """The condition that its phase follows from; None when the driver says nothing of it."""
        return next((each for each in self.conditions if each.type == READY), None)

    def stored(self) -> dict[str, Any]:
        """As a record keeps it."""
        told: dict[str, Any] = {"conditions": [each.stored() for each in self.conditions]}
        return told | {"details": dict(self.details)} if self.details else told


@dataclass(frozen=True, slots=True)
class DriverEvent:
    """A hint that something has changed; what it is now is asked for. "platform": told, and changes nothing."""

    kind: Literal["status", "deleted", "platform"]
    id: str
    reason: str = ""
    message: str = ""


def phase_of(backend: Backend, *, before: Phase, session: bool) -> Phase:
    """The phase of a record whose backend is there. Whoever said that it is to be deleted stays right until it is;
    everything else is what the driver says now, whatever it said before."""
    if backend.deleting or before is Phase.DELETING:
        return Phase.DELETING
    ready = backend.ready
    if ready is None or ready.status is None:
        return Phase.PROVISIONING
    if ready.status:
        return Phase.READY if session else Phase.PROVISIONING
    return Phase.ERROR if ready.terminal else Phase.PROVISIONING
