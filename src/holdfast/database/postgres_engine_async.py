"""The engine for PostgreSQL."""

from __future__ import annotations

from holdfast.database.call_dispatcher_async import AsyncCallSession
from holdfast.database.engine_async import CALL_TIMEOUT, DENIED, Answers, AsyncEngine
from holdfast.database.postgres_async import AsyncPostgresSession
from holdfast.database.privileges import migrate_command, remedy
from holdfast.database.sessions import Calls
from holdfast.errors import EngineError, Refused, SchemaMismatch

_MISSING = frozenset({"3F000", "42883", "42P01"})
SQL_VERSION = 1
"""Of the SQL functions that this version of holdfast calls: see docs/reference/sql.md."""


class AsyncPostgresEngine(AsyncEngine):
    async def _connect(self, timeout: float) -> AsyncCallSession:
        return await AsyncPostgresSession.open(self.database, timeout)

    async def rehearse(self, calls: Calls, *, timeout: float = CALL_TIMEOUT) -> Answers:
        answers: Answers = []
        async with self.own_session(timeout) as session:
            await session.script("begin", timeout)
            try:
                for name, parameters in calls:
                    answers.append(await session.call(name, parameters, timeout))
            except Refused as error:
                answers.append(error)
            await session.script("rollback", timeout)
        return answers

    async def _connect_for_examination(self, timeout: float) -> AsyncCallSession:
        return await AsyncPostgresSession.open(self.database, timeout, for_examination=True)

    async def _check_tables(self, session: AsyncCallSession, timeout: float) -> None:
        try:
            [row] = await session.call("hello", {}, timeout)
        except Refused as error:
            if error.sqlstate in _MISSING:
                self.check_version(None)
            raise
        self.check_version(row["version"])
        if row["sql_version"] != SQL_VERSION:
            raise SchemaMismatch(
                f"schema {self.database.schema!r} in {self.database} has version {row['sql_version']} of the SQL "
                f"functions, this holdfast calls version {SQL_VERSION}: upgrade holdfast"
            )

    def translate(self, error: Refused) -> EngineError | SchemaMismatch:
        schema = self.database.schema
        if error.sqlstate in _MISSING:
            return SchemaMismatch(
                f"schema {schema!r} in {self.database} is not complete: run '{migrate_command(schema)}' ({error})"
            )
        if error.sqlstate == DENIED:
            return Refused(f"{error}. {remedy(schema, str(error), _context(error))}", DENIED)
        return error


def _context(error: Refused) -> str:
    """The functions in which the server was, from the inside out."""
    return str(getattr(getattr(error.__cause__, "diag", None), "context", None) or "")
