"""The values that a driver returns about the backends it runs, and the phase of a record that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

READY = "Ready"


class Phase(StrEnum):
    """The state of a record's backend, as the record shows it: see ``phase_of``."""

    PROVISIONING = "Provisioning"
    READY = "Ready"
    ERROR = "Error"
    DELETING = "Deleting"
    DELETED = "Deleted"


@dataclass(frozen=True, slots=True)
class BackendCondition:
    """A named condition of a backend. The phase follows from "Ready"; other conditions are only stored."""

    type: str
    status: bool | None
    """None: not known, or not known yet."""
    reason: str = ""
    """One word for programs: "Started", "Exited"."""
    message: str = ""
    terminal: bool = False
    """It will not recover by itself."""

    def stored(self) -> dict[str, Any]:
        """The form in which a record stores it."""
        # hot: once per record in bench sweep; dataclasses.asdict would copy deeply
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Backend:
    """What the driver runs for the record of the same ``id``."""

    id: str
    conditions: tuple[BackendCondition, ...] = ()
    deleting: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    """Any JSON values, for example a pid or an exit code. Stored beside the conditions."""

    @property
    def ready(self) -> BackendCondition | None:
        """The condition that the phase follows from; None when the driver has not given it."""
        return next((each for each in self.conditions if each.type == READY), None)

    def stored(self) -> dict[str, Any]:
        """The form in which a record stores it."""
        status: dict[str, Any] = {"conditions": [each.stored() for each in self.conditions]}
        return status | {"details": dict(self.details)} if self.details else status


@dataclass(frozen=True, slots=True)
class DriverEvent:
    """A hint that a backend has changed: its present state is then fetched from the driver. A "platform" event is
    passed to ``on_event`` and changes no record."""

    kind: Literal["status", "deleted", "platform"]
    id: str
    reason: str = ""
    message: str = ""


def phase_of(backend: Backend, *, before: Phase, session: bool) -> Phase:
    """The phase of a record whose backend exists. Deleting stays until the backend is gone; any other phase follows
    from the present conditions alone. ``session``: whether the record's session is present."""
    if backend.deleting or before is Phase.DELETING:
        return Phase.DELETING
    ready = backend.ready
    if ready is None or ready.status is None:
        return Phase.PROVISIONING
    if ready.status:
        return Phase.READY if session else Phase.PROVISIONING
    return Phase.ERROR if ready.terminal else Phase.PROVISIONING
