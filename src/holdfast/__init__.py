"""Leases, locks and run-once operations for Python services, on the database they already have.

The names below are imported on first use. Further public names are in ``holdfast.governance``, ``holdfast.lineage``,
``holdfast.geo`` and ``holdfast.reconciler``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy_names import lazy_names

if TYPE_CHECKING:
    from holdfast import geo, governance, lineage, reconciler
    from holdfast.client import Client
    from holdfast.client_async import AsyncClient
    from holdfast.dashboard.app import dashboard
    from holdfast.errors import (
        AcquireTimeout,
        AlreadyExists,
        Busy,
        Conflict,
        CursorExpired,
        DriverError,
        EngineError,
        FencedOut,
        GrantLost,
        HoldfastError,
        KeyReused,
        LeaseLost,
        LockLost,
        LockReentered,
        NotAcquired,
        OperationFailed,
        OperationInProgress,
        OwnershipUnknown,
        PolicyDenied,
        Refused,
        SchemaMismatch,
        SessionUnsafe,
        SinkDown,
        Unanswered,
        Unreachable,
    )
    from holdfast.inherited_lease import inherited
    from holdfast.keys import OperationKey, time_bucket
    from holdfast.lease.grant import LeaseGrant
    from holdfast.lease.grant_async import AsyncLeaseGrant
    from holdfast.lease.handle import Lease
    from holdfast.lease.handle_async import AsyncLease
    from holdfast.lease.records import LeaseRecord
    from holdfast.lock.file_lock import FileGrant, FileLock, file_lock
    from holdfast.lock.handle import Lock, LockGrant
    from holdfast.lock.handle_async import AsyncLock, AsyncLockGrant
    from holdfast.lock.records import LockRecord
    from holdfast.lock.rows import row_lock
    from holdfast.objects.model import MatchVersion, MustCreate, ObjectRecord, Unconditional
    from holdfast.objects.watch import ObjectWatch
    from holdfast.objects.watch_async import AsyncObjectWatch
    from holdfast.operations.checksums import checksum_file
    from holdfast.operations.op import Op
    from holdfast.operations.op_async import AsyncOp
    from holdfast.operations.operation import Operation
    from holdfast.operations.operation_async import AsyncOperation
    from holdfast.operations.outcome import OperationRecord, Outcome
    from holdfast.operations.terms import Checks, OperationOptions, Retry
    from holdfast.recipes.elector import Elector, Term
    from holdfast.recipes.elector_async import AsyncElector, AsyncTerm
    from holdfast.recipes.guard import Guard
    from holdfast.recipes.guard_async import AsyncGuard
    from holdfast.recipes.shards import Shards
    from holdfast.recipes.shards_async import AsyncShards
    from holdfast.recipes.slots import Slot, Slots
    from holdfast.recipes.slots_async import AsyncSlot, AsyncSlots
    from holdfast.schedules.schedule import Schedule, ScheduleSlot
    from holdfast.schedules.schedule_async import AsyncSchedule, AsyncScheduleSlot

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "holdfast.client_async",
    "AsyncElector": "holdfast.recipes.elector_async",
    "AsyncGuard": "holdfast.recipes.guard_async",
    "AsyncLease": "holdfast.lease.handle_async",
    "AsyncLeaseGrant": "holdfast.lease.grant_async",
    "AsyncLock": "holdfast.lock.handle_async",
    "AsyncLockGrant": "holdfast.lock.handle_async",
    "AsyncObjectWatch": "holdfast.objects.watch_async",
    "AsyncOp": "holdfast.operations.op_async",
    "AsyncOperation": "holdfast.operations.operation_async",
    "AsyncSchedule": "holdfast.schedules.schedule_async",
    "AsyncScheduleSlot": "holdfast.schedules.schedule_async",
    "AsyncShards": "holdfast.recipes.shards_async",
    "AsyncSlot": "holdfast.recipes.slots_async",
    "AsyncSlots": "holdfast.recipes.slots_async",
    "AsyncTerm": "holdfast.recipes.elector_async",
    "Checks": "holdfast.operations.terms",
    "Client": "holdfast.client",
    "Elector": "holdfast.recipes.elector",
    "FileGrant": "holdfast.lock.file_lock",
    "FileLock": "holdfast.lock.file_lock",
    "Guard": "holdfast.recipes.guard",
    "Lease": "holdfast.lease.handle",
    "LeaseGrant": "holdfast.lease.grant",
    "LeaseRecord": "holdfast.lease.records",
    "Lock": "holdfast.lock.handle",
    "LockGrant": "holdfast.lock.handle",
    "LockRecord": "holdfast.lock.records",
    "MatchVersion": "holdfast.objects.model",
    "MustCreate": "holdfast.objects.model",
    "ObjectRecord": "holdfast.objects.model",
    "ObjectWatch": "holdfast.objects.watch",
    "Op": "holdfast.operations.op",
    "Operation": "holdfast.operations.operation",
    "OperationKey": "holdfast.keys",
    "OperationOptions": "holdfast.operations.terms",
    "OperationRecord": "holdfast.operations.outcome",
    "Outcome": "holdfast.operations.outcome",
    "Retry": "holdfast.operations.terms",
    "Schedule": "holdfast.schedules.schedule",
    "ScheduleSlot": "holdfast.schedules.schedule",
    "Shards": "holdfast.recipes.shards",
    "Slot": "holdfast.recipes.slots",
    "Slots": "holdfast.recipes.slots",
    "Term": "holdfast.recipes.elector",
    "Unconditional": "holdfast.objects.model",
    "checksum_file": "holdfast.operations.checksums",
    "file_lock": "holdfast.lock.file_lock",
    "inherited": "holdfast.inherited_lease",
    "row_lock": "holdfast.lock.rows",
    "time_bucket": "holdfast.keys",
}
__all__ = [
    "AcquireTimeout",
    "AlreadyExists",
    "AsyncClient",
    "AsyncElector",
    "AsyncGuard",
    "AsyncLease",
    "AsyncLeaseGrant",
    "AsyncLock",
    "AsyncLockGrant",
    "AsyncObjectWatch",
    "AsyncOp",
    "AsyncOperation",
    "AsyncSchedule",
    "AsyncScheduleSlot",
    "AsyncShards",
    "AsyncSlot",
    "AsyncSlots",
    "AsyncTerm",
    "Busy",
    "Checks",
    "Client",
    "Conflict",
    "CursorExpired",
    "DriverError",
    "Elector",
    "EngineError",
    "FencedOut",
    "FileGrant",
    "FileLock",
    "GrantLost",
    "Guard",
    "HoldfastError",
    "KeyReused",
    "Lease",
    "LeaseGrant",
    "LeaseLost",
    "LeaseRecord",
    "Lock",
    "LockGrant",
    "LockLost",
    "LockRecord",
    "LockReentered",
    "MatchVersion",
    "MustCreate",
    "NotAcquired",
    "ObjectRecord",
    "ObjectWatch",
    "Op",
    "Operation",
    "OperationFailed",
    "OperationInProgress",
    "OperationKey",
    "OperationOptions",
    "OperationRecord",
    "Outcome",
    "OwnershipUnknown",
    "PolicyDenied",
    "Refused",
    "Retry",
    "Schedule",
    "ScheduleSlot",
    "SchemaMismatch",
    "SessionUnsafe",
    "Shards",
    "SinkDown",
    "Slot",
    "Slots",
    "Term",
    "Unanswered",
    "Unconditional",
    "Unreachable",
    "checksum_file",
    "dashboard",
    "file_lock",
    "geo",
    "governance",
    "inherited",
    "lineage",
    "reconciler",
    "row_lock",
    "time_bucket",
]

if not TYPE_CHECKING:  # a module-level __getattr__ would make every misspelt name valid to a type checker
    _SUBMODULES = ("dashboard", "geo", "governance", "lineage", "reconciler")
    __getattr__, __dir__ = lazy_names(
        __name__,
        {name: _HOMES.get(name, "holdfast.errors") for name in __all__ if name not in _SUBMODULES},
        _SUBMODULES,
    )
