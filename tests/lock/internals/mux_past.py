"""The same world with a pump that takes and unlocks free keys past the multiplexer, as both pumps do."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from holdfast.lock.tickets import Key, Session, Ticket
from tests.lock.internals.mux_world import KEYS, TAKEN, WISHES, Wish, World


class PastWorld(World):
    """And without lines."""

    lines = False

    @initialize(target=World.tickets, alone=st.booleans(), taken=TAKEN, wishes=WISHES, steps=st.integers(0, 5))
    def begin(self, alone: bool, taken: set[Key], wishes: list[Wish], steps: int) -> Any:
        """With a session that is free."""
        self.mux._alone = alone
        first = self.asked((b"9",), True, 9)
        for _ in range(4):
            self.step_once()
        self.do(self.mux.release(first))
        self.step_once()
        assert self.free_session() is not None
        return self.crowded(taken, wishes, steps)

    def free_session(self) -> Session | None:
        for session in self.mux.holds:
            if (
                session in self.alive
                and not (session.flying or session.solo)
                and len(session.held) < self.mux.per_session
            ):
                return session
        return None

    @rule(target=World.tickets, key=KEYS, waits=st.booleans(), owner=st.integers(0, 2), data=st.data())
    def ask_past(self, key: Key, waits: bool, owner: int, data: Any) -> Ticket:
        """Others may come while it is being tried; and whoever tries may be interrupted, before it is sent or after."""
        session = self.free_session()
        if session is None or key in self.mux.claims:
            return self.asked(key, waits, owner)
        ticket = Ticket(key, str(key), owner, waits=waits)
        self.all.append(ticket)
        ticket.session = session
        self.mux.claims[key] = session.held[key] = ticket
        session.solo = ticket
        for other in range(data.draw(st.integers(0, 2))):
            self.asked(key, data.draw(st.booleans()), 5 + other)
        end = data.draw(st.sampled_from(["answered", "answered", "answered", "interrupted", "granted and interrupted"]))
        got = end != "interrupted" and self.server.try_lock(key, session)
        session.solo = None
        if end != "answered":
            self.settled.append(ticket)
            ticket.state = "gone"
            self.do(self.mux.give_up(ticket))
        elif got:
            ticket.state = "held"
            self.settled.append(ticket)
        elif waits:
            self.do(self.mux.contended(ticket))
        else:
            ticket.state = "busy"
            self.settled.append(ticket)
            del self.mux.claims[key], session.held[key]
            if ticket.heirs is not None:
                self.do(self.mux.freed(ticket))
        self.do(self.mux.flush(session))
        return ticket

    @rule(ticket=World.tickets)
    def release_past(self, ticket: Ticket) -> None:
        """Somebody may come between the unlock and its end."""
        session = ticket.session
        if ticket.state != "held" or session is None or self.mux.claims.get(ticket.key) is not ticket:
            return
        if session.flying or session not in self.alive:
            return
        ticket.state = "released"
        self.server.unlock(ticket.key, session)
        late = Ticket(ticket.key, str(ticket.key), 9, waits=True)
        self.all.append(late)
        self.do(self.mux.ask(late))
        session.held.pop(ticket.key, None)
        self.mux.claims.pop(ticket.key, None)
        if ticket.heirs is not None:
            self.do(self.mux.freed(ticket))

    def is_leaving(self, ticket: Ticket) -> bool:
        claim: Any = self.mux.claims.get(ticket.key)
        return claim is not None and not isinstance(claim, Ticket) and claim.leaving is ticket
