"""All locks, for the people who operate them: who holds what, who waits for whom, and ending a stuck session."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from holdfast.database.engine_async import CALL_TIMEOUT, AsyncEngine
from holdfast.errors import Refused, Unanswered
from holdfast.lock.file_lock_tables import FileLockTables
from holdfast.lock.holders_async import holders
from holdfast.lock.records import LockRecord
from holdfast.lock.terms import Key, number
from holdfast.names import check_said

if TYPE_CHECKING:
    from holdfast.lock.handle_async import AsyncLockSpace

Records = list[LockRecord]
ENDED = "ended"
_LOOK_TIMEOUT = 1.0
"""Seconds for the lookup of a holder, by which a refusal may come later. A lookup that is given up costs the client its
session for calls, and the server has one more for a moment."""


class AsyncLockMonitor:
    """``space``: of the client that looks, if it has locked anything. It knows the names of its own locks first."""

    def __init__(self, engine: AsyncEngine, space: AsyncLockSpace | None) -> None:
        self._engine, self._space = engine, space

    async def list(self) -> Records:
        """Every advisory lock in the database that a session holds or waits for, of holdfast or not, by name; waiters
        come after holders. On SQLite, the locks of holdfast, without waiters."""
        pool = None if self._space is None else self._space.executor.pool
        ours = {} if pool is None else pool.labels()
        if self._engine.database.dialect == "postgres":
            rows = await self._engine.call("lock_list", {"pair": None, "key": None})
            for row in rows:
                if row["namespace"] is None and row["name"] is None:
                    row["name"] = ours.get((b"%d" % row["entity_id"],))
            records = [LockRecord._of(row) for row in rows]
        else:
            tables = FileLockTables(await self._engine.call("lock_list", {}), ours)
            records = [tables.record(each) for each in await holders(self._engine.database)]
        return sorted(
            records, key=lambda each: (each.namespace or "", each.name is None, each.name or "", each.entity_id)
        )

    async def _find_holder(self, key: Key) -> LockRecord | None:
        """Who holds a lock now, for the message of a refusal. On SQLite only if it is noted: /proc takes too long."""
        pair, code = len(key) == 2, number(key)
        if self._engine.database.dialect == "postgres":
            rows = await self._engine.call("lock_list", {"pair": pair, "key": code}, timeout=_LOOK_TIMEOUT)
            return next((LockRecord._of(row) for row in rows if row["granted"]), None)
        tables = FileLockTables(await self._engine.call("lock_list", {}, timeout=_LOOK_TIMEOUT), {})
        return tables.holder(pair, code)

    async def end_session(self, pid: int, *, actor: str, reason: str, entry: int | None = None) -> Records:
        """End a database session that holds or waits for an advisory lock, for the record: its locks are free then, and
        its transaction is rolled back. Returns the locks it had. Refused for every other session, where the server does
        not let this role, and on SQLite, where a lock ends with its process. ``entry``: of the audit, if it is told
        there already."""
        if isinstance(pid, bool) or not isinstance(pid, int):
            raise TypeError(f"pid must be a whole number, not {type(pid).__name__}")
        if not 0 < pid < 2**31:
            raise ValueError(f"pid must be from 1 to {2**31 - 1}, not {pid}")
        parameters = {
            "action": "lock.end",
            "subject": f"session {pid}",
            "actor": check_said(actor, "actor"),
            "reason": check_said(reason, "reason", limit=1000),
        }
        records = [each for each in await self.list() if each.pid == pid]
        detail = json.dumps(
            [{"lock": each.label, "mode": each.mode, "granted": each.granted} for each in records[:1000]]
        )
        if entry is None:
            [row] = await self._engine.call("audit_begin", {**parameters, "detail": detail})
        outcome = await self._end(pid)
        if entry is None:
            await self._engine.call("audit_end", {"entry": row["entry"], "outcome": outcome})
        if outcome != ENDED:
            if not outcome.startswith("refused"):  # it may end yet
                raise Unanswered(f"session {pid} was {outcome}")
            raise Refused(f"session {pid} was not ended: {outcome.removeprefix('refused: ')}")
        return records

    async def _end(self, pid: int) -> str:
        """Asked once: a second time it would be gone already, and the answer another."""
        if self._engine.database.dialect == "sqlite":
            return "refused: on SQLite a lock is its process's: end that"
        async with self._engine.own_session() as session:
            [row] = await session.call("lock_end_session", {"pid": pid}, CALL_TIMEOUT)
        outcome: str = row["outcome"]
        return outcome
