# Generated from _async/engines/migrate.py by scripts/unasync.py. Do not edit.
"""Numbered migrations, one transaction each, safe to run at once from many processes and again after a kill.

Each script records itself, so it is applied whole or not at all. On PostgreSQL the scripts queue behind an advisory
lock; whoever comes second fails on what is already there, looks again, and is content.
"""

from __future__ import annotations

from holdfast._sync.engines.engine import Session
from holdfast._wire import Row
from holdfast._wire.database import Database
from holdfast.core.errors import Refused
from holdfast.sql import Migration, migrations, statements

_ABSENT = frozenset({"3F000", "42P01"})


def applied(session: Session, timeout: float) -> list[Row]:
    try:
        return session.call("schema_applied", {}, timeout)
    except Refused as error:
        if error.sqlstate in _ABSENT:
            return []
        raise


def status(database: Database, session: Session, timeout: float) -> list[tuple[Migration, float | None]]:
    """Every migration we know, with when it was applied or None."""
    when = {row["version"]: row["applied_at"] for row in applied(session, timeout)}
    return [(migration, when.get(migration.version)) for migration in migrations(database.dialect, database.schema)]


def up(database: Database, session: Session, timeout: float) -> list[Migration]:
    """Apply what is missing; returns what was applied."""
    done = []
    for migration in migrations(database.dialect, database.schema):
        if migration.version <= _version(session, timeout):
            continue
        if _apply(database, session, migration.up, range(migration.version, 10**9), timeout):
            done.append(migration)
    return done


def down(database: Database, session: Session, timeout: float, *, to: int) -> list[Migration]:
    """Take back everything above version ``to``; returns what was taken back."""
    done = []
    for migration in reversed(migrations(database.dialect, database.schema)):
        if to < migration.version <= _version(session, timeout):
            if _apply(database, session, migration.down, range(migration.version), timeout):
                done.append(migration)
    return done


def _version(session: Session, timeout: float) -> int:
    return max((row["version"] for row in applied(session, timeout)), default=0)


def _apply(database: Database, session: Session, script: str, content_with: range, timeout: float) -> bool:
    """False when somebody else was faster: the version is one we are content with."""
    lock = statements(database.dialect, database.schema).get("migrate_lock")
    try:
        session.script((f"{lock.steps[0].sql};\n" if lock else "") + script, timeout)
    except Refused:
        if _version(session, timeout) not in content_with:
            raise
        return False
    return True
