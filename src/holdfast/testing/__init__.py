"""What tests of services that use holdfast need: real PostgreSQL servers, and fixtures for pytest (`plugin`).

The names are imported when they are first used, because pytest imports this package in every run, wanted or not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.binaries import available
    from holdfast.testing.postgres import Postgres

__all__ = ["Postgres", "available"]


def __getattr__(name: str) -> Any:
    if name == "available":
        from holdfast.testing.binaries import available

        return available
    if name == "Postgres":
        from holdfast.testing.postgres import Postgres

        return Postgres
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
