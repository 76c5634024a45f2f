# Generated from migrate_async.py by scripts/unasync.py. Do not edit.
"""Numbered migrations, one transaction each. Many processes may run them at once, and again after a kill.

Each script records its version, so it is applied whole or not at all. On PostgreSQL the scripts queue for an advisory
lock; the second process fails on what exists already, reads the version again, and is done.

From version ``FOUNDATION`` on every change of the tables is recorded in the audit, however it was started: by the
governed command, by ``client.migrate()``, or because a newer holdfast opened the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.database.call_dispatcher import CallSession
from holdfast.database.engine import DENIED, LOCKED, Engine
from holdfast.database.privileges import migrate_remedy
from holdfast.database.sessions import Row
from holdfast.database.statements import FOUNDATION, Migration, migrations, statements
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused
from holdfast.runtime.clock import now

_ABSENT = frozenset({"3F000", "42P01"})
TIMEOUT = 60.0


class Migrations:
    """The migrations of one database: which are applied and which are missing. From version ``foundation`` on the
    tables contain what governs their own changes: leases, gates and the audit."""

    foundation = FOUNDATION

    def __init__(self, engine: Engine) -> None:
        self._engine, self._database = engine, engine.database

    def scripts(self) -> tuple[Migration, ...]:
        """Every migration of this holdfast, as SQL for this database. Does not call the database."""
        return migrations(self._database.dialect, self._database.schema)

    def text(self, *, down: bool = False) -> str:
        """All scripts as one text, to run with psql or sqlite3: each in a transaction, behind the same lock."""
        begin = "begin;\n" if self._database.dialect == "postgres" else "begin immediate;\n"
        parts = []
        for migration in reversed(self.scripts()) if down else self.scripts():
            script = _locked(self._database, migration.down if down else migration.up)
            parts.append(f"-- {migration.version:04} {migration.name}\n{begin}{script.rstrip()}\ncommit;\n")
        return "\n".join(parts)

    def status(self) -> list[tuple[Migration, float | None]]:
        """Every migration of this holdfast, with the time it was applied (seconds since 1970) or None."""
        with self._session() as session:
            when = {row["version"]: row["applied_at"] for row in applied(session, TIMEOUT)}
            self._refuse_newer(max(when, default=0))
        return [(migration, when.get(migration.version)) for migration in self.scripts()]

    def version(self) -> int:
        """The version of the tables; 0 when there are none. Works for a role that may only use them."""
        if self._engine.read_only and not self._engine.database_exists():
            return 0
        with self._session() as session:
            try:
                version = _version(session, TIMEOUT)
            except Refused as error:
                if error.sqlstate != DENIED or self._engine.read_only:
                    raise
                version = self._public_version(session)
            self._refuse_newer(version)
        return version

    def up(self, *, to: int | None = None, entry: int | None = None) -> list[Migration]:
        """Apply what is missing, up to version ``to``; returns what was applied. A role without the privilege succeeds
        if nothing is missing. ``entry``: the audit entry, if the caller has begun one."""
        wanted = self._engine.newest if to is None else self._check(to)
        with self._session() as session:
            try:
                self._refuse_newer(version := _version(session, TIMEOUT))
                if version >= wanted:
                    return []
                with recorded(self._engine, session, "schema.migrate", version, wanted, entry):
                    return up(self._database, session, TIMEOUT, to=wanted)
            except Refused as error:
                if error.sqlstate != DENIED or self._public_version(session) < wanted:
                    raise
                return []

    def down(self, *, to: int, entry: int | None = None) -> list[Migration]:
        """Revert every migration above version ``to``, which deletes what is in its tables; below ``foundation`` the
        audit, too. ``entry``: the audit entry, if the caller has begun one."""
        self._check(to)
        with self._session() as session:
            self._refuse_newer(version := _version(session, TIMEOUT))
            if version <= to:
                return []
            with recorded(self._engine, session, "schema.revert", version, to, entry):
                return down(self._database, session, TIMEOUT, to=to)

    @contextmanager
    def governed(self) -> Iterator[None]:
        """In this block the client accepts older tables, from ``foundation`` on: for the command that migrates them.
        Leases, gates and the audit work; other things may not."""
        self._engine.accepts_older_schema = True
        try:
            yield
        finally:
            self._engine.accepts_older_schema = False

    def _check(self, to: int) -> int:
        if not 0 <= to <= self._engine.newest:
            raise ValueError(f"to must be a version from 0 to {self._engine.newest}, not {to}")
        return to

    @contextmanager
    def _session(self) -> Iterator[CallSession]:
        try:
            with self._engine.own_session() as session:
                yield session
        except Refused as error:
            if error.sqlstate != DENIED:
                raise
            raise Refused(f"{error}. {migrate_remedy(self._database.schema, str(error))}", DENIED) from error

    def _refuse_newer(self, version: int) -> None:
        if version > self._engine.newest:
            raise self._engine.mismatch(version)

    def _public_version(self, session: CallSession) -> int:
        """The version as every client may ask for it, without access to the table; 0 if that is refused."""
        try:
            [row] = session.call("hello", {}, TIMEOUT)
        except Refused:
            return 0
        self._refuse_newer(row["version"])
        version: int = row["version"]
        return version


def applied(session: CallSession, timeout: float) -> list[Row]:
    try:
        return session.call("schema_applied", {}, timeout)
    except Refused as error:
        if error.sqlstate in _ABSENT:
            return []
        raise


@contextmanager
def recorded(
    engine: Engine, session: CallSession, action: str, version: int, to: int, entry: int | None = None
) -> Iterator[None]:
    """Record a change of the tables in the audit, unless ``entry`` does, and as far as the audit exists."""
    if entry is not None or version < FOUNDATION:
        yield
        return
    parameters = {
        "action": action,
        "subject": "schema",
        "actor": engine.process["label"],
        "reason": f"this holdfast was asked to bring version {version} to version {to}",
    }
    [row] = session.call("audit_begin", parameters, TIMEOUT)
    outcome = "done"
    try:
        yield
    except BaseException as error:
        outcome = f"failed: {error}"[:200] if isinstance(error, Refused) else "unknown: it was interrupted"
        raise
    finally:
        if to >= FOUNDATION or outcome != "done":
            with suppress(EngineError):
                session.call("audit_end", {"entry": row["entry"], "outcome": outcome}, TIMEOUT)


def up(database: Database, session: CallSession, timeout: float, *, to: int | None = None) -> list[Migration]:
    """Apply what is missing, up to version ``to``; returns what was applied."""
    done = []
    for migration in migrations(database.dialect, database.schema):
        if to is not None and migration.version > to:
            break
        if migration.version <= _version(session, timeout):
            continue
        if _apply(database, session, migration.up, range(migration.version, 10**9), timeout):
            done.append(migration)
    return done


def down(database: Database, session: CallSession, timeout: float, *, to: int) -> list[Migration]:
    """Revert everything above version ``to``; returns what was reverted."""
    done = []
    for migration in reversed(migrations(database.dialect, database.schema)):
        if not to < migration.version <= _version(session, timeout):
            continue
        if _apply(database, session, migration.down, range(migration.version), timeout):
            done.append(migration)
    return done


def _version(session: CallSession, timeout: float) -> int:
    return max((row["version"] for row in applied(session, timeout)), default=0)


def _apply(database: Database, session: CallSession, script: str, accepted: range, timeout: float) -> bool:
    """Run the script; False when another process was faster, so that the version is one of ``accepted``.

    Waits for another migration, which may take longer than lock_timeout, but not for a transaction on our tables:
    heartbeats would queue behind us meanwhile.
    """
    deadline = now() + timeout
    while True:
        try:
            session.script(_locked(database, script), timeout)
            return True
        except Refused as error:
            locked = error.sqlstate == LOCKED
            busy = locked and (session.call("migrate_busy", {}, timeout))[0]["busy"]
            if _version(session, timeout) in accepted:
                return False
            if not locked:
                raise
            if not busy or now() > deadline:
                who = "Another migration is running" if busy else "A transaction on its tables is open"
                raise Refused(f"{error}. {who}", LOCKED) from error


def _locked(database: Database, script: str) -> str:
    lock = statements(database.dialect, database.schema).get("migrate_lock")
    return (f"{lock.sql};\n" if lock else "") + script
