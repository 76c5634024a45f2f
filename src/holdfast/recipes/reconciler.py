# Generated from reconciler_async.py by scripts/unasync.py. Do not edit.
"""The reconciler: keeps records true to what a driver says, by events as they come and by a sweep now and then.

Both lead to the same few lines in ``mend``, and what is to be done is decided in ``reconciling``. This module
hears, compares, counts, and leaves a failing driver alone for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from holdfast.database.engine import Engine
from holdfast.recipes.driver import Driver, Mandate
from holdfast.recipes.mend import Mender, SessionPresent
from holdfast.recipes.reconciling import Counts, ReconcilerTerms, failures_with, pause_after
from holdfast.reconciler import Backend, DriverEvent
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import (
    Companion,
    Notifier,
    TaskPool,
    TermEnding,
    check_async_callable,
    check_callable,
    reject_foreign_cancel,
    wait_event,
)
from holdfast.runtime.log import logger

log = logger("holdfast.reconciler")

OnEvent = Callable[[DriverEvent], object]
_PAGE = 1000
_GLANCE = 1.0
"""Seconds between two looks whether there are more records to care for."""


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
        self._terms, self._driver = terms, driver
        self._mender = Mender(engine, terms, driver, session_present)
        self._teller = None if on_event is None else Notifier(on_event, self._not_told)
        self._tally = self._mender.tally
        self._swept_at: float | None = None
        self._begun_at: float | None = None
        """None while it is not run here."""

    def __repr__(self) -> str:
        return f"<Reconciler of {self._terms.type!r}>"

    def run(self, mandate: Mandate) -> None:
        """Watch and sweep until the term ends, or the shards are closed."""
        self._begun_at = now()
        telemetry.register(self)  # here: a fork of this process has none of what was made before
        try:
            self._run(mandate)
        finally:
            self._begun_at = None
            if self._teller is not None:
                self._teller.finish(0.0)

    def _run(self, mandate: Mandate) -> None:
        with TaskPool(self._terms.concurrency) as crew, Companion(self._follow, mandate, crew):
            failures = 0
            while not mandate.stopping.is_set():
                gained = mandate.gained
                failures = 0 if self._swept(mandate) else failures + 1
                every = self._terms.sweep_every
                until = now() + (pause_after(failures, every) if failures else every * jitter(0.9, 1.0))
                while not mandate.stopping.is_set() and mandate.gained == gained and (left := until - now()) > 0:
                    wait_event(mandate.stopping, min(left, _GLANCE))

    def exclusive(self, id: str) -> AbstractContextManager[None]:
        """Inside the block neither watch nor sweep of this process touches the record, nor another such block. The
        version decides all the same: this only spares the conflicts."""
        return self._mender.serial.hold(id)

    def status(self) -> Counts:
        """What was done so far, for health endpoints and metrics; asks nobody."""
        ago = None if self._swept_at is None else now() - self._swept_at
        return self._tally.copy(swept_ago=ago)

    def gauges(self) -> Iterable[tuple[str, float]]:
        begun_at = self._begun_at
        if begun_at is not None:
            yield "reconciler_sweep_age_seconds", now() - max(begun_at, self._swept_at or begun_at)

    def sweep(self, mandate: Mandate) -> None:
        """Compare every record with the driver's list; whatever differs is looked at again, one by one, and mended."""
        with self._mender.serial.hold(""):
            started, horizon = now(), self._mender.horizon()
            backends = self._mender.list(mandate)
            self._compare(mandate, backends, horizon)
            if mandate.stopping.is_set():
                return
            self._swept_at = now()
            self._tally.add(sweeps=1)
            self._tally.set(sweep_seconds=self._swept_at - started)
        log.debug("%r: swept %d backends in %.3f s", self, len(backends), self._swept_at - started)
        telemetry.tell("reconciler.swept", seconds=self._swept_at - started)

    def _compare(self, mandate: Mandate, backends: dict[str, Backend], horizon: int) -> None:
        mender = self._mender
        with TaskPool(self._terms.concurrency) as crew:
            after: str | None = None
            while page := mender.objects.list(self._terms.type, after=after, most=_PAGE):
                ours = [record for record in page if mandate.grant_for(record.id) is not None]
                for record in ours:
                    if mender.wonders:
                        mender.find_out(mandate)
                    if mandate.stopping.is_set():
                        return
                    backend = backends.get(record.id)
                    if mender.asks_session(backend):
                        crew.spawn(mender.look, mandate, record, backend, horizon)
                    elif mender.differs(record, backend):
                        crew.spawn(mender.mend, mandate, record.id, record, horizon)
                self._tally.add(seen=len(ours))
                after = page[-1].id
            crew.finish()

    def _swept(self, mandate: Mandate) -> bool:
        try:
            self.sweep(mandate)
        except TermEnding:
            return False
        except Exception as error:
            self._tally.add(sweeps_abandoned=1)
            self._mender.complain("a sweep was abandoned", error)
            return False
        return True

    def _follow(self, mandate: Mandate, crew: TaskPool) -> None:
        """Hear events as they come. Whenever we begin to listen something may have been missed, so it is swept then."""
        failures = 0
        self._mender.queued.clear()
        while not mandate.stopping.is_set():
            events: Any = None
            heard, began = False, now()
            try:
                with reject_foreign_cancel():
                    events = self._driver.watch()
                    for event in events:
                        self._tally.set(watching=True)  # each time: a thread left from the last term says otherwise
                        if not heard:
                            heard = True
                            crew.spawn(self._swept, mandate)
                        if mandate.stopping.is_set() or not self._hear(event, mandate, crew):
                            return
                raise ConnectionError("the driver has no more to tell")
            except Exception as error:
                self._tally.add(driver_failures=1)
                self._mender.complain("the watch on the driver ended", error)
            finally:
                self._tally.set(watching=False)
                self._mender.close(events)
            failures = failures_with(failures, now() - began, self._terms.sweep_every)
            wait_event(mandate.stopping, pause_after(failures, self._terms.sweep_every) * jitter(0.75, 1.0))

    def _hear(self, event: DriverEvent | None, mandate: Mandate, crew: TaskPool) -> bool:
        """False when nobody is left to do anything about it."""
        if event is None:
            return True
        self._tally.add(events=1)
        if event.kind != "platform":
            if event.id in self._mender.queued:  # whoever is about to look will see this, too
                return True
            self._mender.queued.add(event.id)
            return crew.spawn(self._mender.mend, mandate, event.id, None, None)
        if self._teller is not None and not self._teller.notify(event):
            self._tally.add(untold=1)
        return True

    def _not_told(self, error: Exception) -> None:
        self._mender.complain("on_event failed", error)
