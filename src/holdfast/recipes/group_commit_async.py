"""Group commit: writes of records that wait for their turn share one transaction, and so one wait for the disk.

It only saves time. A write that the shared transaction leaves out, for any reason, is made on its own afterwards, and
that one decides.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.objects.model import MatchVersion, ObjectRecord
from holdfast.objects.objects_async import AsyncObjects
from holdfast.runtime.concurrency_async import AsyncKeyedLock
from holdfast.runtime.log import logger

log = logger("holdfast.reconciler")

MAX_RECORDS = 100
"""In one transaction: other writers of a record wait until it ends."""


@dataclass(slots=True, eq=False)
class _AsyncPendingWrite:
    record: ObjectRecord
    grant: AsyncLeaseGrant
    written: bool = False


class AsyncGroupCommit:
    def __init__(self, objects: AsyncObjects) -> None:
        self._objects = objects
        self._turn = AsyncKeyedLock()
        self._pending: list[_AsyncPendingWrite] = []

    async def put(self, record: ObjectRecord, payload: dict[str, Any], grant: AsyncLeaseGrant) -> None:
        """Write ``payload`` if the record still has its version. Conflict when it has not, FencedOut when the grant
        has passed on."""
        write = _AsyncPendingWrite(record._replace(payload=payload), grant)
        self._pending.append(write)
        try:
            async with self._turn.hold(""):
                if write in self._pending:  # else another caller has written it with its own
                    await self._write_pending(grant)
        finally:
            with suppress(ValueError):  # still there when we were cancelled before our turn
                self._pending.remove(write)
        if not write.written:
            await self._objects.put_if(record.type, record.id, payload, MatchVersion(record.version), under=grant)

    async def _write_pending(self, grant: AsyncLeaseGrant) -> None:
        """Write all that is pending under this grant in one transaction."""
        batch = [write for write in self._pending if write.grant is grant][:MAX_RECORDS]
        for write in batch:
            self._pending.remove(write)
        try:
            ids = await self._objects._put_many(batch[0].record.type, [write.record for write in batch], grant)
        except Exception as error:  # of the database or of one record: each caller writes its own, and sees its error
            log.debug("%d records are written one by one: %s", len(batch), error)
            return
        for write in batch:
            write.written = write.record.id in ids
