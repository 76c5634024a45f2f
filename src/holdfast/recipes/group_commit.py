# Generated from group_commit_async.py by scripts/unasync.py. Do not edit.
"""Group commit: writes of records that wait for their turn share one transaction, and so one wait for the disk.

It only saves time. A write that the shared transaction leaves out, for any reason, is made on its own afterwards, and
that one decides.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.lease.grant import LeaseGrant
from holdfast.objects.model import MatchVersion, ObjectRecord
from holdfast.objects.objects import Objects
from holdfast.runtime.concurrency import KeyedLock
from holdfast.runtime.log import logger

log = logger("holdfast.reconciler")

MAX_RECORDS = 100
"""In one transaction: other writers of a record wait until it ends."""


@dataclass(slots=True, eq=False)
class _PendingWrite:
    record: ObjectRecord
    grant: LeaseGrant
    written: bool = False


class GroupCommit:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._turn = KeyedLock()
        self._pending: list[_PendingWrite] = []

    def put(self, record: ObjectRecord, payload: dict[str, Any], grant: LeaseGrant) -> None:
        """Write ``payload`` if the record still has its version. Conflict when it has not, FencedOut when the grant
        has passed on."""
        write = _PendingWrite(record._replace(payload=payload), grant)
        self._pending.append(write)
        try:
            with self._turn.hold(""):
                if write in self._pending:  # else another caller has written it with its own
                    self._write_pending(grant)
        finally:
            with suppress(ValueError):  # still there when we were cancelled before our turn
                self._pending.remove(write)
        if not write.written:
            self._objects.put_if(record.type, record.id, payload, MatchVersion(record.version), under=grant)

    def _write_pending(self, grant: LeaseGrant) -> None:
        """Write all that is pending under this grant in one transaction."""
        batch = [write for write in self._pending if write.grant is grant][:MAX_RECORDS]
        for write in batch:
            self._pending.remove(write)
        try:
            ids = self._objects._put_many(batch[0].record.type, [write.record for write in batch], grant)
        except Exception as error:  # of the database or of one record: each caller writes its own, and sees its error
            log.debug("%d records are written one by one: %s", len(batch), error)
            return
        for write in batch:
            write.written = write.record.id in ids
