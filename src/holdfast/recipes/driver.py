# Generated from driver_async.py by scripts/unasync.py. Do not edit.
"""What a reconciler needs of the two it stands between: the driver that runs things, and whoever holds the mandate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from holdfast.lease.grant import LeaseGrant
from holdfast.reconciler import Backend, DriverEvent
from holdfast.runtime.concurrency import StopEvent


class Driver(Protocol):
    """Runs one thing, the backend, for each record. An exception means that it is not known how things are."""

    def list(self) -> Iterable[Backend]:
        """All backends: a list with a part of them missing would have records pruned."""

    def get(self, id: str) -> Backend | None:
        """The backend; None when there certainly is none."""

    def watch(self) -> Iterator[DriverEvent | None]:
        """What changes from now on: None first, and about every second when there is nothing to tell."""


class Mandate(Protocol):
    """Who may write, and until when: the term of an elector, or shards."""

    @property
    def stopping(self) -> StopEvent: ...

    @property
    def gained(self) -> int:
        """Rises when there are more records to care for than before: they are swept at once."""

    def grant_for(self, key: str) -> LeaseGrant | None:
        """The grant under which a record is written; None when it is another replica's to care for."""
