"""All leases of a database, for operators: list them, read their history, take them away."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

from holdfast.database.engine_async import LOCKED, AsyncEngine
from holdfast.errors import LeaseLost, PolicyDenied, Refused
from holdfast.lease.keeper import keepers_of
from holdfast.lease.records import HistoryRecord, LeaseRecord
from holdfast.names import check_limit, check_name, check_said
from holdfast.runtime.identity import check_token, new_token

_PATIENCE = 5.0
INVALID = "22023"

Records = list[LeaseRecord]
Past = list[HistoryRecord]
if TYPE_CHECKING:
    from holdfast.lease.probe import Verdict

    Verdicts = list[Verdict]


class Guarding(Protocol):
    """A guard that was entered, or a grant."""

    @property
    def name(self) -> str: ...
    @property
    def token(self) -> str | None: ...


class AsyncLeases:
    """``client.leases``: all leases in the database, of any holder. ``client.lease(name)`` acquires one."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def list(self) -> Records:
        """Every live lease, by name."""
        return [LeaseRecord._of(row) for row in await self._engine.call("lease_list", {"name": None})]

    async def get(self, name: str) -> LeaseRecord | None:
        """The live lease of that name, or None."""
        rows = await self._engine.call("lease_list", {"name": check_name(name)})
        return LeaseRecord._of(rows[0]) if rows else None

    async def history(self, name: str | None = None, *, limit: int = 100) -> Past:
        """Grants that have ended, the latest first; the newest 10,000 are kept."""
        asked = {"name": None if name is None else check_name(name), "limit": check_limit(limit)}
        return [HistoryRecord._of(row) for row in await self._engine.call("lease_history", asked)]

    async def probe(self) -> Verdicts:
        """Check that this database keeps the lease contract: seven cases on a new name, in one transaction that is
        rolled back, so no other process sees them."""
        from holdfast.lease import probe

        name, tokens = f"holdfast probe {new_token()}", [new_token() for _ in range(probe.TOKENS)]
        cases = probe.cases(name, tokens)
        await self._engine.call("lease_list", {"name": name})  # migrates SQLite, or raises SchemaMismatch
        return probe.judge(cases, await self._engine.rehearse([call for case in cases for call in case.calls]))

    async def force_release(self, name: str, *, actor: str, reason: str, fence: int | None = None) -> bool:
        """Take a lease away from its holder, and record it. The holder learns of it with its next heartbeat, and cannot
        commit a protected transaction any more. False when the lease is free, or not that of ``fence``."""
        parameters = {
            "fence": fence,
            "name": check_name(name),
            "actor": check_said(actor, "actor"),
            "reason": check_said(reason, "reason", limit=1000),
        }
        try:
            statement = "lease_force_release" if fence is None else "lease_force_release_if"
            # again=None: a repeated call would find the lease free and return False.
            [row] = await self._engine.call_when_free(statement, parameters, patience=_PATIENCE, again=None)
        except Refused as error:
            if error.sqlstate != LOCKED:
                raise
            raise Refused(
                f"lease {name!r} cannot be taken away while a transaction that it protects is open; the server ends "
                "one that is idle for a TTL: try again",
                LOCKED,
            ) from error
        for keeper in keepers_of(self._engine.database):
            keeper.background.listener.wake(name)
        return bool(row["done"])

    async def recall(self, name: str, *, fence: int, actor: str, reason: str) -> bool:
        """Ask the holder to release the lease, and record it; nothing is taken away. An elector learns of the request
        with its next heartbeat, stops its work and releases; other holders ignore it. False when the grant with
        ``fence`` is over."""
        author = {"actor": check_said(actor, "actor"), "reason": check_said(reason, "reason", limit=1000)}
        [row] = await self._engine.call("lease_recall", {"name": check_name(name), "fence": fence, **author})
        return bool(row["done"])

    async def raise_fences(self, *, actor: str, reason: str, above: int | None = None, entry: int | None = None) -> int:
        """Raise fences, versions of objects and places in the log to a minute ahead of the clock and, if it is given,
        above ``above``, and record it. Returns the number that the next fence exceeds. For a receiver that has seen a
        higher fence than this database gives out, because the clock was set back across a restore. It cannot be undone.
        ``entry``: of the audit, if the caller records the outcome itself."""
        if above is not None and not (type(above) is int and 0 <= above < 1 << 60):
            raise ValueError(f"above must be an int from 0 to 2**60 - 1, not {above!r:.60}")
        parameters = {
            "action": "fence.raise", "subject": "fences", "actor": check_said(actor, "actor"),
            "reason": check_said(reason, "reason", limit=1000), "detail": json.dumps({"above": above}),
        }  # fmt: skip
        number = entry
        if number is None:
            number = (await self._engine.call("audit_begin", parameters))[0]["entry"]
        [row] = await self._engine.call("fence_raise", {"above": above, "entry": number})
        if entry is None:
            await self._engine.call("audit_end", {"entry": number, "outcome": "done"})
        return int(row["fence"])

    async def wipe(self, guard: Guarding | None, *, prefix: str = "") -> int:
        """Take away the leases whose names begin with ``prefix``, by default all, but no guards, electors or gates.
        Recorded; returns their number.

        ``guard`` is a guard that was entered, or its grant. That it is held is checked in the same transaction:
        LeaseLost if it is not, PolicyDenied without one or with another lease, and nothing is changed.
        """
        token = getattr(guard, "token", None)
        if guard is None or token is None:
            raise PolicyDenied("a wipe needs a guard that is held: with client.guard(name) as guard: ….wipe(guard)")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str, not {type(prefix).__name__}")
        parameters = {
            "name": guard.name,
            "token": check_token(token),
            "prefix": prefix and check_name(prefix, "prefix"),
        }
        try:
            [row] = await self._engine.call_when_free("lease_wipe", parameters, patience=_PATIENCE)
        except Refused as error:
            if error.sqlstate == INVALID:
                raise PolicyDenied(f"lease {guard.name!r} is not the lease of a guard: nothing is wiped") from error
            if error.sqlstate != LOCKED:
                raise
            raise Refused(
                "nothing is wiped while a transaction that a lease protects is open; the server ends one that is idle "
                "for a TTL: try again",
                LOCKED,
            ) from error
        if row["ended"] is None:
            raise LeaseLost(f"guard {guard.name!r} is not, or no longer, ours: nothing is wiped")
        return int(row["ended"])
