"""Carries out what the multiplexer decides, on an event loop: opens sessions, sends, listens, keeps time.

The asyncio flavour has one on its own loop. The blocking flavour has one on the loop of a thread, for whatever does not
go straight from the caller's thread to a free session (see ``locks``).
"""

from __future__ import annotations

import asyncio
import json
import math
from abc import ABC, abstractmethod
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.database.socket_ready import is_readable
from holdfast.database.url import Database
from holdfast.errors import EngineError, Unanswered
from holdfast.lock import opening
from holdfast.lock.mux import Mux
from holdfast.lock.opening import LockWire
from holdfast.lock.tickets import Action, Close, Lost, Op, Open, Send, Session, Settle, Ticket, Unheard, Wait
from holdfast.runtime.clock import now
from holdfast.runtime.log import logger

log = logger("holdfast.lock")

CALL_TIMEOUT = 10.0
"""Seconds for what the server answers at once, if it answers at all."""
SWEEP = 0.6
"""Seconds between two looks at what has become idle, or stuck."""
REMEMBERED = 10_000


class LockPump(ABC):
    def __init__(self, database: Database, mux: Mux, loop: asyncio.AbstractEventLoop) -> None:
        self.database, self.mux, self.loop = database, mux, loop
        self.names: dict[Any, str] = {}
        """Keys whose names have not been written down."""
        self.noted: dict[Any, str] = {}
        """What was locked here, by key."""
        self.fast: Session | None = None
        """Where a key may be tried past the multiplexer."""
        self._under_way: list[tuple[object, int]] = []
        self.sweep_at = math.inf
        """When the next look is due; infinity: there is none to come."""
        self._timers: WeakKeyDictionary[Session, asyncio.TimerHandle] = WeakKeyDictionary()

    def do(self, actions: list[Action]) -> None:
        """Whatever is done is taken away, so that it is known what is left when this is cut short."""
        while actions:
            action = actions[0]
            if isinstance(action, Settle):
                self._settle(action.ticket)
            elif isinstance(action, Send):
                self._send(action.session, action.ops)
            else:
                self._seldom(action)
            del actions[0]

    def lost(self, session: Session, error: Exception) -> None:
        if not session.over:
            log.warning(
                "a session for locks on %s is gone: %s",
                self.database,
                error,
                extra={"event": "lock.session_lost", "database": str(self.database), "error": str(error)},
            )
            self.do(self.mux.lost(session, error))

    def close(self, error: Exception) -> None:
        self.do(self.mux.close(error))

    def know(self, ticket: Ticket) -> None:
        """The name is to be written down, but not now. The numbers of a namespace speak for themselves."""
        if len(self.noted) > REMEMBERED:
            self.noted.clear()
            self.names.clear()
        self.noted[ticket.key] = ticket.name
        if len(ticket.key) == 1:
            self.names[ticket.key] = ticket.name

    def publish(self) -> None:
        self.fast = next(
            (each for each in self.mux.holds if each.opened and len(each.held) < self.mux.per_session), None
        )

    def flush_names(self) -> None:
        """Of what is held or waited for right now: only that is ever listed. Whoever locks every order once, for an
        instant, would have every order written down."""
        if self.names and any(session.opened for session in self.mux.holds):
            found = [(key, name) for key, name in list(self.names.items()) if key in self.mux.claims]
            for key, _ in found:
                self.names.pop(key, None)
            if found:
                self.do(self.mux.note(json.dumps([[int(key[0]), name] for key, name in found])))

    @abstractmethod
    def _settle(self, ticket: Ticket) -> None:
        """Tell whoever waits that it has been decided."""

    def _seldom(self, action: Action) -> None:
        if isinstance(action, Open):
            self._open(action.session)
        elif isinstance(action, Wait):
            self._stand(action)
        elif isinstance(action, Close):
            self._close(action.session)
        elif isinstance(action, Lost):
            self._tell(action.ticket, action.error)

    def _send(self, session: Session, ops: list[Op]) -> None:
        try:
            session.wire.send(ops)
        except EngineError as error:
            self.loop.call_soon(self.lost, session, error)
            return
        if session.wire.descriptor is None:
            self.loop.call_soon(self._readable, session)

    def _stand(self, action: Wait) -> None:
        try:
            action.session.wire.stand(action.key)
        except EngineError as error:
            self.loop.call_soon(self.lost, action.session, error)
            return
        if action.session.wire.descriptor is None:
            self._ask_later(action.session)

    def _readable(self, session: Session) -> None:
        if session.over:
            return
        wire = session.wire
        try:
            answers = wire.receive()
        except EngineError as error:
            self.lost(session, error)
            return
        if answers is None:
            self._go_on_hearing(session)
        elif isinstance(answers, Unheard):
            self._unheard(session)
        elif session.flying:
            self._answered(session, answers)
        else:
            if wire.descriptor is None:
                self._end_gone()  # what was won in a file that was removed is nobody's
            if not session.over:
                self.do(self.mux.waited(session, answers if isinstance(answers, EngineError) else None))

    def _go_on_hearing(self, session: Session) -> None:
        """More is to come."""
        if session.wire.descriptor is not None:
            if is_readable(session.wire.descriptor):
                self.loop.call_soon(self._readable, session)
        elif not session.flying and session.claim is not None:
            self._ask_later(session)

    def _ask_later(self, session: Session) -> None:
        """Where no descriptor tells."""
        if (timer := self._timers.pop(session, None)) is not None:
            timer.cancel()
        self._timers[session] = self.loop.call_later(session.wire.later, self._readable, session)

    def _answered(self, session: Session, answers: Any) -> None:
        if isinstance(answers, EngineError):
            log.debug("%s: %s", self.database, answers)
            self.do(self.mux.refused(session, answers))
        else:
            self.do(self.mux.answered(session, answers))

    def _unheard(self, session: Session) -> None:
        self.lost(session, Unanswered(f"an answer of {self.database} was lost"))

    def _open(self, session: Session) -> None:
        self._sweep_later()
        opening.in_a_thread(self.database, CALL_TIMEOUT, partial(self._bring, session))

    def _bring(self, session: Session, wire: LockWire | None, error: Exception | None) -> None:
        """From the thread that has connected."""
        self.loop.call_soon_threadsafe(self._arrive, session, wire, error)

    def _arrive(self, session: Session, wire: LockWire | None, error: Exception | None) -> None:
        if wire is None:
            self.do(self.mux.lost(session, error or Unanswered(f"{self.database} did not answer")))
            return
        session.wire = wire
        if session.over:
            wire.close()
            return
        self._watch(session)
        self.do(self.mux.opened(session))
        self.publish()

    def _watch(self, session: Session) -> None:
        """Hear its answers, and its end."""
        if session.wire.descriptor is not None:
            self.loop.add_reader(session.wire.descriptor, self._readable, session)

    def _close(self, session: Session) -> None:
        self.publish()
        if session.wire is not None:
            if session.wire.descriptor is not None and not self.loop.is_closed():
                self.loop.remove_reader(session.wire.descriptor)
            session.wire.close()

    def _tell(self, ticket: Ticket, error: Exception) -> None:
        if ticket.tell is not None:
            try:
                ticket.tell(error)
            except Exception:  # no thread to be had for it: the others are told all the same
                log.exception(
                    "the loss of lock %r could not be told",
                    ticket.name,
                    extra={"event": "lock.callback_failed", "lock": ticket.name},
                )

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        return SWEEP

    def _sweep_later(self) -> None:
        if self.sweep_at == math.inf:
            self._sweep_in(SWEEP)
            self.sweep_at = now() + SWEEP

    def _sweep_in(self, seconds: float) -> None:
        self.loop.call_later(seconds, self._sweep)

    def _sweep(self) -> None:
        self.sweep_at = math.inf
        try:
            self.flush_names()
            self._end_gone()
            self._end_stuck()
            self._close_idle()
            self.publish()
        finally:
            if self.mux.holds or self.mux.waits:
                self._sweep_later()

    def _end_gone(self) -> None:
        for session in [*self.mux.holds, *self.mux.waits]:
            if session.opened and (why := session.wire.look()) is not None:
                self.lost(session, Unanswered(why))

    def _end_stuck(self) -> None:
        """What has been under way since so many looks will not be answered any more."""
        before, self._under_way = self._under_way, []
        for session in [*self.mux.holds, *self.mux.waits]:
            if flying := self._flying(session):
                if isinstance(flying, list) and flying[0].verb == "note" and flying[0].text:
                    continue  # no name is worth the locks of a session
                looks = next((each[1] for each in before if each[0] is flying), 0) + 1
                self._under_way.append((flying, looks))
                if looks * SWEEP > (CALL_TIMEOUT if session.opened else 2 * CALL_TIMEOUT):
                    self.lost(session, Unanswered(f"{self.database} did not answer in time"))

    def _flying(self, session: Session) -> object:
        """What is under way in it, if anything is."""
        return session.flying or ([] if session.opened else session.held)

    def _close_idle(self) -> None:
        self.do(self.mux.sweep())
