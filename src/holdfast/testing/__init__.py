"""Tools for tests of services that use holdfast: real PostgreSQL servers and poolers, a fault proxy and other faults,
a history of what workers did and the checker that judges it, contract suites, and pytest fixtures (`plugin`).

Names are imported when they are first used, because pytest imports this package in every run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.binaries import available
    from holdfast.testing.checker import Report, check
    from holdfast.testing.faults import Fault, Nemesis
    from holdfast.testing.history import Event, Recorder
    from holdfast.testing.pooler import Pooler
    from holdfast.testing.postgres import Postgres
    from holdfast.testing.proxy import Proxy

__all__ = ["Event", "Fault", "Nemesis", "Pooler", "Postgres", "Proxy", "Recorder", "Report", "available", "check"]

_MODULES = {
    "Event": "history",
    "Fault": "faults",
    "Nemesis": "faults",
    "Pooler": "pooler",
    "Postgres": "postgres",
    "Proxy": "proxy",
    "Recorder": "history",
    "Report": "checker",
    "available": "binaries",
    "check": "checker",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"holdfast.testing.{_MODULES[name]}"), name)
