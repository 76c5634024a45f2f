"""The engine for SQLite, a file on one machine. It migrates itself on open; waiters poll often, which is cheap."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from holdfast.database.call_dispatcher_async import AsyncCallSession
from holdfast.database.engine_async import CALL_TIMEOUT, NOTHING, Answers, AsyncEngine
from holdfast.database.privileges import migrate_command
from holdfast.database.sessions import Calls, Row, Statement
from holdfast.database.sqlite import boot_id
from holdfast.database.sqlite_async import AsyncSqliteSession
from holdfast.errors import EngineError, Refused, SchemaMismatch


class AsyncSqliteEngine(AsyncEngine):
    poll = 0.01

    async def _connect(self, timeout: float) -> AsyncCallSession:
        if self.read_only and not self.database_exists():
            self.check_version(None)
        return await AsyncSqliteSession.open(self.database, timeout, for_examination=self.read_only)

    async def _connect_for_examination(self, timeout: float) -> AsyncCallSession:
        return await AsyncSqliteSession.open(self.database, timeout, for_examination=True)

    async def call_when_free(
        self,
        name: str,
        parameters: Mapping[str, Any],
        *,
        patience: float,
        timeout: float = CALL_TIMEOUT,
        again: Mapping[str, Any] | None = NOTHING,
    ) -> list[Row]:
        """On SQLite any open transaction blocks all writers, and it may be the caller's own: do not wait for long."""
        return await self.call(name, parameters, timeout=min(timeout, max(1.0, patience)), again=again)

    async def rehearse(self, calls: Calls, *, timeout: float = CALL_TIMEOUT) -> Answers:
        self.check_usable()
        if self.read_only:
            raise Refused(
                "a dry run writes before it rolls back, and this client is read-only: use a client that may write"
            )
        session = await AsyncSqliteSession.open(self.database, timeout)
        try:
            return await session.rehearse(calls, timeout)
        finally:
            session.close()

    async def _check_tables(self, session: AsyncCallSession, timeout: float) -> None:
        version = await self._version(session, timeout)
        if (version or 0) < self.newest and not self.accepts(version) and not self.closing:
            from holdfast.database import migrate_async as migrate

            async with migrate.recorded(self, session, "schema.migrate", version or 0, self.newest):
                await migrate.up(self.database, session, timeout)
            version = await self._version(session, timeout)
        self.check_version(version)

    async def _version(self, session: AsyncCallSession, timeout: float) -> int | None:
        try:
            [row] = await session.call("hello", {"boot": boot_id() or ""}, timeout)
        except Refused as error:
            if error.sqlstate != "42P01":
                raise
            return None
        version: int | None = row["version"]
        return version

    def give_up(self, *, dies: bool) -> list[Statement]:
        for session in self._dispatcher.sessions if dies else []:
            give_way = getattr(session, "give_way", None)  # sync: in asyncio another thread writes
            if give_way is not None:
                give_way()
        return super().give_up(dies=dies)

    def database_exists(self) -> bool:
        return os.path.exists(self.database.target)

    def translate(self, error: Refused) -> EngineError | SchemaMismatch:
        if error.sqlstate == "42P01":
            return SchemaMismatch(
                f"the tables in {self.database} are not complete: run "
                f"'{migrate_command(self.database.schema)}' ({error})"
            )
        return error
