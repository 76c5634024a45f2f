# Generated from protocols_async.py by scripts/unasync.py. Do not edit.
"""What a reconciler needs: a driver that runs backends, and a mandate, which says who may write which record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from holdfast.lease.grant import LeaseGrant
from holdfast.reconciler import Backend, DriverEvent
from holdfast.runtime.concurrency import StopEvent


class Driver(Protocol):
    """Runs a backend for each record. An exception means that the state is not known: nothing is changed then."""

    def list(self) -> Iterable[Backend]:
        """All backends. It must be complete: the record of a backend that is missing here may be removed."""

    def get(self, id: str) -> Backend | None:
        """The backend of a record; None when there certainly is none."""

    def watch(self) -> Iterator[DriverEvent | None]:
        """Events from now on. Yields None first, and about every second while there is no event."""


class Mandate(Protocol):
    """Which records this replica may write, and until when: the term of an elector, or shards."""

    @property
    def stopping(self) -> StopEvent:
        """Set when the reconciler has to stop."""

    @property
    def gained(self) -> int:
        """Rises when this replica becomes responsible for more records, which are then swept at once."""

    def grant_for(self, key: str) -> LeaseGrant | None:
        """The grant to write a record under; None when another replica is responsible for it."""
