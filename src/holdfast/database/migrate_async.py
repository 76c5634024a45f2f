"""Numbered migrations, one transaction each, safe to run at once from many processes and again after a kill.

Each script records itself, so it is applied whole or not at all. On PostgreSQL the scripts queue behind an advisory
lock; whoever comes second fails on what is already there, looks again, and is content.

Once there is an audit, every change of the tables is told in it, whichever way it comes: as the governed command, as
``client.migrate()``, or because a file was opened by a newer holdfast.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from holdfast.database.engine_async import DENIED, LOCKED, AsyncEngine, AsyncSession
from holdfast.database.privileges import grants, migrate_command
from holdfast.database.sessions import Row
from holdfast.database.statements import FOUNDATION, Migration, migrations, statements
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused
from holdfast.runtime.clock import now

_ABSENT = frozenset({"3F000", "42P01"})
TIMEOUT = 60.0


class AsyncMigrations:
    """The tables of one database: what there is, what is missing. From version ``foundation`` on they hold what changes
    of them are governed with."""

    foundation = FOUNDATION

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self._database = engine, engine.database

    def scripts(self) -> tuple[Migration, ...]:
        """Every migration this version knows, as SQL for this database; asks the database nothing."""
        return migrations(self._database.dialect, self._database.schema)

    def text(self, *, down: bool = False) -> str:
        """All of it for somebody else to run: each migration in a transaction of its own, behind the same lock."""
        begin = "begin;\n" if self._database.dialect == "postgres" else "begin immediate;\n"
        parts = []
        for each in reversed(self.scripts()) if down else self.scripts():
            script = _locked(self._database, each.down if down else each.up)
            parts.append(f"-- {each.version:04} {each.name}\n{begin}{script.rstrip()}\ncommit;\n")
        return "\n".join(parts)

    async def status(self) -> list[tuple[Migration, float | None]]:
        """Every migration this version knows, with when it was applied (seconds since 1970) or None."""
        async with self._session() as session:
            when = {row["version"]: row["applied_at"] for row in await applied(session, TIMEOUT)}
            self._refuse_newer(max(when, default=0))
        return [(migration, when.get(migration.version)) for migration in self.scripts()]

    async def version(self) -> int:
        """The version of the tables; 0 when there are none. For a role that may only use them, too."""
        if self._engine.looks and not self._engine.there():
            return 0
        async with self._session() as session:
            try:
                version = await _version(session, TIMEOUT)
            except Refused as error:
                if error.sqlstate != DENIED or self._engine.looks:
                    raise
                version = await self._said_version(session)
            self._refuse_newer(version)
        return version

    async def up(self, *, to: int | None = None, entry: int | None = None) -> list[Migration]:
        """Apply what is missing, up to version ``to``; returns what was applied. A role that may only use the schema
        has nothing to do where nothing is missing. ``entry``: of the audit, where this is told already."""
        wanted = self._engine.newest if to is None else self._check(to)
        async with self._session() as session:
            try:
                self._refuse_newer(version := await _version(session, TIMEOUT))
                if version >= wanted:
                    return []
                async with told(self._engine, session, "schema.migrate", version, wanted, entry):
                    return await up(self._database, session, TIMEOUT, to=wanted)
            except Refused as error:
                if error.sqlstate != DENIED or await self._said_version(session) < wanted:
                    raise
                return []

    async def down(self, *, to: int, entry: int | None = None) -> list[Migration]:
        """Take back every migration above version ``to``, and all that is in those tables with it; the audit itself,
        below ``foundation``. ``entry``: of the audit, where this is told already."""
        self._check(to)
        async with self._session() as session:
            self._refuse_newer(version := await _version(session, TIMEOUT))
            if version <= to:
                return []
            async with told(self._engine, session, "schema.revert", version, to, entry):
                return await down(self._database, session, TIMEOUT, to=to)

    @asynccontextmanager
    async def governed(self) -> AsyncIterator[None]:
        """Inside, this client makes do with tables that are not the newest, from ``foundation`` on: for whoever governs
        what makes them so. Leases, gates and the audit work, the rest may not."""
        self._engine.lenient = True
        try:
            yield
        finally:
            self._engine.lenient = False

    def _check(self, to: int) -> int:
        if not 0 <= to <= self._engine.newest:
            raise ValueError(f"to must be a version from 0 to {self._engine.newest}, not {to}")
        return to

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[AsyncSession]:
        try:
            async with self._engine.separately() as session:
                yield session
        except Refused as error:
            if error.sqlstate != DENIED:
                raise
            schema = self._database.schema
            raise Refused(
                f"{error}. Schema {schema!r} is its owner's to migrate: let a role that may run "
                f"'{migrate_command(schema)}', and for those that use it: {grants(schema)}",
                DENIED,
            ) from error

    def _refuse_newer(self, version: int) -> None:
        if version > self._engine.newest:
            raise self._engine.mismatch(version)

    async def _said_version(self, session: AsyncSession) -> int:
        """As every client asks, without a right to the table; 0 when there is no answer."""
        try:
            [row] = await session.call("hello", {}, TIMEOUT)
        except Refused:
            return 0
        self._refuse_newer(row["version"])
        version: int = row["version"]
        return version


async def applied(session: AsyncSession, timeout: float) -> list[Row]:
    try:
        return await session.call("schema_applied", {}, timeout)
    except Refused as error:
        if error.sqlstate in _ABSENT:
            return []
        raise


@asynccontextmanager
async def told(
    engine: AsyncEngine, session: AsyncSession, action: str, version: int, to: int, entry: int | None = None
) -> AsyncIterator[None]:
    """For the record, unless it is there already; as far as there is a record before, and after."""
    if entry is not None or version < FOUNDATION:
        yield
        return
    parameters = {
        "action": action,
        "subject": "schema",
        "actor": engine.process["label"],
        "reason": f"this holdfast was asked to bring version {version} to version {to}",
    }
    [row] = await session.call("audit_begin", parameters, TIMEOUT)
    outcome = "done"
    try:
        yield
    except BaseException as error:
        outcome = f"failed: {error}"[:200] if isinstance(error, Refused) else "unknown: it was interrupted"
        raise
    finally:
        if to >= FOUNDATION or outcome != "done":
            with suppress(EngineError):
                await session.call("audit_end", {"entry": row["entry"], "outcome": outcome}, TIMEOUT)


async def up(database: Database, session: AsyncSession, timeout: float, *, to: int | None = None) -> list[Migration]:
    """Apply what is missing, up to version ``to``; returns what was applied."""
    done = []
    for migration in migrations(database.dialect, database.schema):
        if to is not None and migration.version > to:
            break
        if migration.version <= await _version(session, timeout):
            continue
        if await _apply(database, session, migration.up, range(migration.version, 10**9), timeout):
            done.append(migration)
    return done


async def down(database: Database, session: AsyncSession, timeout: float, *, to: int) -> list[Migration]:
    """Take back everything above version ``to``; returns what was taken back."""
    done = []
    for migration in reversed(migrations(database.dialect, database.schema)):
        if not to < migration.version <= await _version(session, timeout):
            continue
        if await _apply(database, session, migration.down, range(migration.version), timeout):
            done.append(migration)
    return done


async def _version(session: AsyncSession, timeout: float) -> int:
    return max((row["version"] for row in await applied(session, timeout)), default=0)


async def _apply(database: Database, session: AsyncSession, script: str, content_with: range, timeout: float) -> bool:
    """False when somebody else was faster: the version is one we are content with. Whoever migrates may take longer
    than a session waits for a lock, and is waited for. A transaction on our tables is not: heartbeats would wait."""
    deadline = now() + timeout
    while True:
        try:
            await session.script(_locked(database, script), timeout)
            return True
        except Refused as error:
            locked = error.sqlstate == LOCKED
            busy = locked and (await session.call("migrate_busy", {}, timeout))[0]["busy"]
            if await _version(session, timeout) in content_with:
                return False
            if not locked:
                raise
            if not busy or now() > deadline:
                who = "Another migration is under way" if busy else "A transaction on its tables is open"
                raise Refused(f"{error}. {who}", LOCKED) from error


def _locked(database: Database, script: str) -> str:
    lock = statements(database.dialect, database.schema).get("migrate_lock")
    return (f"{lock.steps[0].sql};\n" if lock else "") + script
