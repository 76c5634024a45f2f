"""The locks of one client on an event loop: asks the multiplexer, waits for what becomes of it."""

from __future__ import annotations

import asyncio
import os
from asyncio import Future, current_task, get_running_loop
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from weakref import ReferenceType, ref

from holdfast.database.url import Database
from holdfast.errors import EngineError, Unanswered
from holdfast.lock import background
from holdfast.lock.asyncio_mending import in_use
from holdfast.lock.asyncio_pump import AsyncPump
from holdfast.lock.awaiting import awaits
from holdfast.lock.bell import Bell
from holdfast.lock.mux import Mux
from holdfast.lock.pump import CALL_TIMEOUT, log
from holdfast.lock.tickets import Key, Lost, State, Ticket
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import AsyncOwner


def owner() -> object:
    """Who is asking: the task itself, whatever context it shares with others. Known weakly, as a lock that is held
    knows it: compared by ``==``, and one that is gone is equal to nobody. Nobody, where no loop runs: a task that was
    forgotten is ended by the garbage collector, in whatever thread."""
    task = current_task() if asyncio._get_running_loop() is not None else None
    return object() if task is None else ref(task)


class _Nothing:
    """To be awaited where there is nothing to wait for."""

    def __await__(self) -> Generator[None]:
        yield from ()


NOTHING = _Nothing()


class AsyncLocks:
    def __init__(
        self, database: Database, client: AsyncOwner, usable: Callable[[], None], *, kept: int, extra: int
    ) -> None:
        """``usable`` raises once the client is closed."""
        self.database, self._client = database, client
        self.namespaces: dict[str, bytes] = {}
        self._limits = (kept, extra)
        self._pid = os.getpid()
        self._usable = usable
        self._pump: AsyncPump | None = None

    def acquire(self, ticket: Ticket, timeout: float) -> Awaitable[State | None]:
        """What became of it is in the ticket, once the answer has been awaited. Not in a coroutine of its own: each of
        them is run through twice more. Whoever is cut short while it awaits says ``abandon``."""
        loop = get_running_loop()
        if loop is not self._client.loop:
            self._client.check()
        ticket.owner = object() if (task := current_task(loop)) is None else ref(task)
        pump = self._pump or self._start()
        if ticket.key not in pump.noted:
            pump.know(ticket)
        bell: Bell = Future()
        ticket.bell = bell
        try:
            if not pump.begin(ticket):
                pump.do(pump.mux.ask(ticket))
            if ticket.state == "queued":
                pump.waiting[ticket] = ticket.deadline = deadline = now() + timeout
                if deadline < pump.alarm_at:
                    pump.set_alarm(deadline)
            return bell
        except (KeyboardInterrupt, SystemExit):
            pump.waiting.pop(ticket, None)
            pump.interrupted(ticket)
            raise
        except BaseException:
            self.abandon(ticket)
            raise

    def release(self, ticket: Ticket) -> Awaitable[object]:
        """Of a ticket that was held: it is "released" once this has been awaited, if it was still ours. Cancelled or
        not, it is given back; on the loop that it belongs to."""
        pump = self._pump
        if pump is None:
            return NOTHING
        if pump.loop is not get_running_loop():
            return self._release_there(ticket, pump.loop)
        mux = pump.mux
        bell: Bell
        try:
            if ticket.claim is None and ticket.heirs is None:
                ticket.bell = bell = Future()
                if pump.end(ticket):
                    return bell
            elif (heir := mux.hand_on(ticket)) is not None:
                if not heir.bell.done():
                    heir.bell.set_result(None)
                pump.waiting.pop(heir, None)
                return pump.nothing
            ticket.bell = None
            pump.leaving.add(ticket)
            pump.do(mux.release(ticket))
            if ticket.state == "held" and mux.is_leaving(ticket):  # else it was handed on here, or is gone
                ticket.bell = bell = Future()
                return bell
            return pump.nothing
        except (KeyboardInterrupt, SystemExit):
            pump.interrupted(ticket)
            raise

    async def _release_there(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Its session belongs to another loop: nothing can be said in it where that does not run."""
        if loop.is_closed():
            return
        if not loop.is_running():
            raise RuntimeError(
                f"lock {ticket.name!r} belongs to {loop!r}, which does not run: it is released when it does"
            )

        async def release() -> None:
            if ticket.state == "held":
                await self.release(ticket)

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(release(), loop))

    def abandon(self, ticket: Ticket) -> None:
        """Unlock it, whatever has become of it; nobody waits for that."""
        pump = self._pump
        if pump is None:
            return
        here = asyncio._get_running_loop()
        if here is not pump.loop and (here is not None or pump.loop.is_running()):  # in another thread
            with suppress(RuntimeError):  # it is closed, and its sessions will be
                pump.loop.call_soon_threadsafe(self.abandon, ticket)
            return
        pump.waiting.pop(ticket, None)
        with pump.whole():
            pump.give_up(ticket)

    async def close(self, error: EngineError) -> None:
        pump, self._pump = self._pump, None
        if pump is not None and self._pid == os.getpid():
            pump.ended = True
            pump.close(error)

    @property
    def names(self) -> dict[Key, str]:
        """Of what was locked here, by key: in the database they are a moment later."""
        return {} if self._pump is None else self._pump.noted.copy()

    def notice_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._pump = os.getpid(), None

    def _start(self) -> AsyncPump:
        self._usable()
        kept, extra = self._limits
        mux = Mux(kept=kept, extra=extra, lines=self.database.dialect == "postgres", alone=True, awaits=awaits)
        self._pump = pump = AsyncPump(self.database, mux, get_running_loop())
        background.loop().call_soon_threadsafe(_look_after, ref(pump))
        return pump


def _look_after(known: ReferenceType[AsyncPump]) -> None:
    """In another thread, where no interrupt comes: has it look after its sessions and its time now and then, and sees
    whether its loop is still there. One that is closed without a word would keep its locks as long as the process."""
    pump = known()
    if pump is None or pump.ended:
        return
    if not pump.loop.is_closed():
        if pump.is_due and pump.loop.is_running():
            with suppress(RuntimeError):  # closed this very moment
                pump.loop.call_soon_threadsafe(pump.look)
        background.loop().call_later(pump.every, _look_after, known)
        return
    log.warning(
        "the event loop of a client of %s was closed, and its locks with it",
        pump.database,
        extra={"event": "lock.loop_closed", "database": str(pump.database)},
    )
    error = Unanswered("its event loop was closed")
    for session in [*pump.mux.holds, *pump.mux.waits]:
        lost = [each for each in pump.mux.lost(session, error) if isinstance(each, Lost)]
        for action in lost:
            with suppress(RuntimeError):  # what was to be told on that loop
                pump._tell(action.ticket, error)
        if session.wire is not None:
            session.wire.hang_up()
    in_use.discard(pump)


__all__ = ["CALL_TIMEOUT", "AsyncLocks", "owner"]
