"""The claims of the multiplexer: what becomes of a key, from the first who wants it to the last who leaves."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.lock.sessions import Sessions
from holdfast.lock.tickets import Action, Claim, Lost, Op, Open, Session, Settle, State, Ticket, Wait

SPEND, SHARE = 32, 64
"""How many more keys there may be here before the room for them is asked for again: so many, and not more than such a
part of the room, as others were told of the same room."""
LOSSES = 3
"""How often a question is asked again on another session before whoever asks is told."""


class Claims(Sessions):
    """Decides, and puts what is to be done into ``_out``; the events are in ``mux``."""

    def look_again(self, waiting: Iterable[Ticket]) -> list[Action]:
        """Now and then: whoever waits may by now be awaited by the block that it waits for, and was not when it
        asked."""
        for ticket in waiting:
            claim = ticket.claim
            if ticket.state != "queued" or claim is None or (holder := claim.holder) is None or holder.state != "held":
                continue
            if holder.name == ticket.name and self._is_one(holder, ticket):
                claim.queue.remove(ticket)
                self._refuse_one(ticket, "reentered")
        return self._done()

    def _is_one(self, holder: Ticket, ticket: Ticket) -> bool:
        """Would it wait for itself?"""
        return holder.owner == ticket.owner or (holder.block and self._awaits(holder.owner, ticket.owner))

    def _refuse_one(self, ticket: Ticket, state: State) -> None:
        ticket.state = state
        self._out.append(Settle(ticket))

    def _line_up(self, claim: Claim, ticket: Ticket) -> None:
        ticket.claim, ticket.state = claim, "queued"
        claim.queue.append(ticket)

    def _put_first(self, claim: Claim, ticket: Ticket) -> None:
        """Taken past us, it was not had: now it waits, before everybody."""
        claim.holder = None
        ticket.claim, ticket.state = claim, "queued"
        claim.queue.appendleft(ticket)

    def _adopted(self, ticket: Ticket) -> Claim:
        """The claim of a ticket that was taken past us: as far as we know, it holds."""
        claim = Claim(ticket.key)
        claim.stage, claim.holder, claim.session = "held", ticket, ticket.session
        return claim

    def _of(self, ticket: Ticket) -> Claim | None:
        """The claim that ``ticket`` is the holder of."""
        found = self.claims.get(ticket.key)
        if found is ticket:
            found = self._taken_over(ticket)
        return found if isinstance(found, Claim) and found.holder is ticket else None

    def _taken_over(self, ticket: Ticket) -> Claim:
        """Instead of the ticket, which was taken past us, and whose holder sees first that it is so no more."""
        ticket.claim = claim = ticket.heirs or self._adopted(ticket)
        ticket.heirs = None
        self.claims[ticket.key] = claim
        if claim.session is not None and claim.session.over:  # it was being tried or unlocked when that ended
            claim.session = None
        if claim.session is not None:
            claim.session.held[claim.key] = claim
        return claim

    def _granted(self, claim: Claim) -> None:
        if claim.queue:
            claim.holder = ticket = claim.queue.popleft()
            claim.stage, ticket.session, ticket.state = "held", claim.session, "held"
            self._out.append(Settle(ticket))
        else:
            self._unlock(claim)

    def _fail(self, claim: Claim, error: Exception) -> None:
        while claim.queue:
            ticket = claim.queue.popleft()
            ticket.state, ticket.problem = "failed", error
            self._out.append(Settle(ticket))

    def _forget(self, claim: Claim) -> None:
        if self.claims.get(claim.key) is claim:
            del self.claims[claim.key]

    def _leave(self, claim: Claim) -> None:
        """It has nothing to do with its session any more."""
        session, claim.session = claim.session, None
        if session is not None:
            session.held.pop(claim.key, None)

    def _try(self, claim: Claim) -> None:
        session = self._hold_session()
        claim.stage, claim.session = "asking", session
        session.held[claim.key] = claim
        self._say(session, Op("try", claim))

    def _unlock(self, claim: Claim) -> None:
        claim.stage = "freeing"
        if claim.session is None:
            self._unlocked(claim)
        else:
            self._say(claim.session, Op("unlock", claim))

    def _unlocked(self, claim: Claim) -> None:
        yields = False
        if (ticket := claim.leaving) is not None:
            yields = ticket.state == "held" and not self._lines
            claim.leaving, ticket.state = None, "released"
            self._out.append(Settle(ticket))
        session = claim.session
        if claim.queue and session is not None and session.waits and all(each.waits for each in claim.queue):
            self._stand(claim, session)
            return
        self._leave(claim)
        if session is not None and session.waits:
            session.claim = None
            self._rest(session)
        if claim.queue and yields:
            self._contended(claim)
        elif claim.queue:
            self._try(claim)
        else:
            self._forget(claim)

    def _contended(self, claim: Claim) -> None:
        """Somebody else has it: those who would not wait are told, the others stand in the server's line."""
        for ticket in [each for each in claim.queue if not each.waits]:
            claim.queue.remove(ticket)
            self._refuse_one(ticket, "busy")
        if not claim.queue:
            self._forget(claim)
            return
        for ticket in claim.queue:
            ticket.contended = True
        if self._free:
            self._stand(claim, self._free.pop())
        elif max(1, len(self.holds)) + len(self.waits) < self.limit:  # one is always to be had for asking
            session = Session(waits=True)
            self.waits.append(session)
            self._out.append(Open(session))
            self._stand(claim, session)
        else:
            claim.stage = "parked"
            self._parked.append(claim)

    def _stand(self, claim: Claim, session: Session) -> None:
        claim.stage, claim.session, session.claim = "waiting", session, claim
        session.held[claim.key] = claim
        session.cancelling = session.ended = False
        session.used = True
        if session.opened:
            self._out.append(Wait(session, claim.key))

    def _nobody_waits(self, claim: Claim) -> None:
        if claim.stage == "parked":
            self._parked.remove(claim)
            self._forget(claim)
        elif claim.stage == "waiting":
            session = claim.session
            assert session is not None
            if not session.opened:  # nothing was asked yet
                self._leave(claim)
                session.claim = None
                self._forget(claim)
                return
            claim.stage = "stopping"
            self._cancel(session)

    def _cancel(self, session: Session) -> None:
        by = next((each for each in self.holds if each.opened), None)
        if by is None:
            self._drop(session, ConnectionError("nobody waits in it any more"))
            return
        session.cancelling = True
        self._say(by, Op("cancel", target=session))

    def _cancelled(self, session: Session | None) -> None:
        if session is not None and not session.over:
            session.cancelling = False
            self._stopped(session)

    def _stopped(self, session: Session) -> None:
        """Only when the cancel has been answered, too: a late one would hit the next statement."""
        if session.ended and not session.cancelling and session.claim is not None:
            self._unlock(session.claim)

    def _rest(self, session: Session) -> None:
        """A session that waits has nothing to wait for."""
        if self._parked:
            self._stand(self._parked.popleft(), session)
        elif len(self.holds) + len(self.waits) > self.kept:
            self._end(session)
        else:
            self._free.append(session)

    def _pass_on(self, ticket: Ticket) -> None:
        heirs, ticket.heirs = ticket.heirs, None
        while heirs is not None and heirs.queue:
            found = self.claims.setdefault(heirs.key, heirs)
            if found is heirs:
                heirs.holder = heirs.session = None
                self._try(heirs)
                break
            claim = found if isinstance(found, Claim) else found.heirs or self._adopted(found)
            if isinstance(found, Ticket):
                found.heirs = claim
                if self.claims.get(heirs.key) is not found:
                    continue
            for waiting in heirs.queue:
                waiting.claim = claim
            claim.queue.extendleft(reversed(heirs.queue))
            heirs.queue.clear()

    def _know_room(self, session: Session, room: int | None) -> None:
        """Whoever asked before that was known, and is too many, is told now."""
        if room is None:
            return
        asking = [op.claim for op in session.pending if op.verb == "try" and op.claim is not None]
        self.cap = len(self.claims) - len(asking) + max(0, room)
        self._spend = min(SPEND, max(0, room - len(asking)) // SHARE)
        self.due = min(self.cap, len(self.claims) + self._spend)
        for claim in asking[max(0, room) :]:
            session.pending = [op for op in session.pending if op.claim is not claim]
            self._full = True
            self._leave(claim)
            self._forget(claim)
            while claim.queue:
                self._refuse_one(claim.queue.popleft(), "full")

    def _drop(self, session: Session | None, error: Exception) -> None:
        if session is None or session.over:
            return
        opened, said = session.opened, session.flying + session.pending
        session.flying, session.pending = [], []
        self._end(session)
        for op in said:
            if op.verb == "cancel":
                self._drop(op.target, error)
        for claim in list(session.held.values()):
            if isinstance(claim, Ticket):
                self._lose_past_us(claim, error)
            else:
                self._lose(claim, error, opened)
        session.held.clear()
        if self._parked and max(1, len(self.holds)) + len(self.waits) < self.limit:
            self._contended(self._parked.popleft())

    def _lose_past_us(self, ticket: Ticket, error: Exception) -> None:
        if ticket.state == "held":
            self._out.append(Lost(ticket, error))
            ticket.problem, ticket.state = error, "lost"
            if self.claims.get(ticket.key) is ticket:
                del self.claims[ticket.key]
            self._pass_on(ticket)

    def _lose(self, claim: Claim, error: Exception, opened: bool) -> None:
        claim.handed = 0
        if (ticket := claim.leaving) is not None:
            self._out.append(Settle(ticket))
            ticket.problem, ticket.state = error, "lost"
            claim.leaving = None
        if (ticket := claim.holder) is not None:
            self._out.append(Lost(ticket, error))
            ticket.problem, ticket.state = error, "lost"
            claim.holder = None
        claim.losses += 1
        if not opened or claim.losses >= LOSSES:
            self._fail(claim, error)
        claim.session = None
        if claim.queue:
            self._try(claim)
        else:
            self._forget(claim)
