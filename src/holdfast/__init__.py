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
    from holdfast.core.dataset import Dataset
    from holdfast.core.energy import Energy, Estimate
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
    from holdfast.core.geo import is_masked, mask_h3
    from holdfast.core.keys import OperationKey, time_bucket
    from holdfast.core.lineage import Contract
    from holdfast.core.objects import MatchVersion, MustCreate, Unconditional
    from holdfast.core.policy import Allow, Deny, PolicyContext, Review
    from holdfast.files import file_lock
    from holdfast.inheritance import inherited
    from holdfast.policies import Policy
    from holdfast.rows import row_lock

__version__ = "0.1.0"

_HOME = {
    "Allow": "holdfast.core.policy",
    "AsyncClient": "holdfast._async.client",
    "AsyncDriver": "holdfast._async.recipes.driver",
    "AsyncProcessDriver": "holdfast._async.process_driver",
    "Backend": "holdfast.core.conditions",
    "BackendCondition": "holdfast.core.conditions",
    "Client": "holdfast._sync.client",
    "Contract": "holdfast.core.lineage",
    "Dataset": "holdfast.core.dataset",
    "Deny": "holdfast.core.policy",
    "Driver": "holdfast._sync.recipes.driver",
    "DriverEvent": "holdfast.core.conditions",
    "Energy": "holdfast.core.energy",
    "Estimate": "holdfast.core.energy",
    "Event": "holdfast.core.events",
    "OperationKey": "holdfast.core.keys",
    "Phase": "holdfast.core.conditions",
    "Policy": "holdfast.policies",
    "PolicyContext": "holdfast.core.policy",
    "ProcessDriver": "holdfast._sync.process_driver",
    "Review": "holdfast.core.policy",
    "checksum_file": "holdfast.checksums",
    "file_lock": "holdfast.files",
    "MatchVersion": "holdfast.core.objects",
    "MustCreate": "holdfast.core.objects",
    "Unconditional": "holdfast.core.objects",
    "inherited": "holdfast.inheritance",
    "is_masked": "holdfast.core.geo",
    "mask_h3": "holdfast.core.geo",
    "row_lock": "holdfast.rows",
    "time_bucket": "holdfast.core.keys",
}
__all__ = [
    "AcquireTimeout",
    "Allow",
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
    "Dataset",
    "Deny",
    "Driver",
    "DriverError",
    "DriverEvent",
    "Energy",
    "EngineError",
    "Estimate",
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
    "Policy",
    "PolicyContext",
    "PolicyDenied",
    "ProcessDriver",
    "Review",
    "SchemaMismatch",
    "SessionUnsafe",
    "SinkDown",
    "Unconditional",
    "checksum_file",
    "file_lock",
    "inherited",
    "is_masked",
    "mask_h3",
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
