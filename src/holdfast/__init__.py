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
        NotAcquired,
        OwnershipUnknown,
        SchemaMismatch,
        SessionUnsafe,
    )
    from holdfast.inheritance import inherited

__version__ = "0.1.0"

_HOME = {
    "AsyncClient": "holdfast._async.client",
    "Client": "holdfast._sync.client",
    "inherited": "holdfast.inheritance",
}
__all__ = [
    "AcquireTimeout",
    "AsyncClient",
    "Client",
    "EngineError",
    "FencedOut",
    "HoldfastError",
    "LeaseLost",
    "NotAcquired",
    "OwnershipUnknown",
    "SchemaMismatch",
    "SessionUnsafe",
    "inherited",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "holdfast.core.errors")), name)
