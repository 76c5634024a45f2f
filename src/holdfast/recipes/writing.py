# Generated from writing_async.py by scripts/unasync.py. Do not edit.
"""Writes of a sweep, together: one transaction, and one wait for the disk, for all that wait for their turn meanwhile.

Only a short cut. What it leaves out, for whatever reason, is written one by one, and that is where it is decided.
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

MOST = 100
"""Records in one transaction: others wait for those of them that it has written."""


@dataclass(slots=True, eq=False)
class _Waiting:
    record: ObjectRecord
    grant: LeaseGrant
    written: bool = False


class Writer:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._turn = KeyedLock()
        self._waiting: list[_Waiting] = []

    def put(self, record: ObjectRecord, payload: dict[str, Any], grant: LeaseGrant) -> None:
        """As ``put_if`` at the version of the record: Conflict, FencedOut."""
        mine = _Waiting(record._replace(payload=payload), grant)
        self._waiting.append(mine)
        try:
            with self._turn.hold(""):
                if mine in self._waiting:  # else somebody has taken it along
                    self._write_all(grant)
        finally:
            with suppress(ValueError):  # it is only there when we are cancelled before our turn
                self._waiting.remove(mine)
        if not mine.written:
            self._objects.put_if(record.type, record.id, payload, MatchVersion(record.version), under=grant)

    def _write_all(self, grant: LeaseGrant) -> None:
        """All that wait to be written under this grant."""
        taken = [each for each in self._waiting if each.grant is grant][:MOST]
        for each in taken:
            self._waiting.remove(each)
        try:
            written = self._objects.put_many(taken[0].record.type, [each.record for each in taken], grant)
        except Exception as error:  # of the database, or of one of them: each will find out for itself
            log.debug("%d records are written one by one: %s", len(taken), error)
            return
        for each in taken:
            each.written = each.record.id in written
