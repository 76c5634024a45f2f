"""The relay: publishes the events of the log to a sink, in the order of the log, at least once.

One replica runs it, under a lease. A pass reads the log after the cursor, batch by batch, sends the events to the sink,
and saves the cursor in a transaction that the lease protects: a relay that was superseded cannot save. When it dies
before it has saved, the next one sends the same events again, with the same ids. Operations do not wait for the relay
and do not know it.

Three things can go wrong with a sink, and each has its own answer:

| what happens                             | what the relay does                                                       |
|------------------------------------------|---------------------------------------------------------------------------|
| it is down: SinkDown, a connection error | waits and tries again; nothing is counted against the events              |
| it refuses an event, ``tries`` times     | parks the event and goes on; after some in a row it suspects the sink     |
| the process dies while an event is sent  | counts tries in the database before it sends, so the next one can park it |
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from holdfast.database.driver_errors import SQLSTATE
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.errors import EngineError, FencedOut, Refused, SinkDown
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.lease.handle_async import AsyncLease
from holdfast.lease.terms import LeaseTerms
from holdfast.lineage.relay_terms import SUSPICIOUS, RelayProgress, RelayTerms, describe, is_down, retry_delay
from holdfast.operations.events import TYPES, Event, derive, unreadable
from holdfast.recipes.elector_async import AsyncElector, AsyncTerm
from holdfast.recipes.elector_terms import ElectorStatus, ElectorTerms
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency_async import AsyncStopEvent, call_blocking, check_callable, wait_event
from holdfast.runtime.log import ERROR, WARNING, logger

log = logger("holdfast.relay")

_TEMPORARY = (SinkDown, EngineError, FencedOut)
"""Errors of a pass after which the relay tries again. After FencedOut the term is about to end anyway."""


class AsyncSink(Protocol):
    """Receives events. When ``publish`` returns, the sink has stored them. It may get the same events again. It has to
    limit its own time: the relay waits for it."""

    def publish(self, events: Sequence[Event], /) -> Awaitable[object] | object: ...


class AsyncRelayPass:
    """From the cursor to the end of the log, batch by batch, under one grant."""

    def __init__(
        self, engine: AsyncEngine, terms: RelayTerms, sink: AsyncSink, progress: RelayProgress, grant: AsyncLeaseGrant,
        stopping: AsyncStopEvent,
    ) -> None:  # fmt: skip
        self._engine, self._terms, self._sink, self._progress = engine, terms, sink, progress
        self._grant, self._stopping = grant, stopping
        self._cursor: Row | None = None
        self._lag = 0.0
        """Age of the first entry after the cursor. It may not be readable yet: an older transaction is still open."""
        self._tries: dict[str, int] = {}
        """By event: how often it was sent and not taken since the last save of the cursor, also by dead processes."""
        self._has_saved_taken = False
        """Whether this pass has saved ``last_taken``: once a pass is enough."""
        self.published = 0
        self._clear()

    def _clear(self) -> None:
        """Empty what the next ``_save`` writes."""
        self._ended: list[tuple[str, int]] = []
        """Key and attempt of operations whose end was published."""
        self._parked: list[list[Any]] = []
        self._unparked: list[str] = []
        self._taken = 0

    async def publish_batch(self) -> bool:
        """Publish the next batch. False when there was nothing to publish.

        SinkDown when the sink takes nothing at present, EngineError, or FencedOut when the lease has passed on.
        """
        progress = self._progress
        if self._cursor is None:
            await self._open()
        assert self._cursor is not None
        after = {"after_horizon": str(self._cursor["horizon"]), "after_place": self._cursor["place"]}
        asked_at, limit = now(), progress.batch
        try:
            rows = await self._engine.call("relay_read", {**after, "limit": limit})
        except EngineError:  # the batch may have been too large for the timeout
            progress.batch = max(1, limit // 2)
            raise
        if rows:
            batch = [(row, self._events(row)) for row in rows]
            progress.unpublished = sum(len(events) for _, events in batch)
            async with self._saved():
                await self._publish_rows(batch)
            progress.is_proven, self._lag = True, 0.0
        if len(rows) < limit and progress.caught_up_at is not None:  # the end of the log as it was when asked
            progress.caught_up_at, progress.unpublished = asked_at - self._lag, 0
        return bool(rows)

    async def _open(self) -> None:
        """Load the cursor and the tries of earlier processes, and publish parked events that are to be retried."""
        self._cursor = await self._call("relay_open", {})
        self._tries, self._lag = json.loads(self._cursor["tries"]), self._cursor["lag"]
        if self._progress.last_taken is None and self._cursor["taken"] is not None:
            self._progress.last_taken = Event.of(json.loads(self._cursor["taken"]))
        if self._progress.caught_up_at is not None:
            self._progress.caught_up_at = now() - self._lag
        parameters = {"name": self._terms.name, "only_again": True, "limit": self._terms.batch}
        for row in await self._engine.call("relay_parked", parameters):
            async with self._saved():
                event = Event.of(json.loads(row["event"]))
                if event.type in TYPES:
                    await self._publish_event(event, was_parked=True)
                else:  # stands for a row that could not be parsed: nothing to publish
                    self._park(event, row["problem"], 1)

    def _events(self, row: Row) -> list[Event]:
        """The events of a row of the log. A row that cannot be parsed is parked, so that it does not block the log."""
        try:
            return derive(row)
        except Exception as error:
            self._park(unreadable(row), describe(error), 1)
            return []

    @asynccontextmanager
    async def _saved(self) -> AsyncIterator[None]:
        """Save what was published in the block, also when the sink went down in the middle. Adapts the batch size."""
        progress = self._progress
        try:
            yield
        except SinkDown as error:
            progress.batch = max(1, progress.batch // 2)
            await self._save(str(error)[:1000])
            raise
        progress.batch = min(self._terms.batch, progress.batch * 2)
        await self._save(None)

    async def _publish_rows(self, batch: Sequence[tuple[Row, list[Event]]]) -> None:
        """Send all events in one call. If an event is refused, or may have killed an earlier process, one by one."""
        all_events = [event for _, events in batch for event in events]
        is_done = not all_events or (not self._tries and await self._publish_together(all_events))
        for row, events in batch:
            if not is_done:
                for event in events:
                    await self._publish_event(event)
            self._cursor = row
            self._ended += [(event.key, event.attempt) for event in events if event.type in ("COMPLETE", "FAIL")]
            if not is_done and not self._progress.is_proven:
                await self._save(None)
        self._tries.clear()

    async def _publish_together(self, events: Sequence[Event]) -> bool:
        try:
            await self._count_try(events[0].id)
            return await self._send(events) is None
        finally:
            self._tries.clear()

    async def _publish_event(self, event: Event, *, was_parked: bool = False) -> None:
        """Send one event until the sink takes it, at most ``tries`` times; then park it."""
        limit = self._terms.tries
        problem = f"it was sent {limit} times, and each time the relay died before the sink answered"
        while await self._count_try(event.id) <= limit:
            try:
                refusal = await self._send([event])
            except SinkDown:
                self._tries[event.id] -= 1  # this is not the fault of the event
                raise
            if refusal is None:
                del self._tries[event.id]
                if was_parked:
                    self._unparked.append(event.id)
                return
            problem, tries = refusal, self._tries[event.id]
            if tries == limit:
                break
            if await wait_event(self._stopping, retry_delay(tries, jitter(0.0, 1.0))):
                raise SinkDown(f"stopped while the sink refused an event: {problem}")
        del self._tries[event.id]
        if not was_parked:  # a parked event was refused while others were taken: the sink is not to blame
            await self._check_sink(problem)
        self._park(event, problem, limit)

    async def _count_try(self, id: str) -> int:
        """The number of this try to send the event.

        It is saved before the event is sent, unless this process has got through a batch and the event was not refused
        before: if the process dies of it, the next one knows which event it was.
        """
        self._tries[id] = self._tries.get(id, 0) + 1
        if not self._progress.is_proven or self._tries[id] > 1:
            await self._call("relay_begin", {"tries": json.dumps(self._tries)})
        return self._tries[id]

    async def _check_sink(self, problem: str) -> None:
        """After several refused events: SinkDown if the sink does not even take again what it took before."""
        self._progress.refused_in_a_row += 1
        refused, taken = self._progress.refused_in_a_row, self._progress.last_taken
        if refused > SUSPICIOUS and (taken is None or await self._send([taken]) is not None):
            raise SinkDown(f"the sink has refused {refused} events in a row: {problem}")

    def _park(self, event: Event, problem: str, tries: int) -> None:
        log.event(
            "relay.parked", ERROR, "relay %(relay)r: %(type)s %(id)s of %(operation)r is parked: %(problem)s",
            relay=self._terms.name, type=event.type, id=event.id, operation=event.label, problem=problem,
        )  # fmt: skip
        self._parked.append([event.id, event.key, json.dumps(event.as_dict()), problem, tries])

    async def _send(self, events: Sequence[Event]) -> str | None:
        """None when the sink took the events, else why it refused them. SinkDown when it is down."""
        try:
            await call_blocking(self._sink.publish, events)
        except Exception as error:
            reason = describe(error)
            if is_down(error):
                raise SinkDown(reason) from error
            return reason
        self._progress.refused_in_a_row, self._progress.last_taken = 0, events[-1]
        self._taken += len(events)
        return None

    async def _save(self, problem: str | None) -> None:
        """Save the cursor and everything since the last save in one transaction, which the lease protects."""
        assert self._cursor is not None
        progress = self._progress
        taken = progress.last_taken if self._taken and not self._has_saved_taken else None
        row = await self._call("relay_move", {
            "fence": self._grant.fence, "horizon": str(self._cursor["horizon"]), "place": self._cursor["place"],
            "told": self._taken, "ended": json.dumps(self._ended), "parked": json.dumps(self._parked),
            "freed": json.dumps(self._unparked), "problem": problem,
            "taken": None if taken is None else json.dumps(taken.as_dict()),
            "tries": json.dumps({id: tries for id, tries in self._tries.items() if tries}),
        })  # fmt: skip
        self._has_saved_taken = self._has_saved_taken or taken is not None
        self.published += self._taken
        progress.unpublished = max(0, progress.unpublished - self._taken - len(self._parked))
        if telemetry.listeners:
            if self._taken:
                telemetry.emit("relay.published", events=self._taken)
            for _ in self._parked:
                telemetry.emit("relay.parked")
        self._clear()
        if row["state"] == "gone":
            raise SinkDown(
                f"relay {self._terms.name!r} was removed, or its database set back, in the meantime: "
                "it reads its cursor again"
            )

    async def _call(self, statement: str, parameters: Row) -> Row:
        """The row that a statement under the lease returns. FencedOut when the lease has passed on."""
        lease = {"name": self._terms.name, "lease": self._grant.name, "token": self._grant.token}
        try:
            [row] = await self._engine.call(statement, {**parameters, **lease})
        except Refused as error:
            if error.sqlstate != SQLSTATE:
                raise
            raise FencedOut.from_lease(self._grant.name) from error
        if row["state"] == "fenced":
            raise FencedOut.from_lease(self._grant.name)
        return row


class AsyncRelay:
    """``run()`` in every replica; ``step()`` for one pass, from a test or a timer."""

    def __init__(self, engine: AsyncEngine, terms: RelayTerms, sink: AsyncSink) -> None:
        check_callable(getattr(sink, "publish", None), "sink.publish")  # type: ignore[arg-type]
        self._engine, self._terms, self._sink = engine, terms, sink
        third = terms.ttl / 3
        election = ElectorTerms.check(
            terms.lease, ttl=terms.ttl, renew_every=third, retry_every=min(5.0, third), kind="relay"
        )
        self._elector = AsyncElector(engine, election, None)
        self._progress = RelayProgress(terms.batch)

    def __repr__(self) -> str:
        return f"<Relay {self._terms.name!r}>"

    async def run(self, *, signals: bool = False) -> None:
        """Publish while leading, stand by otherwise, until ``stop()``. ``signals=True``: SIGTERM and SIGINT call it."""
        await self._elector.run(self._work, signals=signals)

    def stop(self) -> None:
        """Let ``run`` return for good, once the sink has answered. May be called from any thread or signal handler."""
        self._elector.stop()

    def status(self) -> ElectorStatus:
        """Who runs the relay, as far as this process knows; does not ask the database. For its progress see
        ``client.relays``."""
        return self._elector.status()

    def _gauges(self) -> Iterable[tuple[str, float]]:
        """The lag, from memory: also while the database or the sink does not answer. Nothing while standing by."""
        caught_up_at = self._progress.caught_up_at
        if caught_up_at is not None:
            yield "relay_lag_seconds", now() - caught_up_at
            yield "relay_lag_events", self._progress.unpublished

    async def step(self) -> int:
        """Publish everything in the log. Returns how many events the sink took.

        NotAcquired while another process runs the relay, SinkDown when the sink takes nothing at present.
        """
        terms = LeaseTerms.check(self._terms.lease, ttl=self._terms.ttl, kind="relay")
        async with AsyncLease(self._engine, terms, 0.0) as grant:
            relay_pass = self._new_pass(grant, AsyncStopEvent())
            try:
                while await relay_pass.publish_batch():
                    pass
            except _TEMPORARY as error:
                _report_failure(error)
                raise
            return relay_pass.published

    async def _work(self, term: AsyncTerm) -> None:
        """The work of the leader: passes with pauses between them, longer ones after failures."""
        grant = term.grant_for("")
        assert grant is not None
        failures, self._progress.caught_up_at = 0, now()
        telemetry.register(self)  # not in __init__: a forked child starts without registrations
        try:
            while not term.stopping.is_set():
                try:
                    relay_pass = self._new_pass(grant, term.stopping)
                    while await relay_pass.publish_batch() and not term.stopping.is_set():
                        pass
                    failures, delay = 0, self._terms.poll * jitter(0.75, 1.0)
                except _TEMPORARY as error:
                    failures += 1
                    delay = retry_delay(failures, jitter(0.0, 1.0))
                    log.event(
                        "relay.failed", WARNING, "relay %(relay)r tries again in %(seconds).1f s: %(error)s",
                        relay=self._terms.name, seconds=delay, error=str(error),
                    )  # fmt: skip
                    _report_failure(error)
                await wait_event(term.stopping, delay)
        finally:
            self._progress.caught_up_at = None

    def _new_pass(self, grant: AsyncLeaseGrant, stopping: AsyncStopEvent) -> AsyncRelayPass:
        return AsyncRelayPass(self._engine, self._terms, self._sink, self._progress, grant, stopping)


def _report_failure(error: Exception) -> None:
    telemetry.emit("relay.failed", reason="sink" if isinstance(error, SinkDown) else "database")
