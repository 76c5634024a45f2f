"""The pump of the asyncio flavour: on the loop of its client, where an interrupt may come at any instant."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import ReferenceType

from holdfast._wire.clock import now
from holdfast._wire.database import Database
from holdfast._wire.locking import background
from holdfast._wire.locking.bell import Bell
from holdfast._wire.locking.opening import LockWire
from holdfast._wire.locking.pump import LockPump, log
from holdfast.core.errors import EngineError, Unanswered
from holdfast.core.mend import mend
from holdfast.core.mux import Mux
from holdfast.core.tickets import Lost, Op, Send, Session, State, Ticket, Unheard, Wait

LOOP_CHECK = 1.0
"""Seconds between two looks whether a loop is still there."""
_PAST = Op("note")
"""Stands for what is under way in a session without the multiplexer."""


class AsyncPump(LockPump):
    """A key that nobody here has, and a session that is free: then there is nothing to decide, and it goes past the
    multiplexer, which is told when there is."""

    ended = False
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
        self._interrupted: list[Ticket] = []
        self._sessions: dict[Session, None] = {}
        """All that are being opened, or open."""
        self._opening: set[Session] = set()

    def set_alarm(self, when: float) -> None:
        """One timer for all who wait: nearly every wait is over long before."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self.alarm_at = None, when
        if when < math.inf:
            self._alarm = self.loop.call_later(when - now(), self._ring_alarm)

    def _ring_alarm(self) -> None:
        with self.whole():
            for ticket in [each for each, deadline in self.waiting.items() if deadline <= now()]:
                if ticket.state == "queued":
                    self.give_up(ticket)
                    self._settle(ticket)
                del self.waiting[ticket]
            self.set_alarm(min(self.waiting.values(), default=math.inf))

    def interrupted(self, ticket: Ticket | None = None) -> None:
        """Something was cut short, anywhere: it is put right, and nothing of ``ticket`` stays."""
        if ticket is not None:
            self._interrupted.append(ticket)
        self.loop.call_soon(self._mend)  # if we are interrupted in it again
        self._mend()

    def _mend(self) -> None:
        self._no_task = False
        if self._first is not None:
            self._first.ring()
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

    def _unheard(self, session: Session) -> None:
        self._mend()

    @contextmanager
    def whole(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self.interrupted()
            raise

    def begin(self, ticket: Ticket) -> bool:
        """Try it so; False when that cannot be."""
        mux, session, key = self.mux, self.fast, ticket.key
        if session is None or session.flying or key in mux.claims or len(session.held) >= mux.per_session:
            return False
        if mux.due is not None and len(mux.claims) >= mux.due:
            return False
        ticket.session = session
        mux.claims[key] = session.held[key] = ticket
        session.used = True
        self._solo(ticket, session, "try", "queued")
        return True

    def end(self, ticket: Ticket) -> bool:
        """Unlock it so; False when that cannot be."""
        session = ticket.session
        if session is None or session.flying or ticket.heirs or self.mux.claims.get(ticket.key) is not ticket:
            return False
        self._solo(ticket, session, "unlock", "released")
        return True

    def give_up(self, ticket: Ticket) -> None:
        if ticket.session is not None and ticket.session.solo is ticket:
            ticket.state = "gone"  # what it was granted is unlocked when the answer has come
        else:
            self.do(self.mux.give_up(ticket))

    def lost(self, session: Session, error: Exception) -> None:
        try:
            super().lost(session, error)
            if session.solo is not None:
                self._lose_solo(session.solo, session, error)
        except (KeyboardInterrupt, SystemExit):
            self.loop.call_soon(self.lost, session, error)
            self.interrupted()
            raise

    def _lose_solo(self, ticket: Ticket, session: Session, error: Exception) -> None:
        if ticket.state == "queued":
            session.solo = None
            self.do(self.mux.ask(ticket))  # once more, on another session
            return
        if ticket.state == "released":
            ticket.state, ticket.problem = "lost", error
        self._forget(ticket, session)
        session.solo = None

    def _open(self, session: Session) -> None:
        self._sessions[session] = None
        if session.wire is not None:  # it was interrupted when it arrived
            self.loop.call_soon(self._arrive, session, session.wire, None)
        elif session not in self._opening:
            super()._open(session)
            self._opening.add(session)

    def _arrive(self, session: Session, wire: LockWire | None, error: Exception | None) -> None:
        with self.whole():
            self._opening.discard(session)
            if wire is not None and session.wire not in (None, wire):  # a second one
                wire.close()
                return
            session.wire = wire
            if not session.opened:
                super()._arrive(session, wire, error)
            if error is not None or session.over:
                self._sessions.pop(session, None)

    def _close(self, session: Session) -> None:
        super()._close(session)
        self._sessions.pop(session, None)

    def _sweep(self) -> None:
        with self.whole():
            super()._sweep()
            for session in list(self._sessions):
                if session.wire is not None and session.wire.descriptor is None and not session.wire.idle:
                    self._readable(session)  # an interrupt may have come before it was ever begun

    def _solo(self, ticket: Ticket, session: Session, verb: str, state: State) -> None:
        """Interrupted anywhere, in here or in ``_readable``, it is gone on with as soon as the loop goes on."""
        wire = session.wire
        try:
            session.flying = [_PAST]
            session.solo = ticket
            ticket.state = state
            if wire.descriptor is None:
                self._told(session, ticket, wire.run(verb, ticket.key, 0.0))
            else:
                wire.begin(verb, ticket.key)
        except Unanswered as error:
            self.loop.call_soon(self.lost, session, error)
        except EngineError as error:
            self._told(session, ticket, error)
        except (KeyboardInterrupt, SystemExit):
            self.loop.call_soon(self._go_on, session, ticket, ticket.bell)
            raise

    def _readable(self, session: Session) -> None:
        ticket = bell = None
        try:
            ticket = session.solo
            if ticket is None:
                self._batch_readable(session)
                return
            bell = ticket.bell
            answer = session.wire.answer()
            if answer is True and ticket.heirs is None and not session.pending:
                if ticket.state == "queued":
                    ticket.state = "held"
                    session.solo = None
                    session.flying = []
                    bell.ring_at_once()
                    return
                if ticket.state == "released":
                    session.held.pop(ticket.key, None)
                    self.mux.claims.pop(ticket.key, None)
                    session.solo = None
                    session.flying = []
                    bell.ring_at_once()
                    return
            if answer is not None:
                self._told(session, ticket, answer)
        except EngineError as error:
            self.lost(session, error)
        except (KeyboardInterrupt, SystemExit):
            if ticket is None:
                self.interrupted()
            else:
                self.loop.call_soon(self._go_on, session, ticket, bell or ticket.bell)
            raise

    def _batch_readable(self, session: Session) -> None:
        self._no_task = True
        super()._readable(session)
        self._no_task = False
        bell, self._first = self._first, None
        if bell is not None:
            try:
                bell.ring_at_once()
            except (KeyboardInterrupt, SystemExit):
                self.loop.call_soon(bell.wake)
                raise

    def _go_on(self, session: Session, ticket: Ticket, bell: Bell) -> None:
        if session.solo is ticket:
            self._readable(session)
            self._mend()
            return
        if session.solo is None and _PAST in session.flying:
            session.flying = []
            self.do(self.mux.flush(session))
        if ticket.state != "queued":
            bell.wake()
        self._mend()

    def _told(self, session: Session, ticket: Ticket, answer: bool | Unheard | EngineError) -> None:
        self._conclude(session, ticket, answer)
        session.solo = None
        session.flying = []
        if session.pending:
            self.do(self.mux.flush(session))

    def _conclude(self, session: Session, ticket: Ticket, answer: bool | Unheard | EngineError) -> None:
        state = ticket.state
        if answer is True and state == "queued":
            ticket.state = "held"
            self._settle(ticket)
        elif state == "held":
            self._settle(ticket)
        elif isinstance(answer, Unheard):
            self.do(self.mux.unsure(ticket) if state == "queued" else self.mux.give_up(ticket))
        elif isinstance(answer, EngineError):
            ticket.state, ticket.problem = "failed", answer
            self._settle(ticket)
            self.do(self.mux.give_up(ticket))
        elif state == "released":
            self._forget(ticket, session)
        elif state == "gone":
            self.do(self.mux.give_up(ticket))
        else:
            ticket.contended = True
            if ticket.waits:
                self.do(self.mux.contended(ticket))
            else:
                ticket.state = "busy"
                self._forget(ticket, session)

    def _forget(self, ticket: Ticket, session: Session) -> None:
        session.held.pop(ticket.key, None)
        self.mux.claims.pop(ticket.key, None)
        if ticket.heirs is not None:
            self.do(self.mux.freed(ticket))
        self._settle(ticket)

    def _settle(self, ticket: Ticket) -> None:
        if ticket.bell is None:
            return
        if self._no_task:
            self._first, self._no_task = ticket.bell, False
        else:
            ticket.bell.ring()


def look_after(known: ReferenceType[AsyncPump]) -> None:
    """In another thread: a loop that is closed without a word would keep its locks for as long as the process lives."""
    pump = known()
    if pump is None or pump.ended:
        return
    if not pump.loop.is_closed():
        background.loop().call_later(LOOP_CHECK, look_after, known)
        return
    log.warning("the event loop of a client of %s was closed, and its locks with it", pump.database)
    error = Unanswered("its event loop was closed")
    for session in [*pump.mux.holds, *pump.mux.waits]:
        lost = [each for each in pump.mux.lost(session, error) if isinstance(each, Lost)]
        for action in lost:
            with suppress(RuntimeError):  # what was to be told on that loop
                pump._tell(action.ticket, error)
        if session.wire is not None:
            session.wire.hang_up()
