"""One record, and what to do about it: read, ask the driver, decide, compare, swap. The same for events and sweeps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from holdfast.database.engine_async import AsyncEngine
from holdfast.errors import Conflict, FencedOut, LeaseLost, OwnershipUnknown
from holdfast.objects.model import ObjectRecord
from holdfast.objects.objects_async import AsyncObjects
from holdfast.recipes.driver_async import AsyncDriver, AsyncMandate
from holdfast.recipes.reconciling import ANSWER, Counts, Decision, Keep, ReconcilerTerms, Remove, decide, pause_after
from holdfast.recipes.writing_async import AsyncWriter
from holdfast.reconciler import Backend
from holdfast.runtime import telemetry
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import SharedCounts, TermEnding
from holdfast.runtime.concurrency_async import AsyncBoundedCalls, AsyncKeyedLock, wait_event
from holdfast.runtime.log import logger

log = logger("holdfast.reconciler")
T = TypeVar("T")

SessionPresent = Callable[[str], bool | Awaitable[bool]]
ATTEMPTS = 5
"""How often a record is decided about anew when somebody else writes it at the same time."""
_OVER = (LeaseLost, OwnershipUnknown, FencedOut)
"""It is another replica's turn: nothing was written, and nothing is wrong."""


class AsyncMender:
    def __init__(
        self, engine: AsyncEngine, terms: ReconcilerTerms, driver: AsyncDriver, session_present: SessionPresent | None
    ) -> None:
        self._engine, self._terms, self._driver = engine, terms, driver
        self._session_present = session_present
        self.objects = AsyncObjects(engine)
        self._writer = AsyncWriter(self.objects)
        self._asker = AsyncBoundedCalls()
        self.serial = AsyncKeyedLock()
        self.tally = SharedCounts(Counts(), "reconciler.counted")
        self.queued: set[str] = set()
        """Records that somebody is about to look at, because of an event."""
        self._failing = self._patience = 0
        """How often in a row the driver has failed, and from when on we wonder whose fault that is."""
        self._ahead: float | None = None
        """Of our monotonic clock: the database's, and by how much more it may be."""
        self._slack = 0.0

    def __repr__(self) -> str:
        return f"<Reconciler of {self._terms.type!r}>"

    async def mend(self, mandate: AsyncMandate, id: str, record: ObjectRecord | None, horizon: int | None) -> None:
        """One record that cannot be handled is one record: it is told, and tried again with the next look."""
        try:
            async with self.serial.hold(id):
                self.queued.discard(id)
                await self._mend_in_turn(mandate, id, record, horizon)
        except _OVER as error:
            log.debug("%r: record %r is left to the next holder: %s", self, id, error)
        except Exception as error:
            self._count_error(id, error)

    async def _mend_in_turn(
        self, mandate: AsyncMandate, id: str, record: ObjectRecord | None, horizon: int | None
    ) -> None:
        """``record``: as a sweep has read it that began when ``horizon`` was the highest version; None to read it, and
        after a lost race."""
        if self._ahead is None:  # an event came before the first sweep
            await self.horizon()
        for _ in range(ATTEMPTS):
            if mandate.grant_for(id) is None:
                return
            record = record or await self.objects.get(self._terms.type, id)
            if record is None:
                return
            if horizon is not None and record.version > horizon:
                self.tally.add(left_alone=1)
                return
            backend = await self._ask(mandate, f"driver.get({id!r})", ANSWER, self._driver.get, id)
            if backend is not None and backend.id != id:
                raise ValueError(f"the driver was asked for {id!r}, and answered for {backend.id!r}")
            decision = self._decide(record, backend, await self._session(mandate, id, backend))
            grant = mandate.grant_for(id)
            if isinstance(decision, Keep) or grant is None or mandate.stopping.is_set():
                return
            try:
                await self._carry_out(decision, record, grant)
                return
            except Conflict:
                self.tally.add(conflicts=1)
                record = None

    async def _carry_out(self, decision: Decision, record: ObjectRecord, grant: Any) -> None:
        type, id, version = record.type, record.id, record.version
        if isinstance(decision, Remove):
            await self.objects.delete_if(type, id, version, under=grant)
            self.tally.add(removed=1)
            log.info(
                "%r: removed %r, whose backend is gone", self, id, extra={"event": "reconciler.removed", "record": id}
            )
        elif not isinstance(decision, Keep):
            await self._writer.put(record, decision.payload, grant)
            self.tally.add(written=1)
            log.debug("%r: %r is %s", self, id, decision.phase)

    def asks_session(self, backend: Backend | None) -> bool:
        """Whether more than the list is needed to tell if a record is true: that may take its time."""
        return self._session_present is not None and backend is not None

    def differs(self, record: ObjectRecord, backend: Backend | None, session: bool = True) -> bool:
        try:
            return not isinstance(self._decide(record, backend, session), Keep)
        except Exception as error:
            self._count_error(record.id, error)
            return False

    async def look(
        self, mandate: AsyncMandate, record: ObjectRecord, backend: Backend | None, horizon: int | None
    ) -> None:
        """Ask for its session, and mend it if it differs."""
        try:
            session = await self._session(mandate, record.id, backend)
        except TermEnding:
            return
        except Exception as error:
            self._count_error(record.id, error)
            return
        if self.differs(record, backend, session):
            await self.mend(mandate, record.id, record, horizon)

    async def _session(self, mandate: AsyncMandate, id: str, backend: Backend | None) -> bool:
        if self._session_present is None or backend is None:
            return True
        what, stopping = f"session_present({id!r})", mandate.stopping
        return bool(await self._asker.call(stopping, what, ANSWER, self._session_present, id))

    def _decide(self, record: ObjectRecord, backend: Backend | None, session: bool) -> Decision:
        at = now() + (self._ahead or 0.0)
        return decide(record.payload, backend, session=session, at=at, grace=self._terms.grace, slack=self._slack)

    async def horizon(self) -> int:
        """The highest version there is; and what the database's clock says, to be counted on from here."""
        asked_at = now()
        [row] = await self._engine.call("object_cursor", {})
        answered_at = now()
        self._ahead, self._slack = row["now"] - answered_at, answered_at - asked_at
        version: int = row["version"]
        return version

    async def list(self, mandate: AsyncMandate) -> dict[str, Backend]:
        """All backends, at the beginning of a sweep."""
        self._failing, self._patience = 0, 2 * self._terms.concurrency
        return await self._ask_for_all(mandate)

    @property
    def wonders(self) -> bool:
        """So many failures in a row: do these records fail, or does the driver?"""
        return self._failing > self._patience

    async def find_out(self, mandate: AsyncMandate) -> None:
        """A driver that lists is not to blame: the sweep goes on, and wonders later the next time. One that does not is
        left alone for longer and longer, until it does."""
        failures = 0
        while not mandate.stopping.is_set():
            try:
                await self._ask_for_all(mandate)
            except TermEnding:
                return
            except Exception as error:
                failures += 1
                self.complain("a sweep waits for the driver", error)
                await wait_event(mandate.stopping, pause_after(failures, self._terms.sweep_every))
            else:
                self._patience *= 2
                return

    async def close(self, events: Any) -> None:
        """Whatever an iterator of the driver's keeps open, a generator or one that has the method."""
        close = getattr(events, "aclose", None)
        if close is None:
            return
        try:
            await self._asker.call(None, "the end of driver.watch()", ANSWER, close)
        except Exception as error:
            self.complain("the watch on the driver could not be closed", error)

    async def _ask_for_all(self, mandate: AsyncMandate) -> dict[str, Backend]:
        return await self._ask(mandate, "driver.list()", max(ANSWER, self._terms.sweep_every), self._listed)

    async def _listed(self) -> dict[str, Backend]:
        return {each.id: each for each in await self._driver.list()}

    async def _ask(
        self, mandate: AsyncMandate, what: str, within: float, question: Callable[..., Awaitable[T]], *arguments: str
    ) -> T:
        """The driver, and keep count of how often in a row it fails."""
        try:
            answer: T = await self._asker.call(mandate.stopping, what, within, question, *arguments)
        except TermEnding:
            raise
        except Exception:
            self._failing += 1
            self.tally.add(driver_failures=1)
            raise
        self._failing = 0
        return answer

    def _count_error(self, id: str, error: BaseException) -> None:
        self.tally.add(errors=1)
        self.complain(f"record {id!r} could not be handled", error)

    def complain(self, what: str, error: BaseException) -> None:
        self.tally.set(last_error=f"{what}: {type(error).__name__}: {error}"[:500])
        log.warning(
            "%r: %s: %s", self, what, error, extra={"event": "reconciler.failed", "what": what, "error": str(error)}
        )
        telemetry.tell("reconciler.failed")
