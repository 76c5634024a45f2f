"""A session through which nothing is written: for commands in a dry run, and for listings.

It refuses twice over: only statements that read are sent, and the database enforces it as well. On PostgreSQL each one
runs in a read-only transaction that is rolled back; on SQLite the connection is set to ``query_only``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.database.call_dispatcher_async import AsyncCallSession
from holdfast.database.call_queue import Answer
from holdfast.database.sessions import Calls, Row
from holdfast.database.statements import Dialect, statements
from holdfast.errors import Refused

READ_ONLY = "25006"
"""SQLSTATE: read-only transaction."""


async def make_read_only(session: AsyncCallSession, dialect: Dialect, timeout: float) -> AsyncCallSession:
    if dialect == "sqlite":
        await session.call("session_look", {}, timeout)
    return AsyncReadOnlySession(session, in_transactions=dialect == "postgres")


class AsyncReadOnlySession:
    shares = False
    identity: Row | None = {}  # noqa: RUF012 - never changed
    committed: list[Answer] | None = None

    def __init__(self, session: AsyncCallSession, *, in_transactions: bool) -> None:
        self._session, self._in_transactions = session, in_transactions

    async def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
        """Refused unless the statement only reads, which SQLite's form of it tells."""
        statement = statements("sqlite").get(name)
        if statement is None or not statement.reads_only:
            raise Refused(f"{name} writes, and this client is read-only", READ_ONLY)
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

    async def call_together(self, calls: Calls, timeout: float) -> list[Answer]:
        raise AssertionError("calls do not share a transaction here")

    async def script(self, text: str, timeout: float) -> None:
        raise Refused("a script writes, and this client is read-only", READ_ONLY)

    def check_target(self) -> None:
        self._session.check_target()

    def close(self) -> None:
        self._session.close()
