"""A pump on the loop of its client, where an interrupt may come at any instant: what was cut short is put right.

It also keeps the time of all who wait, and wakes them.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.database.url import Database
from holdfast.lock.bell import Bell, ring, ring_at_once, wake
from holdfast.lock.mend import mend
from holdfast.lock.mux import Mux
from holdfast.lock.opening import LockWire
from holdfast.lock.pump import LockPump
from holdfast.lock.tickets import Send, Session, Ticket, Wait
from holdfast.runtime.clock import now

AHEAD = 1.2
"""Seconds for which the ends of waits are known beforehand: at least two looks come in that time."""


in_use: set[MendingPump] = set()
"""Those that have sessions. Where no reader in a loop knows them, the garbage collector would decide who may go in."""


class MendingPump(LockPump):
    _no_task = False
    """The first whose answer has come may run at once: when all is done, as it may raise what ends the loop."""
    _first: Bell | None = None
    _alarm: asyncio.TimerHandle | None = None
    alarm_at = math.inf

    def __init__(self, database: Database, mux: Mux, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(database, mux, loop)
        self.waiting: dict[Ticket, float] = {}
        """Until when."""
        self.leaving: set[Ticket] = set()
        """Whose release goes through the multiplexer."""
        self.nothing: Bell = asyncio.Future(loop=loop)
        """Rung already, for whoever need not wait: quicker than ``NOTHING``, as no frame is run for it."""
        self.nothing.set_result(None)
        self._interrupted: list[Ticket] = []
        self._sessions: dict[Session, None] = {}
        """All that are being opened, or open."""
        self._opening: set[Session] = set()
        self._brought: dict[Session, tuple[LockWire | None, Exception | None]] = {}
        """What has not arrived yet: an interrupt may come before that is begun."""

    @abstractmethod
    def give_up(self, ticket: Ticket) -> None:
        """Nobody waits for it any more."""

    def set_alarm(self, when: float) -> None:
        """One timer for all who wait, and none as long as that is far away and somebody looks again before: nearly
        every wait is over by then, and a loop that has timers takes longer for each of its rounds."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self.alarm_at, soon = None, when, now() + AHEAD
        if self.sweep_at < soon < when:
            self.alarm_at = soon
        elif when < math.inf:
            self._alarm = self.loop.call_later(when - now(), self._ring_alarm)

    def _ring_alarm(self) -> None:
        with self.whole():
            for ticket in [each for each, deadline in self.waiting.items() if deadline <= now()]:
                if ticket.state == "queued":
                    self.give_up(ticket)
                    self._settle(ticket)
                self.waiting.pop(ticket, None)
            self.set_alarm(min(self.waiting.values(), default=math.inf))

    def _sweep_in(self, seconds: float) -> None:
        """Nothing to do: ``look`` is called from another thread, where no interrupt comes, again and again."""

    @property
    def is_due(self) -> bool:
        """From any thread."""
        return self.sweep_at < now() + self.every / 2

    def look(self) -> None:
        if self.is_due:  # and was not looked at meanwhile, if the loop was held up
            self._sweep()

    def interrupted(self, ticket: Ticket | None = None) -> None:
        """Something was cut short, anywhere: it is put right, and nothing of ``ticket`` stays."""
        if ticket is not None:
            self._interrupted.append(ticket)
        self.loop.call_soon(self._mend)  # if we are interrupted in it again
        self._mend()

    def _mend(self) -> None:
        self._no_task = False
        if self._first is not None:
            ring(self._first)
        left = self.mux.told
        if left and isinstance(left[0], Send | Wait) and not left[0].session.wire.idle:  # it has been said
            del left[0]
        self.do(left)
        ours = [each for each in self._sessions if each.solo is None or each.over]
        idle = {each for each in ours if each.wire is not None and each.wire.idle}
        waiting = [each for each in self.waiting if each.session is None or each.session.solo is not each]
        self.do(mend(self.mux, ours, idle, waiting, self.leaving))
        for ticket in self._interrupted:
            self.give_up(ticket)
        self._interrupted.clear()
        self.set_alarm(min(self.waiting.values(), default=math.inf))
        self._sweep_later()
        for session in ours:
            if session.wire is not None and not session.over and not session.wire.idle:
                self.loop.call_soon(self._readable, session)

    def _flying(self, session: Session) -> object:
        return (session.solo and session.solo.bell) or super()._flying(session)

    def _unheard(self, session: Session) -> None:
        self._mend()

    @contextmanager
    def whole(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self.interrupted()
            raise

    def _open(self, session: Session) -> None:
        self._sessions[session] = None
        in_use.add(self)
        if session.wire is not None:  # it was interrupted when it arrived
            self.loop.call_soon(self._arrive, session, session.wire, None)
        elif session not in self._opening:
            super()._open(session)
            self._opening.add(session)

    def _bring(self, session: Session, wire: LockWire | None, error: Exception | None) -> None:
        self._brought[session] = (wire, error)
        super()._bring(session, wire, error)

    def _arrive(self, session: Session, wire: LockWire | None, error: Exception | None) -> None:
        with self.whole():
            self._opening.discard(session)
            if wire is not None and session.wire not in (None, wire):  # a second one
                wire.close()
            else:
                session.wire = wire
                if not session.opened:
                    super()._arrive(session, wire, error)
                if error is not None or session.over:
                    self._forget_session(session)
            self._brought.pop(session, None)

    def _close(self, session: Session) -> None:
        super()._close(session)
        self._forget_session(session)

    def _forget_session(self, session: Session) -> None:
        self._sessions.pop(session, None)
        if not self._sessions:
            in_use.discard(self)

    def _sweep(self) -> None:
        with self.whole():
            super()._sweep()
            for session, brought in list(self._brought.items()):
                self._arrive(session, *brought)
            if self.waiting:
                self.do(self.mux.look_again(list(self.waiting)))
                self._sweep_later()
            self.set_alarm(min(self.waiting.values(), default=math.inf))
            for session in list(self._sessions):
                if session.wire is not None and session.wire.descriptor is None and not session.wire.idle:
                    self._readable(session)  # an interrupt may have come before it was ever begun

    def _batch_readable(self, session: Session) -> None:
        self._no_task = True
        super()._readable(session)
        self._no_task = False
        bell = self._first
        if bell is not None:
            try:
                ring_at_once(bell)
            except (KeyboardInterrupt, SystemExit):
                self.loop.call_soon(wake, bell)
                raise
            self._first = None

    def _settle(self, ticket: Ticket) -> None:
        if ticket.bell is not None:
            if self._no_task:
                self._first, self._no_task = ticket.bell, False
            else:
                ring(ticket.bell)
        self.waiting.pop(ticket, None)
        self.leaving.discard(ticket)
