"""Leases, locks and run-once operations for Python services, on the database they already have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast._async.client import AsyncClient
    from holdfast._sync.client import Client
    from holdfast.core.errors import (
        AcquireTimeout,
        EngineError,
        FencedOut,
        HoldfastError,
        LeaseLost,
        LockReentered,
        NotAcquired,
        OwnershipUnknown,
        PolicyDenied,
        SchemaMismatch,
        SessionUnsafe,
    )
    from holdfast.files import file_lock
    from holdfast.inheritance import inherited
    from holdfast.rows import row_lock

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "holdfast._async.client",
    "Client": "holdfast._sync.client",
    "file_lock": "holdfast.files",
    "inherited": "holdfast.inheritance",
    "row_lock": "holdfast.rows",
}
__all__ = [
    "AcquireTimeout",
    "AsyncClient",
    "Client",
    "EngineError",
    "FencedOut",
    "HoldfastError",
    "LeaseLost",
    "LockReentered",
    "NotAcquired",
    "OwnershipUnknown",
    "PolicyDenied",
    "SchemaMismatch",
    "SessionUnsafe",
    "file_lock",
    "inherited",
    "row_lock",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "holdfast.core.errors")), name)
