# Generated from _async/engines/__init__.py by scripts/unasync.py. Do not edit.
"""An engine runs named statements on one database, reconnecting where that is safe. It knows SQL by name only."""

from __future__ import annotations

from holdfast._sync.engines.engine import Engine
from holdfast._wire.database import Database


def open_engine(database: Database, *, looks: bool = False) -> Engine:
    if database.dialect == "sqlite":
        from holdfast._sync.engines.sqlite import SqliteEngine

        return SqliteEngine(database, looks=looks)
    from holdfast._sync.engines.postgres import PostgresEngine

    return PostgresEngine(database, looks=looks)
