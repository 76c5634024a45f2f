# Generated from postgres_engine_async.py by scripts/unasync.py. Do not edit.
"""The engine for PostgreSQL."""

from __future__ import annotations

from holdfast.database.call_dispatcher import CallSession
from holdfast.database.engine import CALL_TIMEOUT, DENIED, Answers, Engine
from holdfast.database.postgres import PostgresSession
from holdfast.database.privileges import migrate_command, remedy
from holdfast.database.sessions import Calls
from holdfast.errors import EngineError, Refused, SchemaMismatch

_MISSING = frozenset({"3F000", "42883", "42P01"})
SQL_VERSION = 1
"""Of the SQL functions that this version of holdfast calls: see docs/reference/sql.md."""


class PostgresEngine(Engine):
    def _connect(self, timeout: float) -> CallSession:
        return PostgresSession.open(self.database, timeout)

    def rehearse(self, calls: Calls, *, timeout: float = CALL_TIMEOUT) -> Answers:
        answers: Answers = []
        with self.own_session(timeout) as session:
            session.script("begin", timeout)
            try:
                for name, parameters in calls:
                    answers.append(session.call(name, parameters, timeout))
            except Refused as error:
                answers.append(error)
            session.script("rollback", timeout)
        return answers

    def _connect_for_examination(self, timeout: float) -> CallSession:
        return PostgresSession.open(self.database, timeout, for_examination=True)

    def _check_tables(self, session: CallSession, timeout: float) -> None:
        try:
            [row] = session.call("hello", {}, timeout)
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
