"""What a reconciler works with: the protocols of drivers and codecs, the values that a driver returns about its
backends, and the rules that say what a record becomes.

Protocols, rules and the clients of the process driver are defined elsewhere, and imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from holdfast.lazy_names import lazy_names

if TYPE_CHECKING:
    from holdfast.driver.client import ProcessDriver
    from holdfast.driver.client_async import AsyncProcessDriver
    from holdfast.recipes.protocols import Driver
    from holdfast.recipes.protocols_async import AsyncDriver
    from holdfast.recipes.reconciler import Reconciler
    from holdfast.recipes.reconciler_async import AsyncReconciler
    from holdfast.recipes.reconciler_rules import Codec, ReconcilerRules

__all__ = [
    "AsyncDriver",
    "AsyncProcessDriver",
    "AsyncReconciler",
    "Backend",
    "BackendCondition",
    "Codec",
    "Driver",
    "DriverEvent",
    "Phase",
    "ProcessDriver",
    "Reconciler",
    "ReconcilerRules",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AsyncDriver": "holdfast.recipes.protocols_async",
            "AsyncProcessDriver": "holdfast.driver.client_async",
            "AsyncReconciler": "holdfast.recipes.reconciler_async",
            "Codec": "holdfast.recipes.reconciler_rules",
            "Driver": "holdfast.recipes.protocols",
            "ProcessDriver": "holdfast.driver.client",
            "Reconciler": "holdfast.recipes.reconciler",
            "ReconcilerRules": "holdfast.recipes.reconciler_rules",
        },
    )

READY, COMPLETED = "Ready", "Completed"


class Phase(StrEnum):
    """The state of a record's backend, as the record shows it: see ``ReconcilerRules.phase``."""

    PROVISIONING = "Provisioning"
    READY = "Ready"
    COMPLETED = "Completed"
    ERROR = "Error"
    DELETING = "Deleting"
    DELETED = "Deleted"


@dataclass(frozen=True, slots=True)
class BackendCondition:
    """A named condition of a backend. The phase follows from "Ready" and "Completed"; other conditions are only
    stored."""

    type: str
    status: bool | None
    """None: not known, or not known yet."""
    reason: str = ""
    """One word for programs: "Started", "Exited"."""
    message: str = ""
    terminal: bool = False
    """It will not recover by itself."""

    def _stored(self) -> dict[str, Any]:
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
        """The condition "Ready"; None when the driver has not given it."""
        return next((each for each in self.conditions if each.type == READY), None)

    @property
    def completed(self) -> bool:
        """Whether the condition "Completed" is true: the backend has ended because its work is done."""
        return any(each.type == COMPLETED and each.status is True for each in self.conditions)

    def _stored(self) -> dict[str, Any]:
        """The form in which a record stores it."""
        status: dict[str, Any] = {"conditions": [each._stored() for each in self.conditions]}
        return status | {"details": dict(self.details)} if self.details else status


@dataclass(frozen=True, slots=True)
class DriverEvent:
    """A hint that a backend has changed: its present state is then fetched from the driver. A "platform" event is
    passed to ``on_event`` and changes no record."""

    kind: Literal["status", "deleted", "platform"]
    id: str
    reason: str = ""
    message: str = ""
