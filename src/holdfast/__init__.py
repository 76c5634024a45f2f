"""Leases, locks and run-once operations for Python services, on the database they already have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.client_async import AsyncClient
    from holdfast.driver.client import ProcessDriver
    from holdfast.driver.client_async import AsyncProcessDriver
    from holdfast.errors import (
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
    from holdfast.geo import is_masked, mask_h3
    from holdfast.governance.dataset import Dataset
    from holdfast.governance.policy import Allow, Deny, Policy, PolicyContext, Review
    from holdfast.inherited_lease import inherited
    from holdfast.keys import OperationKey, time_bucket
    from holdfast.lease.records import LeaseRecord
    from holdfast.lock.file_lock import file_lock
    from holdfast.lock.records import LockRecord
    from holdfast.lock.rows import row_lock
    from holdfast.objects.model import MatchVersion, MustCreate, ObjectRecord, Unconditional
    from holdfast.operations.checksums import checksum_file
    from holdfast.operations.energy import Energy, Estimate
    from holdfast.operations.events import Event
    from holdfast.operations.lineage_terms import Contract
    from holdfast.operations.outcome import OperationRecord
    from holdfast.recipes.protocols import Driver
    from holdfast.recipes.protocols_async import AsyncDriver
    from holdfast.reconciler import Backend, BackendCondition, DriverEvent, Phase

__version__ = "0.1.0"

_HOME = {
    "Allow": "holdfast.governance.policy",
    "AsyncClient": "holdfast.client_async",
    "AsyncDriver": "holdfast.recipes.protocols_async",
    "AsyncProcessDriver": "holdfast.driver.client_async",
    "Backend": "holdfast.reconciler",
    "BackendCondition": "holdfast.reconciler",
    "Client": "holdfast.client",
    "Contract": "holdfast.operations.lineage_terms",
    "Dataset": "holdfast.governance.dataset",
    "Deny": "holdfast.governance.policy",
    "Driver": "holdfast.recipes.protocols",
    "DriverEvent": "holdfast.reconciler",
    "Energy": "holdfast.operations.energy",
    "Estimate": "holdfast.operations.energy",
    "Event": "holdfast.operations.events",
    "LeaseRecord": "holdfast.lease.records",
    "LockRecord": "holdfast.lock.records",
    "ObjectRecord": "holdfast.objects.model",
    "OperationKey": "holdfast.keys",
    "OperationRecord": "holdfast.operations.outcome",
    "Phase": "holdfast.reconciler",
    "Policy": "holdfast.governance.policy",
    "PolicyContext": "holdfast.governance.policy",
    "ProcessDriver": "holdfast.driver.client",
    "Review": "holdfast.governance.policy",
    "checksum_file": "holdfast.operations.checksums",
    "file_lock": "holdfast.lock.file_lock",
    "MatchVersion": "holdfast.objects.model",
    "MustCreate": "holdfast.objects.model",
    "Unconditional": "holdfast.objects.model",
    "inherited": "holdfast.inherited_lease",
    "is_masked": "holdfast.geo",
    "mask_h3": "holdfast.geo",
    "row_lock": "holdfast.lock.rows",
    "time_bucket": "holdfast.keys",
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
    "LeaseRecord",
    "LockRecord",
    "LockReentered",
    "MatchVersion",
    "MustCreate",
    "NotAcquired",
    "ObjectRecord",
    "OperationFailed",
    "OperationInProgress",
    "OperationKey",
    "OperationRecord",
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
    value = globals()[name] = getattr(__import__(_HOME.get(name, "holdfast.errors"), fromlist=[name]), name)
    return value
