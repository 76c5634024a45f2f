# Generated from sqlite_engine_async.py by scripts/unasync.py. Do not edit.
"""SQLite: one file on one machine. It migrates itself on open, and waiters ask often, because asking is cheap."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from holdfast.database.engine import CALL_TIMEOUT, NOTHING, Answers, Calls, Engine, Session
from holdfast.database.privileges import migrate_command
from holdfast.database.sessions import Row
from holdfast.database.sqlite import SqliteSession
from holdfast.database.sqlite_file import boot_id
from holdfast.errors import EngineError, Refused, SchemaMismatch


class SqliteEngine(Engine):
    poll = 0.01

    def _connect(self, timeout: float) -> Session:
        if self.looks and not self.there():
            self.check_version(None)
        return SqliteSession.open(self.database, timeout, to_look=self.looks)

    def _connect_to_look(self, timeout: float) -> Session:
        return SqliteSession.open(self.database, timeout, to_look=True)

    def call_when_free(
        self,
        name: str,
        parameters: Mapping[str, Any],
        *,
        patience: float,
        timeout: float = CALL_TIMEOUT,
        again: Mapping[str, Any] | None = NOTHING,
    ) -> list[Row]:
        """Here an open transaction of anybody's holds up all that write, and it may be the caller's own."""
        return self.call(name, parameters, timeout=min(timeout, max(1.0, patience)), again=again)

    def rehearse(self, calls: Calls, *, timeout: float = CALL_TIMEOUT) -> Answers:
        self.check_usable()
        if self.looks:
            raise Refused("a rehearsal is not for looking: it writes, and takes it back")
        session = SqliteSession.open(self.database, timeout)
        try:
            return session.rehearse(calls, timeout)
        finally:
            session.close()

    def _hello(self, session: Session, timeout: float) -> None:
        version = self._version(session, timeout)
        if (version or 0) < self.newest and not self.suffices(version) and not self.closing:
            from holdfast.database import migrate as migrate

            with migrate.told(self, session, "schema.migrate", version or 0, self.newest):
                migrate.up(self.database, session, timeout)
            version = self._version(session, timeout)
        self.check_version(version)

    def _version(self, session: Session, timeout: float) -> int | None:
        try:
            [row] = session.call("hello", {"boot": boot_id() or ""}, timeout)
        except Refused as error:
            if error.sqlstate != "42P01":
                raise
            return None
        version: int | None = row["version"]
        return version

    def there(self) -> bool:
        return os.path.exists(self.database.target)

    def translate(self, error: Refused) -> EngineError | SchemaMismatch:
        if error.sqlstate == "42P01":
            return SchemaMismatch(
                f"the tables in {self.database} are not complete: run "
                f"'{migrate_command(self.database.schema)}' ({error})"
            )
        return error
