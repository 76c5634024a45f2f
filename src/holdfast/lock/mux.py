"""Many locks over few sessions, as a state machine: events in, actions out. It knows no socket, no clock and no thread.

A session holds or waits, never both. *Hold* sessions are asked with statements that never wait, many keys in one; a key
that somebody else has gets a *wait* session of its own, which keeps the lock it wins. Whoever wants a key that this
client has or is already asking for stands in a line here, and is handed it without a word to the server: a bounded
number of times in a row, because others stand in the server's line.

What is under way with the server belongs to the key and not to whoever began it. Whoever gives up only leaves the line;
an answer goes to the first in line then, and to nobody if there is none: what may have been granted is unlocked.
"""

from __future__ import annotations

from typing import Any

from holdfast.lock.claims import Claims
from holdfast.lock.sessions import TURNS
from holdfast.lock.tickets import Action, Claim, Close, Op, Session, Settle, State, Ticket, Wait

LONG_ENOUGH = "55P03"
"""What the server says of a wait that it was to end, because a statement under way keeps it from tidying up."""


class Mux(Claims):
    """An event comes in as a call, and what is to be done comes back. How a key is dealt with is in ``claims``, what is
    said where in ``sessions``, and what becomes of an event that was cut short in ``mend``."""

    def ask(self, ticket: Ticket) -> list[Action]:
        """Somebody wants a key.

        A pump may take a key past us, by putting a ticket instead of a claim into ``claims``. Whoever comes second is
        noted in that ticket, and the pump says ``freed`` when it has unlocked a key that has heirs. One that is
        ``alone`` is not in the midst of unlocking what is held: that is a claim from then on, and soon handed on.
        """
        if self._closed is not None:
            ticket.problem = self._closed
            return self._refuse(ticket, "failed")
        key, claim = ticket.key, Claim(ticket.key)
        while True:
            found = self.claims.get(key)
            if found is None and self.cap is not None and len(self.claims) >= self.cap:
                self._full = True
                return self._refuse(ticket, "full")
            found = self.claims.setdefault(key, claim)
            if found is claim:
                self._line_up(claim, ticket)
                if len(self.claims) > self.due:
                    self._ask_room(self._hold_session())
                self._try(claim)
                return self._done()
            if found is ticket:  # taken past us, and then not tried: its session failed
                return self._first(ticket)
            if isinstance(found, Claim):
                return self._join(found, ticket)
            if self._alone and found.state == "held":
                return self._join(self._taken_over(found), ticket)
            heirs = found.heirs or self._adopted(found)
            found.heirs = heirs
            if self.claims.get(key) is found:  # else it was freed this very moment
                return self._join(heirs, ticket)

    def _first(self, ticket: Ticket) -> list[Action]:
        claim = self._of(ticket)
        assert claim is not None
        self._leave(claim)
        self._put_first(claim, ticket)
        self._try(claim)
        return self._done()

    def contended(self, ticket: Ticket) -> list[Action]:
        """Past us, a pump has tried a key that somebody else has."""
        claim = self._of(ticket)
        if claim is None:  # everything has ended meanwhile
            return self.ask(ticket)
        self._leave(claim)
        self._put_first(claim, ticket)
        self._contended(claim)
        return self._done()

    def unsure(self, ticket: Ticket) -> list[Action]:
        """Past us, a pump has tried a key, and the answer went unheard: unlocked in any case, and tried again."""
        claim = self._of(ticket)
        if claim is not None:
            self._put_first(claim, ticket)
            self._unlock(claim)
        return self._done()

    def freed(self, ticket: Ticket) -> list[Action]:
        """Past us, a pump has unlocked a key that has heirs."""
        self._pass_on(ticket)
        return self._done()

    def give_up(self, ticket: Ticket) -> list[Action]:
        """Its time is up, or it was cancelled: nothing of it may stay, whatever it has been granted meanwhile."""
        if ticket.state == "queued":
            claim = ticket.claim
            assert claim is not None
            if ticket in claim.queue:
                claim.queue.remove(ticket)
            ticket.state = "gone"
            if not claim.queue:
                self._nobody_waits(claim)
            return self._done()
        if self.claims.get(ticket.key) is not ticket and ticket.heirs is not None:
            return self.freed(ticket)
        return self._end_of(ticket, sure=ticket.state == "held")

    def hand_on(self, ticket: Ticket) -> Ticket | None:
        """``release`` where it goes to the next in line here, as often in a row as is fair to others: there is nothing
        to do then but to tell that one. None when it does not, and nothing has happened.

        With all in here, as it is cold when it is called: each function costs more than what it does."""
        claim = self.claims.get(ticket.key)
        if claim is ticket:
            claim = self._taken_over(ticket)
        if not isinstance(claim, Claim) or claim.holder is not ticket or not claim.queue or claim.handed >= self.turns:
            return None
        claim.handed += 1
        ticket.state = "released"
        claim.holder = heir = claim.queue.popleft()
        heir.session, heir.state = claim.session, "held"
        return heir

    def release(self, ticket: Ticket) -> list[Action]:
        """The holder is done. Settled when the lock is somebody else's, or nobody's."""
        return self._end_of(ticket, sure=True)

    def is_leaving(self, ticket: Ticket) -> bool:
        """Is it still being unlocked?"""
        found = self.claims.get(ticket.key)
        return isinstance(found, Claim) and found.leaving is ticket

    def _end_of(self, ticket: Ticket, *, sure: bool) -> list[Action]:
        """``sure``: it did hold. What was interrupted past us may never have been granted, and is not handed on."""
        if sure and (heir := self.hand_on(ticket)) is not None:
            self._out += Settle(ticket), Settle(heir)
        elif (claim := self._of(ticket)) is not None:
            claim.holder, claim.handed, claim.leaving = None, 0, ticket
            self._unlock(claim)
        else:
            if ticket.state == "held" and not self.is_leaving(ticket):
                ticket.state = "released"
            self._out.append(Settle(ticket))
        return self._done()

    def opened(self, session: Session) -> list[Action]:
        session.opened = session.used = True
        if session.over:
            self._out.append(Close(session))
        elif not session.waits:
            session.pending.insert(0, Op("room"))
            self._flush(session)
        elif session.claim is not None:
            self._out.append(Wait(session, session.claim.key))
        else:
            self._rest(session)
        return self._done()

    def answered(self, session: Session, answers: list[Any]) -> list[Action]:
        """The answers to ``Send``, one an op."""
        ops, session.flying = session.flying, []
        for op, answer in zip(ops, answers, strict=True):
            if op.verb == "room":
                self._know_room(session, answer)
            elif op.verb == "cancel":
                self._cancelled(op.target)
            elif op.claim is None or op.claim.session is not session:
                continue
            elif op.verb == "unlock":
                self._unlocked(op.claim)
            elif answer:
                op.claim.losses = 0
                self._granted(op.claim)
            else:
                self._leave(op.claim)
                self._contended(op.claim)
        self._flush(session)
        return self._done()

    def refused(self, session: Session, error: Exception) -> list[Action]:
        """An error instead of the answers to ``Send``. Part of it may be done: whatever was tried is unlocked."""
        ops, session.flying = session.flying, []
        for op in ops:
            if op.verb == "cancel":
                self._drop(op.target, error)
            elif op.claim is not None and op.claim.session is session:
                if op.verb == "try":
                    self._fail(op.claim, error)
                    self._unlock(op.claim)
                elif len(ops) > 1:  # it may be the others' fault
                    self._unlock(op.claim)
                else:
                    op.claim.stage = "refused"
                    self._refused.append(op.claim)
        self._flush(session)
        return self._done()

    def waited(self, session: Session, error: Exception | None) -> list[Action]:
        """``Wait`` is over: granted, or an error, and then it may be granted all the same."""
        claim = session.claim
        if session.over or claim is None:
            return self._done()
        session.ended = True
        if claim.stage == "stopping":
            self._stopped(session)
        elif error is None:
            self._granted(claim)
        else:
            if getattr(error, "sqlstate", None) != LONG_ENOUGH:
                self._fail(claim, error)
            self._unlock(claim)  # and whoever still waits stands in line again
        return self._done()

    def lost(self, session: Session, error: Exception) -> list[Action]:
        """The session is gone, or could not be opened. The server frees what it held."""
        self._drop(session, error)
        return self._done()

    def close(self, error: Exception) -> list[Action]:
        """Everything ends: whoever waits is told, whoever holds holds no more, and nobody is let in."""
        self._closed = error
        for found in list(self.claims.values()):
            claim = found if isinstance(found, Claim) else found.heirs or self._adopted(found)
            for ticket in (claim.holder, claim.leaving):
                if ticket is not None:
                    ticket.state = "released"
                    self._out.append(Settle(ticket))
            self._fail(claim, error)
        self.claims.clear()
        for session in [*self.holds, *self.waits]:
            self._end(session)
        self._parked.clear()
        return self._done()

    def sweep(self, busy: Any = ()) -> list[Action]:
        """Now and then: close what nobody has used since the last time, and is not ``busy``; say again what was
        refused; and see whether those who stand in line for a session still need one, and whether those who are to stop
        do."""
        for session in [*self.holds, *self.waits]:
            if session.held or session.pending or session.flying or not session.opened or session in busy:
                session.used = True
            elif session.used:
                session.used = False
            else:
                self._end(session)
        if self._full and (session := next((each for each in self.holds if each.opened), None)) is not None:  # type: ignore[assignment]
            self._full = False
            self._ask_room(session)
        elif self.cap is not None:  # what was given back since may be somebody else's room
            self.due = min(self.due, len(self.claims) + self._spend)
        refused, self._refused = self._refused, []
        for claim in refused:
            if claim.stage == "refused":
                self._unlock(claim)
        for session in list(self.waits):
            stopping = session.claim is not None and session.claim.stage == "stopping"
            if stopping and not session.ended and not session.cancelling:
                self._cancel(session)  # it came before what it was to end
        for claim in self._parked:  # it may be free by now; if not, there may be a session to wait in
            self._try(claim)
        self._parked.clear()
        return self._done()

    def flush(self, session: Session) -> list[Action]:
        """The session is free again after something that went past us."""
        self._flush(session)
        return self._done()

    def note(self, text: str) -> list[Action]:
        """Something to be written down when there is a session open, and nobody needs it."""
        session = next((each for each in self.holds if each.opened), None)
        if session is not None:
            self._say(session, Op("note", text=text))
        return self._done()

    def _refuse(self, ticket: Ticket, state: State) -> list[Action]:
        self._refuse_one(ticket, state)
        return self._done()

    def _join(self, claim: Claim, ticket: Ticket) -> list[Action]:
        holder = claim.holder
        if holder is not None and holder.state in ("released", "gone"):  # past us, it is just being unlocked
            holder = None
        if holder is not None and holder.name == ticket.name and self._is_one(holder, ticket):
            return self._refuse(ticket, "reentered")
        if not ticket.waits and (holder is not None or claim.queue):
            return self._refuse(ticket, "busy")
        ticket.contended = claim.stage != "asking"
        self._line_up(claim, ticket)
        return self._done()


__all__ = ["TURNS", "Mux"]
