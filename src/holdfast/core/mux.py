"""Many locks over few sessions, as a state machine: events in, actions out. It knows no socket, no clock and no thread.

A session holds or waits, never both. *Hold* sessions are asked with statements that never wait, many keys in one; a key
that somebody else has gets a *wait* session of its own, which keeps the lock it wins. Whoever wants a key that this
client has or is already asking for stands in a line here, and is handed it without a word to the server: a bounded
number of times in a row, because others stand in the server's line.

What is under way with the server belongs to the key and not to whoever began it. Whoever gives up only leaves the line;
an answer goes to the first in line then, and to nobody if there is none: what may have been granted is unlocked.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from holdfast.core.tickets import Action, Claim, Close, Key, Lost, Op, Open, Send, Session, Settle, State, Ticket, Wait

TURNS = 50
"""How often in a row a lock is handed on here before those in the server's line get their turn."""
PER_SESSION = 300
"""Every statement of a session costs in proportion to the locks it holds: twice as much at a thousand."""
ALONE = ("room", "note")
"""What is said in a statement of its own."""
SPEND, SHARE = 32, 64
"""How many more keys there may be here before the room for them is asked for again: so many, and not more than such a
part of the room, as others were told of the same room."""
LOSSES = 3
"""How often a question is asked again on another session before whoever asks is told."""


class Mux:
    """``kept`` sessions stay for a while when they are free, ``extra`` more are closed at once.

    ``lines``: the server has a fair line for each key. Where there is none, whoever has had its turns stands back.
    """

    def __init__(
        self, *, kept: int = 15, extra: int = 10, per_session: int = PER_SESSION, turns: int = TURNS, lines: bool = True
    ) -> None:
        self._lines = lines
        self.kept, self.limit, self.per_session, self.turns = kept, kept + extra, per_session, turns
        self.cap: int | None = None
        """How many locks there may be here. None: not known yet, or not needed."""
        self.due: int | None = None
        """How many there may be before the room is asked for again, see ``SPEND``."""
        self._spend = 0
        self._refused: list[Claim] = []
        """What the server will not unlock now."""
        self.claims: dict[Key, Claim | Ticket] = {}
        self.holds: list[Session] = []
        self.waits: list[Session] = []
        self._free: list[Session] = []
        self._parked: deque[Claim] = deque()
        self._out: list[Action] = []
        self.told: list[Action] = []
        """What the last event came to; whoever carries it out takes away what is done. See ``mend``."""
        self._full = False
        self._closed: Exception | None = None

    def ask(self, ticket: Ticket) -> list[Action]:
        """Somebody wants a key.

        A pump may take a key past us, by putting a ticket instead of a claim into ``claims``. Whoever comes second is
        noted in that ticket, and the pump says ``freed`` when it has unlocked a key that has heirs.
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
                if self.due is not None and len(self.claims) > self.due:
                    self._ask_room(self._hold_session())
                self._try(claim)
                return self._done()
            if found is ticket:  # taken past us, and then not tried: its session failed
                return self._first(ticket)
            if isinstance(found, Claim):
                return self._join(found, ticket)
            heirs = found.heirs or self._adopted(found)
            found.heirs = heirs
            if self.claims.get(key) is found:  # else it was freed this very moment
                return self._join(heirs, ticket)

    def _first(self, ticket: Ticket) -> list[Action]:
        claim = self._of(ticket)
        assert claim is not None
        self._leave(claim)
        claim.holder = None
        ticket.state, ticket.claim = "queued", claim
        claim.queue.appendleft(ticket)
        self._try(claim)
        return self._done()

    def contended(self, ticket: Ticket) -> list[Action]:
        """Past us, a pump has tried a key that somebody else has."""
        claim = self._of(ticket)
        if claim is None:  # everything has ended meanwhile
            return self.ask(ticket)
        self._leave(claim)
        claim.holder = None
        ticket.state, ticket.claim = "queued", claim
        claim.queue.appendleft(ticket)
        self._contended(claim)
        return self._done()

    def unsure(self, ticket: Ticket) -> list[Action]:
        """Past us, a pump has tried a key, and the answer went unheard: unlocked in any case, and tried again."""
        claim = self._of(ticket)
        if claim is not None:
            claim.holder = None
            ticket.state, ticket.claim = "queued", claim
            claim.queue.appendleft(ticket)
            self._unlock(claim)
        return self._done()

    def freed(self, ticket: Ticket) -> list[Action]:
        """Past us, a pump has unlocked a key that has heirs."""
        self._pass_on(ticket)
        return self._done()

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

    def release(self, ticket: Ticket) -> list[Action]:
        """The holder is done. Settled when the lock is somebody else's, or nobody's."""
        return self._end_of(ticket, sure=True)

    def _end_of(self, ticket: Ticket, *, sure: bool) -> list[Action]:
        """``sure``: it did hold. What was interrupted past us may never have been granted, and is not handed on."""
        claim = self._of(ticket)
        if claim is None:
            self._out.append(Settle(ticket))
            return self._done()
        claim.holder = None
        if sure and claim.queue and claim.handed < self.turns:
            claim.handed += 1
            ticket.state = "released"
            self._out.append(Settle(ticket))
            self._grant(claim)
        else:
            claim.handed, claim.leaving = 0, ticket
            self._unlock(claim)
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
            self._fail(claim, error)
            self._unlock(claim)
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
        refused; and see whether those who stand in line for a session still need one."""
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
        elif self.due is not None:  # what was given back since may be somebody else's room
            self.due = min(self.due, len(self.claims) + self._spend)
        refused, self._refused = self._refused, []
        for claim in refused:
            if claim.stage == "refused":
                self._unlock(claim)
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

    def _done(self) -> list[Action]:
        self.told = self._out
        self._out = []
        return self.told

    def _refuse(self, ticket: Ticket, state: State) -> list[Action]:
        self._refuse_one(ticket, state)
        return self._done()

    def _refuse_one(self, ticket: Ticket, state: State) -> None:
        ticket.state = state
        self._out.append(Settle(ticket))

    def _ask_room(self, session: Session) -> None:
        """Before whatever is tried next in this session. One that opens asks in any case."""
        if session.opened and not any(op.verb == "room" for op in session.flying + session.pending):
            self._say(session, Op("room"))

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

    def _join(self, claim: Claim, ticket: Ticket) -> list[Action]:
        holder = claim.holder
        if holder is not None and holder.state in ("released", "gone"):  # past us, it is just being unlocked
            holder = None
        if holder is not None and holder.owner == ticket.owner and holder.name == ticket.name:
            return self._refuse(ticket, "reentered")
        if not ticket.waits and (holder is not None or claim.queue):
            return self._refuse(ticket, "busy")
        ticket.contended = claim.stage != "asking"
        self._line_up(claim, ticket)
        return self._done()

    def _line_up(self, claim: Claim, ticket: Ticket) -> None:
        ticket.state, ticket.claim = "queued", claim
        claim.queue.append(ticket)

    def _adopted(self, ticket: Ticket) -> Claim:
        """The claim of a ticket that was taken past us: as far as we know, it holds."""
        claim = Claim(ticket.key)
        claim.stage, claim.holder, claim.session = "held", ticket, ticket.session
        return claim

    def _of(self, ticket: Ticket) -> Claim | None:
        """The claim that ``ticket`` is the holder of."""
        found = self.claims.get(ticket.key)
        if found is ticket:
            found = ticket.heirs or self._adopted(ticket)
            ticket.heirs = None
            self.claims[ticket.key] = found
            if found.session is not None and found.session.over:  # it was being tried or unlocked when that ended
                found.session = None
            if found.session is not None:
                found.session.held[found.key] = found
        return found if isinstance(found, Claim) and found.holder is ticket else None

    def _grant(self, claim: Claim) -> None:
        ticket = claim.queue.popleft()
        claim.stage, claim.holder = "held", ticket
        ticket.state, ticket.session = "held", claim.session
        self._out.append(Settle(ticket))

    def _granted(self, claim: Claim) -> None:
        if claim.queue:
            self._grant(claim)
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
            by = next((each for each in self.holds if each.opened), None)
            if by is None:
                self._drop(session, ConnectionError("nobody waits in it any more"))
                return
            claim.stage, session.cancelling = "stopping", True
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

    def _hold_session(self) -> Session:
        """The first with room for one more; when all have their fill a new one, or the one with the fewest locks."""
        for session in self.holds:
            if len(session.held) < self.per_session:
                return session
        if self.holds and len(self.holds) + len(self.waits) >= self.limit:
            return min(self.holds, key=lambda each: len(each.held))
        session = Session(waits=False)
        self.holds.append(session)
        self._out.append(Open(session))
        return session

    def _say(self, session: Session, op: Op) -> None:
        session.pending.append(op)
        self._flush(session)

    def _flush(self, session: Session) -> None:
        """Everything that has come together while the last statement was under way goes in one."""
        if session.opened and not session.over and not session.flying and (pending := session.pending):
            count = 0
            while count < len(pending) and pending[count].verb not in ALONE:
                count += 1
            count = count or 1
            session.flying, session.pending = pending[:count], pending[count:]
            session.used = True
            self._out.append(Send(session, session.flying))

    def _end(self, session: Session) -> None:
        for sessions in (self.holds, self.waits, self._free):
            if session in sessions:
                sessions.remove(session)
        if not session.over:
            session.over = True
            if session.opened:
                self._out.append(Close(session))

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
