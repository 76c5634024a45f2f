"""The pump of the asyncio flavour. A key that nobody here has, and a session that is free: then there is nothing to
decide, and it goes past the multiplexer, which is told when there is."""

from __future__ import annotations

from holdfast.errors import EngineError, Unanswered
from holdfast.lock.asyncio_mending import MendingPump
from holdfast.lock.bell import Bell, ring_at_once, wake
from holdfast.lock.tickets import Session, Ticket, Unheard


class AsyncPump(MendingPump):
    ended = False

    def begin(self, ticket: Ticket) -> bool:
        """Try it so; False when that cannot be. Interrupted anywhere, in here, in ``end`` or in ``_readable``, it is
        gone on with as soon as the loop goes on."""
        mux, session, key = self.mux, self.fast, ticket.key
        claims = mux.claims
        if session is None or session.solo is not None or session.flying or key in claims:
            return False
        if len(claims) >= mux.due or len(session.held) >= mux.per_session:
            return False
        ticket.session = session
        claims[key] = session.held[key] = ticket
        session.used = True
        wire = session.wire
        try:
            session.solo = ticket
            ticket.state = "queued"
            if wire.descriptor is not None:
                wire.begin("try", key)
            else:
                self._told(session, ticket, wire.run("try", key, 0.0))
        except EngineError as error:
            self._not_said(session, ticket, error)
        except (KeyboardInterrupt, SystemExit):
            self.loop.call_soon(self._go_on, session, ticket, ticket.bell)
            raise
        return True

    def end(self, ticket: Ticket) -> bool:
        """Unlock what was taken so; False when that cannot be."""
        session = ticket.session
        if session is None or session.solo is not None or session.flying:
            return False
        wire = session.wire
        try:
            session.solo = ticket
            ticket.state = "released"
            if wire.descriptor is not None:
                wire.begin("unlock", ticket.key)
            else:
                self._told(session, ticket, wire.run("unlock", ticket.key, 0.0))
        except EngineError as error:
            self._not_said(session, ticket, error)
        except (KeyboardInterrupt, SystemExit):
            self.loop.call_soon(self._go_on, session, ticket, ticket.bell)
            raise
        return True

    def _not_said(self, session: Session, ticket: Ticket, error: EngineError) -> None:
        if isinstance(error, Unanswered):
            self.loop.call_soon(self.lost, session, error)
        else:
            self._told(session, ticket, error)

    def give_up(self, ticket: Ticket) -> None:
        if ticket.session is not None and ticket.session.solo is ticket:
            if ticket.state != "released":  # that one is being unlocked already
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
                    self.waiting.pop(ticket, None)
                    ring_at_once(bell)
                    return
                if ticket.state == "released":
                    session.held.pop(ticket.key, None)
                    self.mux.claims.pop(ticket.key, None)
                    session.solo = None
                    ring_at_once(bell)
                    return
            if answer is None:
                self._go_on_hearing(session)
            else:
                self._told(session, ticket, answer)
        except EngineError as error:
            self.lost(session, error)
        except (KeyboardInterrupt, SystemExit):
            if ticket is None:
                self.interrupted()
            else:
                self.loop.call_soon(self._go_on, session, ticket, bell or ticket.bell)
            raise

    def _go_on(self, session: Session, ticket: Ticket, bell: Bell) -> None:
        if session.solo is ticket:
            self._readable(session)
            self._mend()
            return
        self.do(self.mux.flush(session))
        if ticket.state != "queued":
            wake(bell)
        self._mend()

    def _told(self, session: Session, ticket: Ticket, answer: bool | Unheard | EngineError) -> None:
        self._conclude(session, ticket, answer)
        session.solo = None
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
