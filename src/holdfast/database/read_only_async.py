"""A session through which nothing is written: what a command is allowed while it only looks.

Refused twice over. Only statements that read are sent, and the database is told that this session reads: on PostgreSQL
each runs in a read-only transaction that is rolled back, on SQLite the connection takes queries alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.database.engine_async import AsyncSession
from holdfast.database.sessions import Row
from holdfast.database.statements import Dialect, statements
from holdfast.errors import Refused

READ_ONLY = "25006"


async def looking(session: AsyncSession, dialect: Dialect, timeout: float) -> AsyncSession:
    """The same session, for looking alone."""
    if dialect == "sqlite":
        await session.call("session_look", {}, timeout)
    return AsyncLookingSession(session, in_transactions=dialect == "postgres")


class AsyncLookingSession:
    def __init__(self, session: AsyncSession, *, in_transactions: bool) -> None:
        self._session, self._in_transactions = session, in_transactions

    async def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
        known = statements("sqlite").get(name)  # there it is known of each whether it reads
        if known is None or not known.reads_only:
            raise Refused(f"{name} is not for looking: nothing is changed before it was told", READ_ONLY)
        if not self._in_transactions:
            return await self._session.call(name, parameters, timeout)
        await self._session.script("begin read only", timeout)
        try:
            rows = await self._session.call(name, parameters, timeout)
        except Refused:
            await self._session.script("rollback", timeout)
            raise
        await self._session.script("rollback", timeout)
        return rows

    async def script(self, text: str, timeout: float) -> None:
        raise Refused("a script is not for looking: nothing is changed before it was told", READ_ONLY)

    def look(self) -> None:
        self._session.look()

    def close(self) -> None:
        self._session.close()
