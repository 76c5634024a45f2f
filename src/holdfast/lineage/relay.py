# Generated from relay_async.py by scripts/unasync.py. Do not edit.
"""The relay: tells a sink what the log says, in the order of the log, at least once.

One replica does it, under a lease. It reads after its cursor, hands the events to the sink, and moves the cursor in a
transaction that the lease protects: one that was superseded cannot. When it dies in between, the next one tells the
same events again, with the same ids. Operations neither wait for it nor know of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.database.engine import Engine
from holdfast.errors import EngineError, FencedOut, SinkDown
from holdfast.lease.grant import LeaseGrant
from holdfast.lease.handle import Lease
from holdfast.lease.terms import LeaseTerms
from holdfast.lineage import relay_terms as relay
from holdfast.lineage.passing import Pass, Progress, Sink
from holdfast.lineage.relay_terms import RelayTerms
from holdfast.recipes.elector import Elector, Term
from holdfast.recipes.elector_terms import ElectorStatus, ElectorTerms
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import StopEvent, check_callable, wait_event
from holdfast.runtime.log import logger

log = logger("holdfast.relay")

_TROUBLE = (SinkDown, EngineError, FencedOut)
"""What passes, or ends the term: when it is fenced out, that is about to end."""


class Relay:
    """``run()`` in every replica; ``step()`` for one pass, from a test or a timer."""

    def __init__(self, engine: Engine, terms: RelayTerms, sink: Sink) -> None:
        check_callable(getattr(sink, "publish", None), "sink.publish")  # type: ignore[arg-type]
        self._engine, self._terms, self._sink = engine, terms, sink
        third = terms.ttl / 3
        leading = ElectorTerms.check(terms.lease, ttl=terms.ttl, renew_every=third, retry_every=min(5.0, third))
        self._elector = Elector(engine, leading, None)
        self._known = Progress(terms.batch)

    def __repr__(self) -> str:
        return f"<Relay {self._terms.name!r}>"

    def run(self, *, signals: bool = False) -> None:
        """Stand by, or tell the sink what there is to tell, until ``stop()``. ``signals=True``: SIGTERM and SIGINT call
        that."""
        self._elector.run(self._work, signals=signals)

    def stop(self) -> None:
        """Let ``run`` return, for good, when the sink has answered; may be called from anywhere."""
        self._elector.stop()

    def status(self) -> ElectorStatus:
        """Who does it, as far as we know; asks nobody. How far it has come is in ``client.relays``."""
        return self._elector.status()

    def gauges(self) -> Iterable[tuple[str, float]]:
        """Asks nobody, so it goes on while the database or the sink is away."""
        behind = self._known.behind
        if behind is not None:
            yield "relay_lag_seconds", now() - behind
            yield "relay_lag_events", self._known.waiting

    def step(self) -> int:
        """Tell all that there is; how many events the sink took. NotAcquired while somebody else does it, SinkDown when
        it takes nothing at present."""
        terms = LeaseTerms.check(self._terms.lease, ttl=self._terms.ttl)
        with Lease(self._engine, terms, 0.0) as grant:
            course = self._pass(grant, StopEvent())
            try:
                while course.go():
                    pass
            except _TROUBLE as error:
                _tell_failure(error)
                raise
            return course.told

    def _work(self, term: Term) -> None:
        grant = term.grant_for("")
        assert grant is not None
        failures, self._known.behind = 0, now()
        telemetry.register(self)  # here: a fork of this process has none of what was made before
        try:
            while not term.stopping.is_set():
                try:
                    course = self._pass(grant, term.stopping)
                    while course.go() and not term.stopping.is_set():
                        pass
                    failures, wait = 0, self._terms.poll * jitter(0.75, 1.0)
                except _TROUBLE as error:
                    failures += 1
                    wait = relay.pause(failures, jitter(0.0, 1.0))
                    log.warning(
                        "%r: waits for %.1f s: %s",
                        self,
                        wait,
                        error,
                        extra={
                            "event": "relay.failed",
                            "relay": self._terms.name,
                            "seconds": wait,
                            "error": str(error),
                        },
                    )
                    _tell_failure(error)
                wait_event(term.stopping, wait)
        finally:
            self._known.behind = None

    def _pass(self, grant: LeaseGrant, stopping: StopEvent) -> Pass:
        return Pass(self._engine, self._terms, self._sink, self._known, grant, stopping)


def _tell_failure(error: Exception) -> None:
    telemetry.tell("relay.failed", reason="sink" if isinstance(error, SinkDown) else "database")
