"""One pass of a relay: from the cursor on, batch by batch, under one grant; what its sink refuses is parked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.database import driver_errors as drivers
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.errors import EngineError, FencedOut, Refused, SinkDown
from holdfast.lease.grant_async import AsyncLeaseGrant
from holdfast.lineage import relay_terms as relay
from holdfast.lineage.relay_terms import RelayTerms
from holdfast.operations.events import TYPES, Event, derive, unreadable
from holdfast.runtime import telemetry
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency_async import AsyncStopEvent, call_blocking, wait_event
from holdfast.runtime.log import logger

log = logger("holdfast.relay")

Ends = list[tuple[str, int]]


class AsyncSink(Protocol):
    """Whatever takes events. It has them in safety when it returns, and may be given them again. It sees to it itself
    that it does not take for ever."""

    def publish(self, events: Sequence[Event], /) -> Awaitable[object] | object: ...


@dataclass(slots=True)
class Progress:
    """What a relay has learnt in this process, from pass to pass."""

    batch: int
    """As many as the sink seems to be able to take at a time: one that fails now and then would never get through a
    large batch, if it takes one event after the other."""
    refused: int = 0
    """Events in a row that the sink did not take, each after all its tries."""
    taken: Event | None = None
    """The last one that the sink has taken, be it from whoever told it before: one that is well takes it again."""
    sure: bool = False
    """Whether it has got through a batch: one that is begun before may be what those before have died of."""
    behind: float | None = None
    """When it had last told all that there was; None while somebody else does it."""
    waiting: int = 0
    """Events that were read, and not told."""


class AsyncPass:
    """From the cursor on, batch by batch, under one grant."""

    def __init__(
        self, engine: AsyncEngine, terms: RelayTerms, sink: AsyncSink, known: Progress, grant: AsyncLeaseGrant,
        stopping: AsyncStopEvent,
    ) -> None:  # fmt: skip
        self._engine, self._terms, self._sink, self._known = engine, terms, sink, known
        self._grant, self._stopping = grant, stopping
        self._place: Row | None = None
        self._unread = 0.0
        """How old the first is that is there and cannot be read yet, as far as that is known."""
        self._tries: dict[str, int] = {}
        """By event: how often it was tried and not taken, since the cursor was moved last; whoever died meanwhile."""
        self._kept = False
        """Whether one that was taken is written down: one a pass will do."""
        self.told = 0
        self._clear()

    def _clear(self) -> None:
        """All that is written down with the next move."""
        self._ended: Ends = []
        self._parked: list[list[Any]] = []
        self._freed: list[str] = []
        self._took = 0

    async def go(self) -> bool:
        """One batch; False when there was nothing more to tell."""
        if self._place is None:
            self._place = await self._call("relay_open", {})
            self._tries, self._unread = json.loads(self._place["tries"]), self._place["lag"]
            if self._known.taken is None and self._place["taken"] is not None:
                self._known.taken = Event.of(json.loads(self._place["taken"]))
            if self._known.behind is not None:
                self._known.behind = now() - self._unread
            await self._tell_again()
        after = {"after_horizon": str(self._place["horizon"]), "after_place": self._place["place"]}
        asked_at, most = now(), self._known.batch
        try:
            rows = await self._engine.call("relay_read", {**after, "most": most})
        except EngineError:  # it may have been too much for the time there is
            self._known.batch = max(1, most // 2)
            raise
        if rows:
            batch = [(row, self._events(row)) for row in rows]
            self._known.waiting = sum(len(events) for _, events in batch)
            async with self._noted():
                await self._tell_all(batch)
            self._known.sure, self._unread = True, 0.0
        if len(rows) < most and self._known.behind is not None:  # that was all there was, be there more by now
            self._known.behind, self._known.waiting = asked_at - self._unread, 0
        return bool(rows)

    def _events(self, row: Row) -> list[Event]:
        """What cannot be read is parked by itself: whatever is in the log, others are told what comes after it."""
        try:
            return derive(row)
        except Exception as error:
            self._park(unreadable(row), relay.words(error), 1)
            return []

    async def _tell_again(self) -> None:
        """What was parked, and somebody wants told again."""
        asked = {"name": self._terms.name, "only_again": True, "most": self._terms.batch}
        for row in await self._engine.call("relay_parked", asked):
            async with self._noted():
                event = Event.of(json.loads(row["event"]))
                if event.type in TYPES:
                    await self._tell(event, parked=True)
                else:
                    self._park(event, row["problem"], 1)

    @asynccontextmanager
    async def _noted(self) -> AsyncIterator[None]:
        """Whatever is told in the block is written down, as far as it came."""
        try:
            yield
        except SinkDown as error:
            self._known.batch = max(1, self._known.batch // 2)
            await self._move(str(error)[:1000])
            raise
        self._known.batch = min(self._terms.batch, self._known.batch * 2)
        await self._move(None)

    async def _tell_all(self, batch: Sequence[tuple[Row, list[Event]]]) -> None:
        """All at once; when something in it is refused, or may have been the end of whoever told it, one by one."""
        events = [event for _, each in batch for event in each]
        whole = not events or (not self._tries and await self._told_whole(events))
        for row, each in batch:
            if not whole:
                for event in each:
                    await self._tell(event)
            self._place = row
            self._ended += [(event.key, event.attempt) for event in each if event.type in ("COMPLETE", "FAIL")]
            if not whole and not self._known.sure:
                await self._move(None)
        self._tries.clear()

    async def _told_whole(self, events: Sequence[Event]) -> bool:
        try:
            await self._begin(events[0].id)
            return await self._take(events) is None
        finally:
            self._tries.clear()

    async def _begin(self, id: str) -> int:
        """The how manieth time it is tried. Written down before the sink is asked, until that has gone well once, and
        when it was refused before: those who come after know what it was that whoever told it died of."""
        self._tries[id] = self._tries.get(id, 0) + 1
        if not self._known.sure or self._tries[id] > 1:
            await self._call("relay_begin", {"tries": json.dumps(self._tries)})
        return self._tries[id]

    async def _tell(self, event: Event, *, parked: bool = False) -> None:
        """One by itself, as often as it may take; what is refused all the same is parked."""
        most = self._terms.tries
        problem = f"it was begun {most} times, and whoever told it died"
        while await self._begin(event.id) <= most:
            try:
                said = await self._take([event])
            except SinkDown:
                self._tries[event.id] -= 1  # which says nothing about the event
                raise
            if said is None:
                del self._tries[event.id]
                if parked:
                    self._freed.append(event.id)
                return
            problem, number = said, self._tries[event.id]
            if number == most:
                break
            if await wait_event(self._stopping, relay.pause(number, jitter(0.0, 1.0))):
                raise SinkDown(f"stopped while it was refused: {problem}")
        del self._tries[event.id]
        if not parked:  # of which it is known that it was refused while others were taken
            await self._suspect(problem)
        self._park(event, problem, most)

    async def _suspect(self, problem: str) -> None:
        """So many in a row: is it they, or the sink? SinkDown when it would not take again what it has taken."""
        self._known.refused += 1
        refused, taken = self._known.refused, self._known.taken
        if refused > relay.SUSPICIOUS and (taken is None or await self._take([taken]) is not None):
            raise SinkDown(f"the sink has refused {refused} events in a row: {problem}")

    def _park(self, event: Event, problem: str, tries: int) -> None:
        log.error(
            "relay %r: %s %s of %r is parked: %s",
            self._terms.name,
            event.type,
            event.id,
            event.label,
            problem,
            extra={"event": "relay.parked", "relay": self._terms.name, "id": event.id, "operation": event.label},
        )
        self._parked.append([event.id, event.key, json.dumps(event.as_dict()), problem, tries])

    async def _take(self, events: Sequence[Event]) -> str | None:
        """None when the sink has them, else what it says of them; SinkDown when it is not there."""
        try:
            await call_blocking(self._sink.publish, events)
        except Exception as error:
            said = relay.words(error)
            if relay.is_down(error):
                raise SinkDown(said) from error
            return said
        self._known.refused, self._known.taken = 0, events[-1]
        self._took += len(events)
        return None

    async def _move(self, problem: str | None) -> None:
        assert self._place is not None
        taken = self._known.taken if self._took and not self._kept else None
        state = await self._call("relay_move", {
            "fence": self._grant.fence, "horizon": str(self._place["horizon"]), "place": self._place["place"],
            "told": self._took, "ended": json.dumps(self._ended), "parked": json.dumps(self._parked),
            "freed": json.dumps(self._freed), "problem": problem,
            "taken": None if taken is None else json.dumps(taken.as_dict()),
            "tries": json.dumps({id: tries for id, tries in self._tries.items() if tries}),
        })  # fmt: skip
        self._kept = self._kept or taken is not None
        self.told += self._took
        self._known.waiting = max(0, self._known.waiting - self._took - len(self._parked))
        if telemetry.listeners:
            if self._took:
                telemetry.tell("relay.published", events=self._took)
            for _ in self._parked:
                telemetry.tell("relay.parked")
        self._clear()
        if state["state"] == "gone":
            raise SinkDown(f"relay {self._terms.name!r} was removed meanwhile: it begins anew")

    async def _call(self, statement: str, parameters: Row) -> Row:
        about = {"name": self._terms.name, "lease": self._grant.name, "token": self._grant.token}
        try:
            [row] = await self._engine.call(statement, {**parameters, **about})
        except Refused as error:
            if error.sqlstate != drivers.SQLSTATE:
                raise
            raise FencedOut.from_lease(self._grant.name) from error
        if row["state"] == "fenced":
            raise FencedOut.from_lease(self._grant.name)
        return row
