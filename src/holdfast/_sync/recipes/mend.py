# Generated from _async/recipes/mend.py by scripts/unasync.py. Do not edit.
"""One record, and what to do about it: read, ask the driver, decide, compare, swap. The same for events and sweeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from holdfast._sync.engines.engine import Engine
from holdfast._sync.primitives.objects import Objects
from holdfast._sync.recipes.driver import Driver, Mandate
from holdfast._wire.clock import now
from holdfast._wire.crew import Keyed, Tally
from holdfast._wire.log import logger
from holdfast._wire.waiting import settled
from holdfast.core.conditions import Backend
from holdfast.core.errors import Conflict, FencedOut, LeaseLost, OwnershipUnknown
from holdfast.core.objects import MatchVersion, ObjectRecord
from holdfast.core.reconciling import Counts, Decision, Keep, ReconcilerTerms, Remove, decide

log = logger("holdfast.reconciler")
T = TypeVar("T")

SessionPresent = Callable[[str], bool]
ATTEMPTS = 5
"""How often a record is decided about anew when somebody else writes it at the same time."""
_TICK = 0.002
"""Seconds that two times of a database may read alike: SQLite counts milliseconds."""
_OVER = (LeaseLost, OwnershipUnknown, FencedOut)
"""It is another replica's turn: nothing was written, and nothing is wrong."""


class Mender:
    def __init__(
        self, engine: Engine, terms: ReconcilerTerms, driver: Driver, session_present: SessionPresent | None
    ) -> None:
        self._engine, self._terms, self._driver = engine, terms, driver
        self._session_present = session_present
        self.objects = Objects(engine)
        self.serial = Keyed()
        self.tally = Tally(Counts())
        self.failing = 0
        """How often in a row the driver has failed."""
        self._ahead: float | None = None
        """Of our monotonic clock: the database's."""

    def __repr__(self) -> str:
        return f"<Reconciler of {self._terms.type!r}>"

    def mend(self, mandate: Mandate, id: str, record: ObjectRecord | None, began: float | None) -> None:
        """One record that cannot be handled is one record: it is told, and tried again with the next look."""
        try:
            with self.serial.hold(id):
                self._mend_in_turn(mandate, id, record, began)
        except _OVER as error:
            log.debug("%r: record %r is left to the next holder: %s", self, id, error)
        except Exception as error:
            self.tally.add(errors=1)
            self.complain(f"record {id!r} could not be handled", error)

    def _mend_in_turn(self, mandate: Mandate, id: str, record: ObjectRecord | None, began: float | None) -> None:
        """``record``: as the sweep that began at ``began`` has read it; None to read it, and after a lost race."""
        for _ in range(ATTEMPTS):
            if mandate.grant_for(id) is None:
                return
            record = record or self.objects.get(self._terms.type, id)
            if record is None:
                return
            if began is not None and record.updated_at.timestamp() > began - _TICK:
                self.tally.add(left_alone=1)
                return
            backend = self.ask(self._driver.get, id)
            decision = self._decide(record, backend)
            grant = mandate.grant_for(id)
            if isinstance(decision, Keep) or grant is None or mandate.stopping.is_set():
                return
            try:
                self._carry_out(decision, record, grant)
                return
            except Conflict:
                self.tally.add(conflicts=1)
                record = None

    def _carry_out(self, decision: Decision, record: ObjectRecord, grant: Any) -> None:
        type, id, version = record.type, record.id, record.version
        if isinstance(decision, Remove):
            self.objects.delete_if(type, id, version, under=grant)
            self.tally.add(removed=1)
            log.info("%r: removed %r, whose backend is gone", self, id)
        elif not isinstance(decision, Keep):
            self.objects.put_if(type, id, decision.payload, MatchVersion(version), under=grant)
            self.tally.add(written=1)
            log.debug("%r: %r is %s", self, id, decision.phase)

    def differs(self, record: ObjectRecord, backend: Backend | None) -> bool:
        try:
            return not isinstance(self._decide(record, backend), Keep)
        except Exception as error:
            self.tally.add(errors=1)
            self.complain(f"record {record.id!r} could not be handled", error)
            return False

    def _decide(self, record: ObjectRecord, backend: Backend | None) -> Decision:
        session = True
        if self._session_present is not None and backend is not None:
            session = bool(settled(self._session_present(record.id)))
        return decide(record.payload, backend, session=session, at=self._at(), grace=self._terms.grace)

    def _at(self) -> float:
        """Now, on the database's clock: asked for once a sweep, and counted on from there."""
        if self._ahead is None:
            self.ask_time()
        return now() + (self._ahead or 0.0)

    def ask_time(self) -> float:
        asked_at = now()
        [row] = self._engine.call("object_cursor", {})
        told: float = row["now"]
        self._ahead = told - asked_at
        return told

    def ask(self, question: Callable[..., T], *arguments: str) -> T:
        """The driver, and keep count of how often in a row it fails."""
        try:
            answer = question(*arguments)
        except Exception:
            self.failing += 1
            self.tally.add(driver_failures=1)
            raise
        self.failing = 0
        return answer

    def check_driver(self) -> None:
        if self.failing > 2 * self._terms.concurrency:
            raise RuntimeError(f"the driver has failed {self.failing} times in a row")

    def complain(self, what: str, error: BaseException) -> None:
        self.tally.set(last_error=f"{what}: {type(error).__name__}: {error}"[:500])
        log.warning("%r: %s: %s", self, what, error)
