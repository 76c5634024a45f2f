"""SQLite: one file on one machine. It migrates itself on open, and waiters ask often, because asking is cheap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast._async.engines.engine import CALL_TIMEOUT, Answers, AsyncEngine, AsyncSession, Calls
from holdfast._wire import Row
from holdfast._wire.aio_sqlite import AsyncSqliteSession
from holdfast._wire.sqlite import boot_id
from holdfast.core.errors import Refused


class AsyncSqliteEngine(AsyncEngine):
    poll = 0.01

    async def _connect(self, timeout: float) -> AsyncSession:
        return await AsyncSqliteSession.open(self.database, timeout)

    async def call_when_free(
        self, name: str, parameters: Mapping[str, Any], *, patience: float, timeout: float = CALL_TIMEOUT
    ) -> list[Row]:
        """Here an open transaction of anybody's holds up all that write, and it may be the caller's own."""
        return await self.call(name, parameters, timeout=min(timeout, max(1.0, patience)))

    async def rehearse(self, calls: Calls, *, timeout: float = CALL_TIMEOUT) -> Answers:
        self.check_usable()
        session = await AsyncSqliteSession.open(self.database, timeout)
        try:
            return await session.rehearse(calls, timeout)
        finally:
            session.close()

    async def _hello(self, session: AsyncSession, timeout: float) -> None:
        version = await self._version(session, timeout)
        if (version or 0) < self.newest:
            from holdfast._async.engines import migrate

            await migrate.up(self.database, session, timeout)
            version = await self._version(session, timeout)
        self.check_version(version)

    async def _version(self, session: AsyncSession, timeout: float) -> int | None:
        try:
            [row] = await session.call("hello", {"boot": boot_id() or ""}, timeout)
        except Refused as error:
            if error.sqlstate != "42P01":
                raise
            return None
        version: int | None = row["version"]
        return version
