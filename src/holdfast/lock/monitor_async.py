"""All locks, for the people who operate them: who holds what, who waits for whom, and ending a stuck session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.database.engine_async import CALL_TIMEOUT, AsyncEngine
from holdfast.errors import HoldfastError, Refused, Unanswered
from holdfast.lock.executor_async import owner
from holdfast.lock.holders import FileLockTables, holders
from holdfast.lock.records import LockRecord
from holdfast.lock.terms import Key, number
from holdfast.names import check_said
from holdfast.runtime.concurrency_async import AsyncMutex, call_blocking

if TYPE_CHECKING:
    from holdfast.lock.handle_async import AsyncLockSpace

Records = list[LockRecord]
ENDED = "ended"
_LOOKUP_TIMEOUT = 1.0
"""Seconds for a lookup of holders. A lookup that is given up costs the client its session for calls, and the server has
one more for a moment."""


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
            rows = await self._engine.call("lock_list", {"keys": None})
            for row in rows:
                if row["namespace"] is None and row["name"] is None:
                    row["name"] = ours.get((b"%d" % row["entity_id"],))
            records = [LockRecord._of(row) for row in rows]
        else:
            tables = FileLockTables(await self._engine.call("lock_list", {}), ours)
            records = [tables.record(each) for each in await call_blocking(holders, self._engine.database)]
        return sorted(
            records, key=lambda each: (each.namespace or "", each.name is None, each.name or "", each.entity_id)
        )

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
        outcome = await self._end(pid, row["entry"] if entry is None else entry)
        if entry is None:
            await self._engine.call("audit_end", {"entry": row["entry"], "outcome": outcome})
        if outcome != ENDED:
            if not outcome.startswith("refused"):  # it may end yet
                raise Unanswered(f"session {pid} was {outcome}")
            raise Refused(f"session {pid} was not ended: {outcome.removeprefix('refused: ')}")
        return records

    async def _end(self, pid: int, entry: int) -> str:
        """Asked once: a second time it would be gone already, and the answer another."""
        if self._engine.database.dialect == "sqlite":
            return "refused: on SQLite a lock is its process's: end that"
        async with self._engine.own_session() as session:
            [row] = await session.call("lock_end_session", {"pid": pid, "entry": entry}, CALL_TIMEOUT)
        outcome: str = row["outcome"]
        return outcome


class AsyncHolderLookup:
    """Finds who holds a lock, for the message of a refusal. One lookup at a time: requests that time out meanwhile
    share the next one. So a refusal comes at most two lookups late, however many there are."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._mutex = AsyncMutex()
        self._next = _Lookup()
        self._callers: set[object] = set()

    async def find(self, key: Key) -> LockRecord | None:
        """None if it is not known, or if no session holds it any more."""
        caller = owner()
        if caller in self._callers:  # a signal handler has interrupted a lookup of this thread
            return None
        self._callers.add(caller)
        try:
            while True:
                lookup = self._next
                lookup.keys.add(key)
                async with self._mutex:
                    if not lookup.is_done:
                        self._next = _Lookup()
                        await self._look_up(lookup)
                if key in lookup.records:  # else another thread has begun it before the key was added
                    return lookup.records[key]
        finally:
            self._callers.discard(caller)

    async def _look_up(self, lookup: _Lookup) -> None:
        keys = list(lookup.keys)
        try:
            lookup.records |= dict.fromkeys(keys)
            lookup.records |= await self._holders(keys)
        except HoldfastError:  # those that wait for the next lookup have waited as long: end it, too
            waiting, self._next = self._next, _Lookup()
            waiting.records |= dict.fromkeys(list(waiting.keys))
            waiting.is_done = True
        lookup.is_done = True

    async def _holders(self, keys: Sequence[Key]) -> dict[Key, LockRecord]:
        """On SQLite only what is noted: /proc takes too long."""
        codes = {(len(key) == 2, number(key)): key for key in keys}
        if self._engine.database.dialect == "sqlite":
            tables = FileLockTables(await self._engine.call("lock_list", {}, timeout=_LOOKUP_TIMEOUT), {})
            noted = {key: tables.holder(*code) for code, key in codes.items()}
            return {key: record for key, record in noted.items() if record is not None}
        rows = await self._engine.call("lock_list", {"keys": json.dumps(list(codes))}, timeout=_LOOKUP_TIMEOUT)
        return {codes[row["pair"], row["key"]]: LockRecord._of(row) for row in reversed(rows) if row["granted"]}


class _Lookup:
    """``records`` has every key that was looked up."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()
        self.records: dict[Key, LockRecord | None] = {}
        self.is_done = False
