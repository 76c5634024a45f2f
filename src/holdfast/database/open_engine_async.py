"""An engine runs named statements on one database, reconnecting where that is safe. It knows SQL by name only."""

from __future__ import annotations

from holdfast.database.engine_async import AsyncEngine
from holdfast.database.url import Database


def open_engine(database: Database, *, looks: bool = False) -> AsyncEngine:
    if database.dialect == "sqlite":
        from holdfast.database.sqlite_engine_async import AsyncSqliteEngine

        return AsyncSqliteEngine(database, looks=looks)
    from holdfast.database.postgres_engine_async import AsyncPostgresEngine

    return AsyncPostgresEngine(database, looks=looks)
