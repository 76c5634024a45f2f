"""Leases, locks and run-once operations for Python services, on the database they already have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast._async.client import AsyncClient
    from holdfast._async.process_driver import AsyncProcessDriver
    from holdfast._async.recipes.driver import AsyncDriver
    from holdfast._sync.client import Client
    from holdfast._sync.process_driver import ProcessDriver
    from holdfast._sync.recipes.driver import Driver
    from holdfast.checksums import checksum_file
    from holdfast.core.conditions import Backend, BackendCondition, DriverEvent, Phase
    from holdfast.core.errors import (
        AcquireTimeout,
        AlreadyExists,
        Conflict,
        CursorExpired,
        DriverError,
        EngineError,
        FencedOut,
        HoldfastError,
        KeyReused,
        LeaseLost,
        LockReentered,
        NotAcquired,
        OperationFailed,
        OperationInProgress,
        OwnershipUnknown,
        PolicyDenied,
        SchemaMismatch,
        SessionUnsafe,
        SinkDown,
    )
    from holdfast.core.events import Event
    from holdfast.core.keys import OperationKey, time_bucket
    from holdfast.core.lineage import Contract
    from holdfast.core.objects import MatchVersion, MustCreate, Unconditional
    from holdfast.files import file_lock
    from holdfast.inheritance import inherited
    from holdfast.rows import row_lock

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "holdfast._async.client",
    "AsyncDriver": "holdfast._async.recipes.driver",
    "AsyncProcessDriver": "holdfast._async.process_driver",
    "Backend": "holdfast.core.conditions",
    "BackendCondition": "holdfast.core.conditions",
    "Client": "holdfast._sync.client",
    "Contract": "holdfast.core.lineage",
    "Driver": "holdfast._sync.recipes.driver",
    "DriverEvent": "holdfast.core.conditions",
    "Event": "holdfast.core.events",
    "OperationKey": "holdfast.core.keys",
    "Phase": "holdfast.core.conditions",
    "ProcessDriver": "holdfast._sync.process_driver",
    "checksum_file": "holdfast.checksums",
    "file_lock": "holdfast.files",
    "MatchVersion": "holdfast.core.objects",
    "MustCreate": "holdfast.core.objects",
    "Unconditional": "holdfast.core.objects",
    "inherited": "holdfast.inheritance",
    "row_lock": "holdfast.rows",
    "time_bucket": "holdfast.core.keys",
}
__all__ = [
    "AcquireTimeout",
    "AlreadyExists",
    "AsyncClient",
    "AsyncDriver",
    "AsyncProcessDriver",
    "Backend",
    "BackendCondition",
    "Client",
    "Conflict",
    "Contract",
    "CursorExpired",
    "Driver",
    "DriverError",
    "DriverEvent",
    "EngineError",
    "Event",
    "FencedOut",
    "HoldfastError",
    "KeyReused",
    "LeaseLost",
    "LockReentered",
    "MatchVersion",
    "MustCreate",
    "NotAcquired",
    "OperationFailed",
    "OperationInProgress",
    "OperationKey",
    "OwnershipUnknown",
    "Phase",
    "PolicyDenied",
    "ProcessDriver",
    "SchemaMismatch",
    "SessionUnsafe",
    "SinkDown",
    "Unconditional",
    "checksum_file",
    "file_lock",
    "inherited",
    "row_lock",
    "time_bucket",
]


def __dir__() -> list[str]:
    """What there is to find, before any of it is imported."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(__import__(_HOME.get(name, "holdfast.core.errors"), fromlist=[name]), name)
    return found
