# Generated from open_engine_async.py by scripts/unasync.py. Do not edit.
"""An engine runs named statements on one database, reconnecting where that is safe. It knows SQL by name only."""

from __future__ import annotations

from holdfast.database.engine import Engine
from holdfast.database.url import Database


def open_engine(database: Database, *, looks: bool = False) -> Engine:
    if database.dialect == "sqlite":
        from holdfast.database.sqlite_engine import SqliteEngine

        return SqliteEngine(database, looks=looks)
    from holdfast.database.postgres_engine import PostgresEngine

    return PostgresEngine(database, looks=looks)
