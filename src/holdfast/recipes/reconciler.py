# Generated from reconciler_async.py by scripts/unasync.py. Do not edit.
"""The reconciler: writes into records what a driver says about their backends, by events and by regular sweeps.

    run ─┬─ _watch: each event of the driver ──────────────────┬─→ _reconcile: read the record, ask the driver,
         └─ _sweep: each record that differs from driver.list() ┘  decide, and write if the version is still the same

Events get lost, so a sweep compares all records every ``sweep_every`` seconds, and whenever a watch begins. What to do
about a record is decided in ``reconciler_terms``, by the ``rules`` that the user may replace.

A change must keep this:

- A write compares the version of the record and names its lease: it neither overwrites a handler's update nor succeeds
  after the lease has passed on.
- An exception of the driver is no answer: it changes no record.
- A sweep leaves alone what was updated after it began, by version: its list of backends is older.
- The driver is asked about each record again before it is changed: a list only says where to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from holdfast.database.engine import Engine
from holdfast.errors import Conflict, FencedOut, LeaseLost, OwnershipUnknown
from holdfast.lease.grant import LeaseGrant
from holdfast.objects.model import MatchVersion, ObjectRecord
from holdfast.objects.objects import Objects
from holdfast.recipes.protocols import Driver, Mandate
from holdfast.recipes.reconciler_terms import (
    DRIVER_TIMEOUT,
    Decision,
    Keep,
    ReconcilerStatus,
    ReconcilerTerms,
    Remove,
    count_failures,
    decide,
    retry_delay,
)
from holdfast.reconciler import Backend, DriverEvent
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import (
    BoundedCalls,
    Companion,
    KeyedLock,
    Notifier,
    SharedCounts,
    TaskPool,
    TermEnding,
    check_async_callable,
    check_callable,
    reject_foreign_cancel,
    wait_event,
)
from holdfast.runtime.log import INFO, WARNING, logger

log = logger("holdfast.reconciler")
T = TypeVar("T")

OnEvent = Callable[[DriverEvent], object]
SessionPresent = Callable[[str], bool]
_PAGE, _PAGE_BYTES = 1000, 4 << 20
"""Records that a sweep reads at a time, and bytes of their payloads."""
_MAX_ATTEMPTS = 5
"""How often a record is decided about anew when it is written by others at the same time."""
_GAIN_POLL = 1.0
"""Seconds between two checks whether the mandate has gained records."""
_SWEEP = ""
"""The key of the lock that a sweep holds: no record has this id."""
_PASSED_ON = (LeaseLost, OwnershipUnknown, FencedOut)
"""Another replica is responsible now: nothing was written, and nothing has failed."""


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
        for name in ("list", "get", "watch"):
            if not callable(getattr(driver, name, None)):
                raise TypeError(f"driver must have list(), get(id) and watch(): {driver!r:.80} has no {name}()")
        for function, what in (
            (driver.get, "driver.get"), (session_present, "session_present"), (on_event, "on_event")
        ):  # fmt: skip
            if function is not None:
                check_callable(function, what)
        check_async_callable(driver.list, "driver.list")
        check_async_callable(driver.get, "driver.get")
        self._engine, self._terms, self._driver = engine, terms, driver
        self._session_present = session_present
        self._objects = Objects(engine)
        self._calls = BoundedCalls()
        self._locks = KeyedLock()
        """One for each record, and one for the sweep."""
        self._notifier = None if on_event is None else Notifier(on_event, self._report_callback_error)
        self._counts = SharedCounts(ReconcilerStatus(), "reconciler.counted")
        self._queued: set[str] = set()
        """Records that will be reconciled because of an event."""
        self._failures = 0
        """Calls of the driver that failed in a row."""
        self._max_failures = 0
        """With more failures than this, a sweep finds out whether it is the driver that fails, or these records."""
        self._clock_offset: float | None = None
        """The database's clock minus our monotonic one; up to ``_clock_slack`` more."""
        self._clock_slack = 0.0
        self._swept_at: float | None = None
        self._running_since: float | None = None

    def __repr__(self) -> str:
        return f"<Reconciler of {self._terms.type!r}>"

    def run(self, mandate: Mandate) -> None:
        """Watch and sweep until the term ends, or the shards are closed."""
        self._running_since = now()
        telemetry.register(self)  # here and not in __init__: a fork of this process has no registrations
        try:
            with TaskPool(self._terms.concurrency) as pool, Companion(self._watch, mandate, pool):
                self._sweep_regularly(mandate)
        finally:
            self._running_since = None
            if self._notifier is not None:
                self._notifier.finish(0.0)

    def exclusive(self, id: str) -> AbstractContextManager[None]:
        """A block in which this process does not reconcile the record, nor enter another such block for it. It avoids
        conflicts; whether a write succeeds is decided by the version all the same."""
        return self._locks.hold(id)

    def status(self) -> ReconcilerStatus:
        """What was done so far, for health endpoints and metrics. Asks neither the driver nor the database."""
        ago = None if self._swept_at is None else now() - self._swept_at
        return self._counts.copy(swept_ago=ago)

    def _gauges(self) -> Iterable[tuple[str, float]]:
        since = self._running_since
        if since is not None:
            yield "reconciler_sweep_age_seconds", now() - max(since, self._swept_at or since)

    # Sweeps

    def _sweep(self, mandate: Mandate) -> None:
        """Compare every record with the driver's list, and reconcile those that differ, one by one. Raises what the
        driver or the database raised."""
        with self._locks.hold(_SWEEP):
            started, horizon = now(), self._fetch_horizon()
            self._failures, self._max_failures = 0, 2 * self._terms.concurrency
            backends = self._list_backends(mandate)
            self._compare(mandate, backends, horizon)
            if mandate.stopping.is_set():
                return
            self._swept_at = now()
            self._counts.add(sweeps=1)
            self._counts.set(sweep_seconds=self._swept_at - started)
        log.debug("%r: swept %d backends in %.3f s", self, len(backends), self._swept_at - started)
        telemetry.emit("reconciler.swept", seconds=self._swept_at - started)

    def _sweep_regularly(self, mandate: Mandate) -> None:
        failures = 0
        while not mandate.stopping.is_set():
            gained = mandate.gained
            failures = 0 if self._try_sweep(mandate) else failures + 1
            every = self._terms.sweep_every
            until = now() + (retry_delay(failures, every) if failures else every * jitter(0.9, 1.0))
            while not mandate.stopping.is_set() and mandate.gained == gained and (left := until - now()) > 0:
                wait_event(mandate.stopping, min(left, _GAIN_POLL))

    def _try_sweep(self, mandate: Mandate) -> bool:
        """False when the sweep was abandoned."""
        try:
            self._sweep(mandate)
        except TermEnding:
            return False
        except Exception as error:
            self._counts.add(sweeps_abandoned=1)
            self._report_failure("a sweep was abandoned", error)
            return False
        return True

    def _compare(self, mandate: Mandate, backends: dict[str, Backend], horizon: int) -> None:
        with TaskPool(self._terms.concurrency) as pool:
            after: str | None = None
            while page := self._objects.list(self._terms.type, after=after, limit=_PAGE, max_bytes=_PAGE_BYTES):
                ours = [record for record in page if mandate.grant_for(record.id) is not None]
                for record in ours:
                    if self._failures > self._max_failures:
                        self._wait_for_driver(mandate)
                    if mandate.stopping.is_set():
                        return
                    backend = backends.get(record.id)
                    if self._session_present is not None and backend is not None:  # may take long: in the pool
                        pool.spawn(self._reconcile_with_session, mandate, record, backend, horizon)
                    elif self._differs(record, backend):
                        pool.spawn(self._reconcile, mandate, record.id, record, horizon)
                self._counts.add(seen=len(ours))
                after = page[-1].id
            pool.finish()

    def _wait_for_driver(self, mandate: Mandate) -> None:
        """After many failures in a row: a driver that can list is not the reason, and the sweep continues, with a
        higher limit. A driver that cannot is left alone for longer and longer, until it can."""
        failures = 0
        while not mandate.stopping.is_set():
            try:
                self._list_backends(mandate)
            except TermEnding:
                return
            except Exception as error:
                failures += 1
                self._report_failure("a sweep waits for the driver", error)
                wait_event(mandate.stopping, retry_delay(failures, self._terms.sweep_every))
            else:
                self._max_failures *= 2
                return

    # Events

    def _watch(self, mandate: Mandate, pool: TaskPool) -> None:
        """Handle events as they come. Before a watch begins, events may have been missed: each one starts a sweep."""
        failures = 0
        self._queued.clear()
        while not mandate.stopping.is_set():
            events: Any = None
            is_first, started = True, now()
            try:
                with reject_foreign_cancel():
                    events = self._driver.watch()
                    for event in events:
                        self._counts.set(watching=True)  # each time: a thread left from the last term clears it
                        if is_first:
                            is_first = False
                            pool.spawn(self._try_sweep, mandate)
                        if mandate.stopping.is_set() or not self._handle_event(event, mandate, pool):
                            return
                raise ConnectionError("driver.watch() has returned")
            except Exception as error:
                self._counts.add(driver_failures=1)
                self._report_failure("the watch on the driver ended", error)
            finally:
                self._counts.set(watching=False)
                self._close_watch(events)
            failures = count_failures(failures, now() - started, self._terms.sweep_every)
            wait_event(mandate.stopping, retry_delay(failures, self._terms.sweep_every) * jitter(0.75, 1.0))

    def _handle_event(self, event: DriverEvent | None, mandate: Mandate, pool: TaskPool) -> bool:
        """False when the pool was shut down."""
        if event is None:
            return True
        self._counts.add(events=1)
        if event.kind == "platform":
            if self._notifier is not None and not self._notifier.notify(event):
                self._counts.add(untold=1)
            return True
        if event.id in self._queued:  # the record will be read after this event, too
            return True
        self._queued.add(event.id)
        return pool.spawn(self._reconcile, mandate, event.id, None, None)

    def _close_watch(self, events: Any) -> None:
        """Close a generator, or an iterator that has the method."""
        close = getattr(events, "close", None)
        if close is None:
            return
        try:
            self._calls.call(None, "the end of driver.watch()", DRIVER_TIMEOUT, close)
        except Exception as error:
            self._report_failure("the watch on the driver could not be closed", error)

    # One record

    def _reconcile(self, mandate: Mandate, id: str, record: ObjectRecord | None, horizon: int | None) -> None:
        """Reconcile one record. An error is reported and affects no other record: the next sweep tries it again.

        A sweep passes the ``record`` that it has read, and ``horizon``, the highest version when it began."""
        try:
            with self._locks.hold(id):
                self._queued.discard(id)
                self._reconcile_locked(mandate, id, record, horizon)
        except _PASSED_ON as error:
            log.debug("%r: record %r is left to the next holder: %s", self, id, error)
        except Exception as error:
            self._report_record_error(id, error)

    def _reconcile_locked(self, mandate: Mandate, id: str, record: ObjectRecord | None, horizon: int | None) -> None:
        if self._clock_offset is None:  # an event before the first sweep
            self._fetch_horizon()
        for _ in range(_MAX_ATTEMPTS):
            if mandate.grant_for(id) is None:
                return
            record = record or self._objects.get(self._terms.type, id)
            if record is None:
                return
            if horizon is not None and record.version > horizon:
                self._counts.add(left_alone=1)
                return
            backend = self._call_driver(mandate, f"driver.get({id!r})", DRIVER_TIMEOUT, self._driver.get, id)
            if backend is not None and backend.id != id:
                raise ValueError(f"driver.get({id!r}) has returned the backend of {backend.id!r}")
            decision = self._decide(record, backend, self._has_session(mandate, id, backend))
            grant = mandate.grant_for(id)
            if isinstance(decision, Keep) or grant is None or mandate.stopping.is_set():
                return
            try:
                self._write(decision, record, grant)
                return
            except Conflict:
                self._counts.add(conflicts=1)
                record = None  # read it again

    def _reconcile_with_session(self, mandate: Mandate, record: ObjectRecord, backend: Backend, horizon: int) -> None:
        """Ask for the session of the record, and reconcile it if it differs."""
        try:
            session = self._has_session(mandate, record.id, backend)
        except TermEnding:
            return
        except Exception as error:
            self._report_record_error(record.id, error)
            return
        if self._differs(record, backend, session):
            self._reconcile(mandate, record.id, record, horizon)

    def _differs(self, record: ObjectRecord, backend: Backend | None, session: bool = True) -> bool:
        try:
            return not isinstance(self._decide(record, backend, session), Keep)
        except Exception as error:
            self._report_record_error(record.id, error)
            return False

    def _decide(self, record: ObjectRecord, backend: Backend | None, session: bool) -> Decision:
        terms, at = self._terms, now() + (self._clock_offset or 0.0)
        value = record.payload if terms.codec is None else terms.codec.decode(record.payload)
        return decide(
            value, backend, terms.rules, session=session, at=at, grace=terms.grace, slack=self._clock_slack
        )  # fmt: skip

    def _write(self, decision: Decision, record: ObjectRecord, grant: LeaseGrant) -> None:
        """Conflict when the record has changed, FencedOut when the grant has passed on."""
        if isinstance(decision, Remove):
            self._objects.delete_if(record.type, record.id, record.version, under=grant)
            self._counts.add(removed=1)
            log.event(
                "reconciler.removed", INFO, "%(reconciler)s: removed %(record)r, whose backend is gone",
                reconciler=repr(self), record=record.id,
            )  # fmt: skip
        elif not isinstance(decision, Keep):
            codec, expected = self._terms.codec, MatchVersion(record.version)
            payload = decision.value if codec is None else codec.encode(decision.value)
            self._objects.put_if(record.type, record.id, payload, expected, under=grant)
            self._counts.add(written=1)
            log.debug("%r: %r is %s", self, record.id, decision.phase)

    def _fetch_horizon(self) -> int:
        """The highest version in the database. Sets the offset of its clock, too."""
        asked_at = now()
        [row] = self._engine.call("object_cursor", {})
        answered_at = now()
        self._clock_offset, self._clock_slack = row["now"] - answered_at, answered_at - asked_at
        version: int = row["version"]
        return version

    # The driver and the user's functions, which may hang

    def _has_session(self, mandate: Mandate, id: str, backend: Backend | None) -> bool:
        if self._session_present is None or backend is None:
            return True
        what = f"session_present({id!r})"
        return bool(self._calls.call(mandate.stopping, what, DRIVER_TIMEOUT, self._session_present, id))

    def _list_backends(self, mandate: Mandate) -> dict[str, Backend]:
        timeout = max(DRIVER_TIMEOUT, self._terms.sweep_every)
        return self._call_driver(mandate, "driver.list()", timeout, self._backends_by_id)

    def _backends_by_id(self) -> dict[str, Backend]:
        return {backend.id: backend for backend in self._driver.list()}

    def _call_driver(
        self, mandate: Mandate, what: str, timeout: float, function: Callable[..., T], *arguments: str
    ) -> T:
        """What the driver returns. Raises what it raises, TimeoutError, or TermEnding; counts failures in a row."""
        try:
            answer: T = self._calls.call(mandate.stopping, what, timeout, function, *arguments)
        except TermEnding:
            raise
        except Exception:
            self._failures += 1
            self._counts.add(driver_failures=1)
            raise
        self._failures = 0
        return answer

    # Failures

    def _report_callback_error(self, error: Exception) -> None:
        self._report_failure("on_event failed", error)

    def _report_record_error(self, id: str, error: Exception) -> None:
        self._counts.add(errors=1)
        self._report_failure(f"record {id!r} could not be handled", error)

    def _report_failure(self, what: str, error: Exception) -> None:
        self._counts.set(last_error=f"{what}: {type(error).__name__}: {error}"[:500])
        log.event(
            "reconciler.failed", WARNING, "%(reconciler)s: %(what)s: %(error)s",
            reconciler=repr(self), what=what, error=str(error),
        )  # fmt: skip
        telemetry.emit("reconciler.failed")
