"""Objects: records that are written only if they are still what the writer believes.

Every write is one statement that compares and swaps, so the database decides between writers, whatever leases say. A
write whose answer was lost is asked after, and is never done twice; where that cannot be had, it is told as unknown.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from holdfast.database import driver_errors as drivers
from holdfast.database.connections.connection_async import recognise
from holdfast.database.connections.placeholders_async import AUTOCOMMIT
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.errors import Conflict, Refused
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.lease.protect_async import fenced_out
from holdfast.names import Unset, check_limit, check_name
from holdfast.objects.changes import Position
from holdfast.objects.model import (
    Condition,
    MatchVersion,
    ObjectRecord,
    Payload,
    check_condition,
    check_labels,
    check_version,
    encode,
    payload_of,
    refusal,
    to_json,
)
from holdfast.objects.watch_async import AsyncWatch
from holdfast.runtime.clock import jitter
from holdfast.runtime.concurrency_async import maybe_await, sleep

ATTEMPTS = 10
"""How often ``update`` reads, changes and writes before it gives up."""
_AGAIN = {"again": True}

Records = list[ObjectRecord]
Labels = Mapping[str, str]


class AsyncObjects:
    """``client.objects``: records that are compared before they are swapped, and the log of their changes."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._hex = engine.database.dialect == "postgres"

    async def put_if(
        self,
        type: str,
        id: str,
        payload: Payload,
        condition: Condition,
        *,
        name: str | Unset | None = Unset.UNSET,
        labels: Labels | Unset = Unset.UNSET,
        tx: Any = None,
        under: AsyncLeaseGrant | None = None,
    ) -> ObjectRecord:
        """Write the object if ``condition`` holds, else Conflict or AlreadyExists and nothing is written.

        ``payload`` is bytes, or anything that JSON can give back as it is. ``name`` is unique in its type; name and
        labels stay what they are unless given. ``tx``: a connection whose transaction this is to be part of.
        ``under``: a grant, without which nothing is written: FencedOut when the database knows that it has passed on.
        """
        wanted, expected = check_condition(condition)
        body, raw = encode(payload)
        parameters: Row = {
            "type": check_name(type, "type"),
            "id": check_name(id, "id"),
            "body": body,
            "expected": expected,
        }
        if expected is not None and raw is None and tx is under is None and name is labels is Unset.UNSET:
            [row] = await self._engine.call("object_swap", self._asked(parameters), again=_AGAIN)
        else:
            parameters |= {
                "raw": raw.hex() if self._hex and raw is not None else raw,
                "condition": wanted,
                "rename": not isinstance(name, Unset),
                "name": None if name is None or isinstance(name, Unset) else check_name(name),
                "labels": None if isinstance(labels, Unset) else check_labels(labels),
            }
            # Once more could come after somebody else's write: only what compares can be asked for again.
            row = await self._write("object_put", parameters, tx, under, None if wanted == "any" else _AGAIN)
        if row["status"] != "done":
            raise refusal(type, id, row, expected)
        return ObjectRecord.of(type, row, payload if raw is None else raw, id=id)

    async def put_many(self, type: str, records: Records, under: AsyncLeaseGrant) -> dict[str, int]:
        """Their payloads, in one transaction, of those that are still at their versions, that nobody else is just
        writing, and that are no bytes; the new versions. What was left out is to be written, or refused, one by one."""
        under.check()
        told = [(each, encode(each.payload)[0]) for each in records]
        rows = [{"id": each.id, "body": body, "expected": each.version} for each, body in told if body is not None]
        parameters = {"type": type, "records": to_json(rows), "lease": under.name, "lease_token": under.token}
        written = await self._engine.call("object_put_many", parameters, again=None)
        return {row["id"]: row["version"] for row in written}

    async def delete_if(
        self, type: str, id: str, version: int, *, tx: Any = None, under: AsyncLeaseGrant | None = None
    ) -> None:
        """Delete the object if it is at ``version``; Conflict when it is not, or is not there."""
        expected = check_version(version)
        parameters = {"type": check_name(type, "type"), "id": check_name(id, "id"), "expected": expected}
        row = await self._write("object_delete", parameters, tx, under, _AGAIN)
        if row["status"] != "done":
            raise refusal(type, id, row, expected)

    async def get(self, type: str, id: str) -> ObjectRecord | None:
        """The object, or None."""
        parameters = {"type": check_name(type, "type"), "id": check_name(id, "id")}
        rows = await self._engine.call("object_get", parameters)
        return ObjectRecord.of(type, rows[0], payload_of(rows[0]), id=id) if rows else None

    async def get_by_name(self, type: str, name: str) -> ObjectRecord | None:
        """The object of that name, or None."""
        parameters = {"type": check_name(type, "type"), "name": check_name(name)}
        rows = await self._engine.call("object_get_by_name", parameters)
        return ObjectRecord.of(type, rows[0], payload_of(rows[0]), name=name) if rows else None

    async def list(
        self, type: str, *, labels: Labels | None = None, after: str | None = None, most: int = 100
    ) -> Records:
        """Objects of a type that have all these labels, in the order of their ids, ``most`` at a time.

        The next page begins ``after`` the id of the last one. A page stays what it is whatever is created or deleted on
        the pages before.
        """
        parameters = {
            "type": check_name(type, "type"),
            "labels": check_labels({} if labels is None else labels),
            "after": None if after is None else check_name(after, "after"),
            "most": check_limit(most),
        }
        rows = await self._engine.call("object_list", parameters)
        return [ObjectRecord.of(type, row, payload_of(row)) for row in rows]

    async def update(
        self, type: str, id: str, change: Callable[[ObjectRecord], Payload | Awaitable[Payload]]
    ) -> ObjectRecord:
        """Read, let ``change(record)`` say what the payload is to be, write; once more if somebody else was faster.

        Conflict when there is no such object, or when it was somebody else ten times in a row.
        """
        for attempt in range(ATTEMPTS):
            record = await self.get(type, id)
            if record is None:
                raise Conflict(f"object {id!r} of type {type!r} does not exist", current=None)
            payload = await maybe_await(change(record))
            if payload is None or isinstance(payload, ObjectRecord):
                told = payload.__class__.__name__  # a change in place, without a return
                raise TypeError(f"change must return the payload as it is to be, not {told}; put_if can write null")
            try:
                return await self.put_if(type, id, payload, MatchVersion(record.version))
            except Conflict:
                if attempt + 1 == ATTEMPTS:
                    raise
            await sleep(jitter(0.0, min(0.002 * 2**attempt, 0.25)))
        raise AssertionError("not reached")

    def watch(self, type: str | None = None, *, since: str | None = None) -> AsyncWatch:
        """Changes of one type or of all, from now on or after ``since``: the cursor of a change, or from ``cursor()``.

        In the order of their commits: what was committed before another commit was asked for is told before it; of two
        commits at the same moment either may come first. From a cursor on nothing is missed and nothing told twice,
        across reconnects too. CursorExpired when what came after ``since`` is not all kept any more.
        """
        position = None if since is None else Position.parse(since, self._engine.database.dialect)
        return AsyncWatch(self._engine, None if type is None else check_name(type, "type"), position)

    async def cursor(self) -> str:
        """Where we are: ``list`` after this, and ``watch`` since this, and nothing falls in between."""
        [row] = await self._engine.call("object_cursor", {})
        cursor: str = row["cursor"]
        return cursor

    def _asked(self, parameters: Row) -> Row:
        """With what an answer that was lost is asked after by; on SQLite none ever is."""
        return parameters | {"token": os.urandom(16).hex(), "again": False} if self._hex else parameters

    async def _write(
        self, statement: str, parameters: Row, tx: Any, under: AsyncLeaseGrant | None, again: Row | None
    ) -> Row:
        if under is not None:
            under.check()
        name, secret = (None, None) if under is None else (under.name, under.token)
        late = tx is not None  # its place among the changes is where that commits
        parameters = self._asked(parameters) | {"lease": name, "lease_token": secret, "late": late}
        if tx is None:
            return await self._write_alone(statement, parameters, under, again)
        if under is not None:
            raise ValueError("tx cannot be written under a grant as well: use grant.transaction(tx)")
        connection = recognise(self._engine.database, tx, "the objects are")
        if not connection.in_transaction() and not connection.begins_by_itself():
            raise ValueError(AUTOCOMMIT)
        return await connection.write(statement, parameters)

    async def _write_alone(
        self, statement: str, parameters: Row, under: AsyncLeaseGrant | None, again: Row | None
    ) -> Row:
        try:
            [row] = await self._engine.call(statement, parameters, again=again)
        except Refused as error:
            if under is None or error.sqlstate != drivers.SQLSTATE:
                raise
            raise fenced_out(under.name) from error
        if under is not None and row["status"] == "fenced":
            raise fenced_out(under.name)
        return row
