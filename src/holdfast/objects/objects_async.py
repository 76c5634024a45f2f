"""``client.objects``: compare-and-swap records.

Every write is one statement that compares and swaps, so the database decides between writers, with or without leases.
When the answer to a write is lost, the statement is repeated with the same token and is not applied twice: on
PostgreSQL the repeat finds the write of the first sending among the newest 100,000 changes.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from holdfast.database.connections.connection_async import recognise
from holdfast.database.connections.placeholders_async import AUTOCOMMIT
from holdfast.database.driver_errors import SQLSTATE
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.errors import Conflict, FencedOut, Refused
from holdfast.names import Unset, check_limit, check_max_bytes, check_name
from holdfast.objects.changes import Position
from holdfast.objects.model import (
    ABSENT,
    Condition,
    MatchVersion,
    ObjectRecord,
    Payload,
    ProofOfLease,
    check_condition,
    check_labels,
    check_version,
    decode_payload,
    encode_payload,
    refusal,
)
from holdfast.objects.watch_async import AsyncObjectWatch
from holdfast.runtime.clock import jitter
from holdfast.runtime.concurrency_async import maybe_await, sleep

ATTEMPTS = 10
"""How often ``update`` reads, changes and writes before it gives up."""
_REPEATED = {"again": True}
"""Added to the parameters when a statement is repeated because its answer was lost."""

Records = list[ObjectRecord]
Labels = Mapping[str, str]


class AsyncObjects:
    """Records that are written only if they are at the version the writer expects, and the log of their changes."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._on_postgres = engine.database.dialect == "postgres"

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
        under: ProofOfLease | None = None,
    ) -> ObjectRecord:
        """Write the object if ``condition`` holds, else Conflict or AlreadyExists and nothing is written.

        ``payload`` is bytes, or a value that JSON returns unchanged. ``name`` is unique within the type; name and
        labels are kept unless given. ``tx``: a connection in whose transaction the object is written. ``under``: write
        only while this grant is valid; FencedOut when the lease has passed on.
        """
        expected = check_condition(condition)
        body, raw = encode_payload(payload)
        parameters: Row = {
            "type": check_name(type, "type"),
            "id": check_name(id, "id"),
            "body": body,
            "expected": expected,
        }
        if expected > ABSENT and raw is None and tx is None and name is labels is Unset.UNSET:
            row = await self._write("object_swap", parameters, None, under)
        else:
            parameters |= {
                "raw": f"\\x{raw.hex()}" if self._on_postgres and raw is not None else raw,
                "name": None if isinstance(name, Unset) else "" if name is None else check_name(name),
                "labels": None if isinstance(labels, Unset) else check_labels(labels),
            }
            row = await self._write("object_put", parameters, tx, under)
        if row["status"] != "done":
            raise refusal(type, id, row, expected)
        return ObjectRecord._of(type, row, payload if raw is None else raw, id=id)

    async def delete_if(
        self, type: str, id: str, version: int, *, tx: Any = None, under: ProofOfLease | None = None
    ) -> None:
        """Delete the object if it is at ``version``; Conflict when it is at another one, or does not exist."""
        expected = check_version(version)
        parameters = {"type": check_name(type, "type"), "id": check_name(id, "id"), "expected": expected}
        row = await self._write("object_delete", parameters, tx, under)
        if row["status"] != "done":
            raise refusal(type, id, row, expected)

    async def get(self, type: str, id: str) -> ObjectRecord | None:
        """The object, or None."""
        parameters = {"type": check_name(type, "type"), "id": check_name(id, "id")}
        rows = await self._engine.call("object_get", parameters)
        return ObjectRecord._of(type, rows[0], decode_payload(rows[0]), id=id) if rows else None

    async def get_by_name(self, type: str, name: str) -> ObjectRecord | None:
        """The object of that name, or None."""
        parameters = {"type": check_name(type, "type"), "name": check_name(name)}
        rows = await self._engine.call("object_get_by_name", parameters)
        return ObjectRecord._of(type, rows[0], decode_payload(rows[0]), name=name) if rows else None

    async def list(
        self, type: str, *, labels: Labels | None = None, after: str | None = None, limit: int = 100,
        max_bytes: int | None = None,
    ) -> Records:  # fmt: skip
        """Objects of a type that have all these labels, ordered by id, at most ``limit``.

        For the next page pass the last id as ``after``: objects created or deleted on earlier pages do not shift it.
        ``max_bytes``: the page ends before the object whose payload would make it larger, unless that is its first one.
        """
        parameters = {
            "type": check_name(type, "type"),
            "labels": check_labels({} if labels is None else labels),
            "after": None if after is None else check_name(after, "after"),
            "limit": check_limit(limit),
        }
        if max_bytes is None:
            rows = await self._engine.call("object_list", parameters)
        else:
            parameters["max_bytes"] = check_max_bytes(max_bytes)
            rows = await self._engine.call("object_list_within", parameters)
        return [ObjectRecord._of(type, row, decode_payload(row)) for row in rows]

    async def update(
        self, type: str, id: str, change: Callable[[ObjectRecord], Payload | Awaitable[Payload]]
    ) -> ObjectRecord:
        """Read the object, write the payload that ``change(record)`` returns, and retry when another write came first.

        ``change`` may therefore be called several times. Conflict when the object does not exist, or when all ten
        attempts came second.
        """
        for attempt in range(ATTEMPTS):
            record = await self.get(type, id)
            if record is None:
                raise Conflict(f"object {id!r} of type {type!r} does not exist, so it cannot be updated", current=None)
            payload = await maybe_await(change(record))
            if payload is None or isinstance(payload, ObjectRecord):
                returned = payload.__class__.__name__  # None: the function probably changed its argument in place
                raise TypeError(f"change must return the new payload, not {returned}; use put_if to write null")
            try:
                return await self.put_if(type, id, payload, MatchVersion(record.version))
            except Conflict:
                if attempt + 1 == ATTEMPTS:
                    raise
            await sleep(jitter(0.0, min(0.002 * 2**attempt, 0.25)))
        raise AssertionError("not reached")

    def watch(self, type: str | None = None, *, since: str | None = None) -> AsyncObjectWatch:
        """Changes of one type or of all, from now on or after ``since``: the cursor of a change, or from ``cursor()``.

        Ordered by commit: a change that was committed before another COMMIT was sent comes first; of two concurrent
        commits either may. After a cursor nothing is missed and nothing is repeated, across reconnects too.
        CursorExpired when changes after ``since`` have been trimmed.
        """
        position = None if since is None else Position.parse(since, self._engine.database.dialect)
        return AsyncObjectWatch(self._engine, None if type is None else check_name(type, "type"), position)

    async def cursor(self) -> str:
        """The end of the change log: take it, then ``list``, then ``watch(since=…)``, and no change is missed."""
        [row] = await self._engine.call("object_cursor", {})
        cursor: str = row["cursor"]
        return cursor

    def _with_token(self, parameters: Row) -> Row:
        """Adds the token by which a repeated statement recognises its own write. On SQLite no answer is ever lost."""
        return parameters | {"token": os.urandom(16).hex(), "again": False} if self._on_postgres else parameters

    async def _write(self, statement: str, parameters: Row, tx: Any, under: ProofOfLease | None) -> Row:
        """Run the statement in ``tx`` or in a transaction of its own; FencedOut when ``under`` has passed on."""
        if under is not None:
            under.check()
        lease, token = (None, None) if under is None else (under.name, under.token)
        parameters = self._with_token(parameters) | {"lease": lease, "lease_token": token}
        if tx is None:
            try:
                [row] = await self._engine.call(statement, parameters, again=_REPEATED)
            except Refused as error:
                if under is None or error.sqlstate != SQLSTATE:
                    raise
                raise FencedOut.from_lease(under.name) from error
            if under is not None and row["status"] == "fenced":
                raise FencedOut.from_lease(under.name)
            return row
        if under is not None:
            raise ValueError("give either tx or under: to write in tx under a grant, use grant.transaction(tx)")
        connection = recognise(self._engine.database, tx, "the objects are")
        if not connection.in_transaction() and not connection.begins_by_itself():
            raise ValueError(AUTOCOMMIT)
        return await connection.write(statement, parameters | {"late": True})
