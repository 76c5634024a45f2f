# Generated from _async/recipes/reconciler.py by scripts/unasync.py. Do not edit.
"""The reconciler: keeps records true to what a driver says, by events as they come and by a sweep now and then.

Both lead to the same few lines: read the record, ask the driver, decide, compare and swap. What is to be done is
decided in ``core.reconciling``; this module asks, writes, counts, and leaves a failing driver alone for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from holdfast._sync.engines.engine import Engine
from holdfast._sync.primitives.objects import Objects
from holdfast._sync.recipes.driver import Driver, Mandate
from holdfast._wire.clock import jitter, now
from holdfast._wire.crew import Aside, Crew, Keyed, Tally, pause
from holdfast._wire.log import logger
from holdfast._wire.waiting import settled
from holdfast.core.conditions import Backend, DriverEvent
from holdfast.core.errors import Conflict, FencedOut, LeaseLost, OwnershipUnknown
from holdfast.core.objects import MatchVersion, ObjectRecord
from holdfast.core.reconciling import Counts, Decision, Keep, ReconcilerTerms, Remove, decide, pause_after

log = logger("holdfast.reconciler")
T = TypeVar("T")

SessionPresent = Callable[[str], bool]
OnEvent = Callable[[DriverEvent], object]
ATTEMPTS = 5
"""How often a record is decided about anew when somebody else writes it at the same time."""
_PAGE = 1000
_TICK = 0.002
"""Seconds that two times of a database may read alike: SQLite counts milliseconds."""
_OVER = (LeaseLost, OwnershipUnknown, FencedOut)
"""It is another replica's turn: nothing was written, and nothing is wrong."""


class Reconciler:
    """``elector.run(reconciler.run)``, or ``reconciler.run(shards)``, in every replica."""

    def __init__(
        self,
        engine: Engine,
        terms: ReconcilerTerms,
        driver: Driver,
        session_present: SessionPresent | None,
        on_event: OnEvent | None,
    ) -> None:
        self._engine, self._terms, self._driver = engine, terms, driver
        self._session_present, self._on_event = session_present, on_event
        self._objects = Objects(engine)
        self._serial = Keyed()
        self._tally = Tally(Counts())
        self._failing = 0
        self._swept_at: float | None = None
        self._ahead: float | None = None
        """Of our monotonic clock: the database's."""

    def __repr__(self) -> str:
        return f"<Reconciler of {self._terms.type!r}>"

    def run(self, mandate: Mandate) -> None:
        """Watch and sweep until the term ends, or the shards are closed."""
        with Crew(self._terms.concurrency) as crew, Aside(self._follow, mandate, crew):
            failures = 0
            while not mandate.stopping.is_set():
                failures = 0 if self._swept(mandate) else failures + 1
                every = self._terms.sweep_every
                pause(mandate.stopping, pause_after(failures, every) if failures else every * jitter(0.9, 1.0))

    def exclusive(self, id: str) -> AbstractContextManager[None]:
        """Inside the block neither watch nor sweep of this process touches the record, nor another such block. The
        version decides all the same: this only spares the conflicts."""
        return self._serial.hold(id)

    def status(self) -> Counts:
        """What was done so far, for health endpoints and metrics; asks nobody."""
        ago = None if self._swept_at is None else now() - self._swept_at
        return self._tally.copy(swept_ago=ago)

    def sweep(self, mandate: Mandate) -> None:
        """Compare every record with the driver's list; whatever differs is looked at again, one by one, and mended."""
        with self._serial.hold(""):
            self._failing, started, began = 0, now(), self._ask_time()
            backends = {each.id: each for each in self._ask(self._driver.list)}
            self._compare(mandate, backends, began)
            self._swept_at = now()
            self._tally.add(sweeps=1)
            self._tally.set(sweep_seconds=self._swept_at - started)
        log.debug("%r: swept %d backends in %.3f s", self, len(backends), self._swept_at - started)

    def _compare(self, mandate: Mandate, backends: dict[str, Backend], began: float) -> None:
        with Crew(self._terms.concurrency) as crew:
            after: str | None = None
            while page := self._objects.list(self._terms.type, after=after, most=_PAGE):
                for record in page:
                    if mandate.stopping.is_set() or mandate.grant_for(record.id) is None:
                        continue
                    self._check_driver()
                    if self._differs(record, backends.get(record.id)):
                        crew.spawn(self._mend_safely, mandate, record.id, record, began)
                self._tally.add(seen=len(page))
                after = page[-1].id
            crew.finish()
        self._check_driver()

    def _swept(self, mandate: Mandate) -> bool:
        try:
            self.sweep(mandate)
        except Exception as error:
            self._tally.add(sweeps_abandoned=1)
            self._complain("a sweep was abandoned", error)
            return False
        return True

    def _follow(self, mandate: Mandate, crew: Crew) -> None:
        """Hear events as they come. Whenever we begin to listen something may have been missed, so it is swept then."""
        failures = 0
        while not mandate.stopping.is_set():
            events, heard = self._driver.watch(), False
            try:
                for event in events:
                    if not heard:
                        heard, failures = True, 0
                        self._tally.set(watching=True)
                        crew.spawn(self._swept, mandate)
                    if mandate.stopping.is_set():
                        return
                    if event is not None:
                        self._hear(event, mandate, crew)
            except Exception as error:
                self._tally.add(driver_failures=1)
                self._complain("the watch on the driver ended", error)
            finally:
                self._tally.set(watching=False)
                _close(events)
            failures += 1
            pause(mandate.stopping, pause_after(failures, self._terms.sweep_every) * jitter(0.75, 1.0))

    def _hear(self, event: DriverEvent, mandate: Mandate, crew: Crew) -> None:
        self._tally.add(events=1)
        if event.kind != "platform":
            crew.spawn(self._mend_safely, mandate, event.id, None, None)
        elif self._on_event is not None:
            try:
                settled(self._on_event(event))
            except Exception as error:
                self._complain("on_event failed", error)

    def _mend_safely(self, mandate: Mandate, id: str, record: ObjectRecord | None, began: float | None) -> None:
        """One record that cannot be handled is one record: it is told, and tried again with the next look."""
        try:
            with self._serial.hold(id):
                self._mend(mandate, id, record, began)
        except _OVER as error:
            log.debug("%r: record %r is left to the next holder: %s", self, id, error)
        except Exception as error:
            self._tally.add(errors=1)
            self._complain(f"record {id!r} could not be handled", error)

    def _mend(self, mandate: Mandate, id: str, record: ObjectRecord | None, began: float | None) -> None:
        """``record``: as the sweep that began at ``began`` has read it; None to read it, and after a lost race."""
        for _ in range(ATTEMPTS):
            record = record or self._objects.get(self._terms.type, id)
            if record is None:
                return
            if began is not None and record.updated_at.timestamp() > began - _TICK:
                self._tally.add(left_alone=1)
                return
            backend = self._ask(self._driver.get, id)
            decision = self._decide(record, backend)
            grant = mandate.grant_for(id)
            if isinstance(decision, Keep) or grant is None or mandate.stopping.is_set():
                return
            try:
                self._carry_out(decision, record, grant)
                return
            except Conflict:
                self._tally.add(conflicts=1)
                record = None

    def _carry_out(self, decision: Decision, record: ObjectRecord, grant: Any) -> None:
        type, id, version = record.type, record.id, record.version
        if isinstance(decision, Remove):
            self._objects.delete_if(type, id, version, under=grant)
            self._tally.add(removed=1)
            log.info("%r: removed %r, whose backend is gone", self, id)
        elif not isinstance(decision, Keep):
            self._objects.put_if(type, id, decision.payload, MatchVersion(version), under=grant)
            self._tally.add(written=1)
            log.debug("%r: %r is %s", self, id, decision.phase)

    def _differs(self, record: ObjectRecord, backend: Backend | None) -> bool:
        try:
            return not isinstance(self._decide(record, backend), Keep)
        except Exception as error:
            self._tally.add(errors=1)
            self._complain(f"record {record.id!r} could not be handled", error)
            return False

    def _decide(self, record: ObjectRecord, backend: Backend | None) -> Decision:
        session = True
        if self._session_present is not None and backend is not None:
            session = bool(settled(self._session_present(record.id)))
        return decide(record.payload, backend, session=session, at=self._at(), grace=self._terms.grace)

    def _at(self) -> float:
        """Now, on the database's clock: asked for once a sweep, and counted on from there."""
        if self._ahead is None:
            self._ask_time()
        return now() + (self._ahead or 0.0)

    def _ask_time(self) -> float:
        asked_at = now()
        [row] = self._engine.call("object_cursor", {})
        told: float = row["now"]
        self._ahead = told - asked_at
        return told

    def _ask(self, question: Callable[..., T], *arguments: str) -> T:
        """The driver, and keep count of how often in a row it fails."""
        try:
            answer = question(*arguments)
        except Exception:
            self._failing += 1
            self._tally.add(driver_failures=1)
            raise
        self._failing = 0
        return answer

    def _check_driver(self) -> None:
        if self._failing > 2 * self._terms.concurrency:
            raise RuntimeError(f"the driver has failed {self._failing} times in a row")

    def _complain(self, what: str, error: BaseException) -> None:
        self._tally.set(last_error=f"{what}: {type(error).__name__}: {error}"[:500])
        log.warning("%r: %s: %s", self, what, error)


def _close(events: Any) -> None:
    """Whatever an iterator keeps open, a generator or one that has the method."""
    close = getattr(events, "close", None)
    if close is not None:
        close()
