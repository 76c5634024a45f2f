"""An engine runs named statements on one database, reconnecting where that is safe. It knows SQL by name only."""

from __future__ import annotations

from holdfast._async.engines.engine import AsyncEngine
from holdfast._wire.database import Database


def open_engine(database: Database, *, looks: bool = False) -> AsyncEngine:
    if database.dialect == "sqlite":
        from holdfast._async.engines.sqlite import AsyncSqliteEngine

        return AsyncSqliteEngine(database, looks=looks)
    from holdfast._async.engines.postgres import AsyncPostgresEngine

    return AsyncPostgresEngine(database, looks=looks)
