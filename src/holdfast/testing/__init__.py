"""What tests of services that use holdfast need: real PostgreSQL servers, ways to break them, a
history of what happened and a judge of it, and fixtures for pytest (`plugin`).

The names are imported when they are first used, because pytest imports this package in every run, wanted or not.
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

_HOMES = {
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"holdfast.testing.{_HOMES[name]}"), name)
