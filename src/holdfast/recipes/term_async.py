"""A term: the time between winning an election and giving the lease back, as the work sees it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

from holdfast.errors import LeaseLost
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.runtime.concurrency_async import AsyncStopEvent


class AsyncTerm:
    """What ``work`` gets. ``fence`` rises with every term; pass it along with effects outside the database."""

    def __init__(self, grant: AsyncLeaseGrant) -> None:
        self._grant = grant
        self.name, self.holder, self.fence = grant.name, grant.holder, grant.fence
        self.stopping = AsyncStopEvent()
        """Set when the work has to stop: lost, resigned, or shut down."""
        self.gained = 0
        """What a reconciler asks of its mandate: a term begins with all records, and gains none."""

    def __repr__(self) -> str:
        return f"<Term {self.name!r} fence={self.fence} {'stopping' if self.stopping.is_set() else 'leading'}>"

    @property
    def lost(self) -> bool:
        """True once we may no longer act as the leader."""
        return self._grant.lost

    def remaining(self) -> float:
        """Seconds for which the term can be trusted if nothing renews it."""
        return self._grant.remaining()

    def check(self) -> None:
        """Raise when the term is lost, or when the work has to stop: LeaseLost, OwnershipUnknown."""
        self._grant.check()
        if self.stopping.is_set():
            raise LeaseLost(f"the term of {self.holder!r} as {self.name!r} is ending: the work has to stop")

    def grant_for(self, key: str) -> AsyncLeaseGrant | None:
        """The grant to write under, whatever the record: a term is for all of them."""
        return self._grant

    async def protect(self, connection: Any, *, at: Literal["start", "commit"] = "start") -> int:
        """Protect the transaction open on ``connection``: it cannot commit once the term is another's."""
        return await self._grant.protect(connection, at=at)

    def transaction(
        self, connection: Any, *, at: Literal["start", "commit"] = "start"
    ) -> AbstractAsyncContextManager[Any]:
        """Open a transaction on ``connection`` and protect it: FencedOut once the term is another's."""
        return self._grant.transaction(connection, at=at)
