"""A model of the server and of a pump, for the multiplexer to be let loose in."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from holdfast.lock.mux import Mux
from holdfast.lock.tickets import Action, Close, Key, Lost, Open, Send, Session, Settle, Ticket, Wait

KEYS = st.sampled_from([(b"1",), (b"2",), (b"3", b"4")])
Wish = tuple[Key, bool, int]
WAITS = st.sampled_from([True, True, True, False])
WISHES = st.lists(st.tuples(KEYS, WAITS, st.integers(0, 4)), min_size=3, max_size=8)
TAKEN = st.sets(KEYS)
LIMITS: dict[str, Any] = {"kept": 2, "extra": 1, "per_session": 3, "turns": 2}
"""One session that holds and two that wait: of three keys that others have, one is parked."""
OTHER = "another process"
ERROR = ConnectionError("the test says so")
LONG_WAIT = psycopg.errors.LockNotAvailable("the test says that it waited for long enough")


class Server:
    """Advisory locks, with a fair line for each key."""

    def __init__(self) -> None:
        self.held: dict[Key, object] = {}
        self.line: dict[Key, deque[Session]] = {}

    def try_lock(self, key: Key, who: object) -> bool:
        assert self.held.get(key) is not who, "a session locks a key twice, and would have to unlock it twice"
        if key in self.held:
            return False
        self.held[key] = who
        return True

    def unlock(self, key: Key, who: object) -> bool:
        if self.held.get(key) is not who:
            return False
        del self.held[key]
        if self.line.get(key):
            self.held[key] = self.line[key].popleft()
        return True

    def end(self, who: Session) -> None:
        for line in self.line.values():
            if who in line:
                line.remove(who)
        for key in [key for key, holder in self.held.items() if holder is who]:
            self.unlock(key, who)


class World(RuleBasedStateMachine):
    tickets = Bundle("tickets")
    lines = True

    def __init__(self) -> None:
        super().__init__()
        self.mux = Mux(**LIMITS, lines=self.lines)
        self.server = Server()
        self.opening: list[Session] = []
        self.sent: list[Send] = []
        self.waiting: dict[Session, Key] = {}
        self.cancelled: set[Session] = set()
        self.alive: dict[Session, None] = {}
        self.all: list[Ticket] = []
        self.settled: list[Ticket] = []
        self.lost_told: list[Ticket] = []
        self.grants = count()
        """Every second one is answered with an error, although the lock is held (the phantom)."""
        self.room: int | None = None

    @initialize(target=tickets, taken=TAKEN, wishes=WISHES, steps=st.integers(0, 5))
    def begin(self, taken: set[Key], wishes: list[Wish], steps: int) -> Any:
        return self.crowded(taken, wishes, steps)

    def crowded(self, taken: set[Key], wishes: list[Wish], steps: int) -> Any:
        """Others have some keys already, and some of ours have asked: few examples would come to that by themselves."""
        for key in taken:
            self.server.try_lock(key, OTHER)
        asked = [self.asked(*wish) for wish in wishes]
        for _ in range(steps):
            self.step_once()
        return multiple(*asked)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Open(session):
                    self.opening.append(session)
                case Send():
                    assert not any(each.session is action.session for each in self.sent), "one statement at a time"
                    assert action.session not in self.waiting, "a session that waits says nothing else"
                    self.sent.append(action)
                case Wait(session, key):
                    assert session.waits
                    assert not any(each.session is session for each in self.sent)
                    assert not self.is_cancelled_later(session), "the cancel would hit this statement"
                    self.waiting[session] = key
                    self.cancelled.discard(session)
                    if not self.server.try_lock(key, session):
                        self.server.line.setdefault(key, deque()).append(session)
                case Close(session):
                    self.end(session)
                case Settle(ticket):
                    self.settled.append(ticket)
                case Lost(ticket, _):
                    self.lost_told.append(ticket)
        actions.clear()

    def is_cancelled_later(self, session: Session) -> bool:
        """Whether a cancel is on its way to it, or waits for a session that is busy."""
        ops = [op for each in self.sent for op in each.ops] + [op for each in self.mux.holds for op in each.pending]
        return any(op.verb == "cancel" and op.target is session for op in ops)

    def end(self, session: Session) -> None:
        self.alive.pop(session, None)
        self.waiting.pop(session, None)
        self.sent = [each for each in self.sent if each.session is not session]
        self.server.end(session)

    @rule(target=tickets, key=KEYS, waits=WAITS, owner=st.integers(0, 4))
    def ask(self, key: Key, waits: bool, owner: int) -> Ticket:
        return self.asked(key, waits, owner)

    def asked(self, key: Key, waits: bool, owner: int) -> Ticket:
        owned = [
            each
            for each in self.all
            if each.owner == owner and each.state == "held" and each.key == key and not self.is_leaving(each)
        ]
        ticket = Ticket(key, str(key), owner, waits=waits)
        self.all.append(ticket)
        self.do(self.mux.ask(ticket))
        assert not owned or ticket.state == "reentered"
        assert ticket.state in ("queued", "busy", "reentered", "full")
        return ticket

    @rule(ticket=tickets)
    def give_up(self, ticket: Ticket) -> None:
        """Also when it has been granted this very moment, or is long over."""
        self.do(self.mux.give_up(ticket))
        assert ticket.state not in ("queued", "held") or (ticket.state == "held" and self.is_leaving(ticket))

    @precondition(lambda self: self.in_state("queued"))
    @rule(data=st.data())
    def leave_the_line(self, data: Any) -> None:
        self.do(self.mux.give_up(data.draw(st.sampled_from(self.in_state("queued")))))

    def in_state(self, state: str) -> list[Ticket]:
        return [each for each in self.all if each.state == state]

    def is_leaving(self, ticket: Ticket) -> bool:
        claim: Any = self.mux.claims.get(ticket.key)
        return claim is not None and claim.leaving is ticket

    @rule(ticket=tickets)
    def release(self, ticket: Ticket) -> None:
        if ticket.state == "held":
            self.do(self.mux.release(ticket))

    @precondition(lambda self: self.in_state("held"))
    @rule(data=st.data())
    def let_go(self, data: Any) -> None:
        """Also of what is being unlocked already."""
        self.release(data.draw(st.sampled_from(self.in_state("held"))))

    @rule(ticket=tickets)
    def hand_on(self, ticket: Ticket) -> None:
        """As a pump does that looks first whether the lock stays here."""
        if ticket.state == "held" and not self.is_leaving(ticket):
            heir = self.mux.hand_on(ticket)
            self.do(self.mux.release(ticket) if heir is None else [Settle(ticket), Settle(heir)])

    @precondition(lambda self: self.opening)
    @rule(data=st.data())
    def open(self, data: Any) -> None:
        session = data.draw(st.sampled_from(self.opening))
        self.opening.remove(session)
        if data.draw(st.integers(0, 5)):
            self.alive[session] = None
            self.do(self.mux.opened(session))
        else:
            self.do(self.mux.lost(session, ERROR))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        sent = data.draw(st.sampled_from(self.sent))
        self.sent.remove(sent)
        self.execute(sent)

    def execute(self, sent: Send) -> None:
        self.do(self.mux.answered(sent.session, [self.say(sent.session, op) for op in sent.ops]))

    def say(self, session: Session, op: Any) -> Any:
        if op.verb == "try":
            return self.server.try_lock(op.claim.key, session)
        if op.verb == "unlock":
            return self.server.unlock(op.claim.key, session)
        if op.verb == "cancel":
            self.cancelled.add(op.target)
            return True
        return self.room

    @rule(room=st.sampled_from([None, None, None, 0, 1, 2]))
    def fill(self, room: int | None) -> None:
        """How much room the server has, as far as we are concerned."""
        self.room = room

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def refuse(self, data: Any) -> None:
        """An error in the middle of a batch: what came before it was done."""
        sent = data.draw(st.sampled_from(self.sent))
        self.sent.remove(sent)
        for op in sent.ops[: data.draw(st.integers(0, len(sent.ops)))]:
            self.say(sent.session, op)
        self.do(self.mux.refused(sent.session, ERROR))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def serve(self, data: Any) -> None:
        """The server answers one that waits: granted, or an error, or both at once (the phantom)."""
        session = data.draw(st.sampled_from(list(self.waiting)))
        key = self.waiting[session]
        granted = self.server.held.get(key) is session
        cancelled = session in self.cancelled or not granted or data.draw(st.booleans())
        del self.waiting[session]
        if not granted:
            self.server.line[key].remove(session)
        phantom = cancelled and granted and data.draw(st.booleans())
        self.do(self.mux.waited(session, ERROR if phantom or not granted else None))

    @rule(key=KEYS)
    def others(self, key: Key) -> None:
        """Another process takes what is free, or frees what it has."""
        if not self.server.unlock(key, OTHER):
            self.server.try_lock(key, OTHER)

    @rule()
    def catch_up(self) -> None:
        """Whatever is under way is answered, so that what takes many steps is reached in few."""
        self.step_once()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        session = data.draw(st.sampled_from(list(self.alive)))
        self.end(session)
        self.do(self.mux.lost(session, ERROR))

    @rule()
    def sweep(self) -> None:
        self.do(self.mux.sweep())

    @rule()
    def look_again(self) -> None:
        """Here one who waits may come to hold, and wait a second time for what it holds then."""
        waiting = [each for each in self.all if each.state == "queued"]
        self.do(self.mux.look_again(waiting))
        held = {(each.key, each.owner) for each in self.all if each.state == "held" and not self.is_leaving(each)}
        assert not held & {(each.key, each.owner) for each in waiting if each.state == "queued"}

    @invariant()
    def no_key_has_two_holders(self) -> None:
        held = [each.key for each in self.all if each.state == "held" and not self.is_leaving(each)]
        assert len(held) == len(set(held))

    @invariant()
    def whoever_holds_has_it_on_the_server(self) -> None:
        for ticket in self.all:
            if ticket.state == "held" and not self.is_leaving(ticket):
                assert self.server.held.get(ticket.key) is ticket.session

    @invariant()
    def connections_stay_within_the_limit(self) -> None:
        limit = LIMITS["kept"] + LIMITS["extra"]
        assert len(self.alive) + len(self.opening) <= limit + len([each for each in self.opening if each.over])

    @invariant()
    def whoever_is_over_was_told(self) -> None:
        for ticket in self.all:
            assert ticket.state not in ("busy", "reentered", "full", "failed") or ticket in self.settled
            if ticket.state == "lost":  # settled when it was granted, and again if it was just being released
                assert ticket in self.lost_told or self.settled.count(ticket) > 1

    def teardown(self) -> None:
        """Everybody answers, and others let go: then everybody who waits gets it, and at the end nothing is left."""
        self.room = None
        for key in [key for key, who in self.server.held.items() if who == OTHER]:
            self.server.unlock(key, OTHER)
        if self.mux._refused:  # said again at the next look, and not before
            self.sweep()
        for _ in range(500):
            self.step_once()
            for ticket in self.all:
                if ticket.state == "held" and not self.is_leaving(ticket):
                    self.do(self.mux.release(ticket))
            if not (self.opening or self.sent or self.waiting):
                break
        assert [each.state for each in self.all if each.state in ("new", "queued", "held")] == []
        assert self.mux.claims == {}
        assert self.server.held == {}
        for _ in range(3):
            self.sweep()
            self.step_once()
        assert not self.alive, "idle sessions are closed"
        assert self.mux.holds == self.mux.waits == []

    def step_once(self) -> None:
        for session in list(self.opening):
            self.opening.remove(session)
            self.alive[session] = None
            self.do(self.mux.opened(session))
        for sent in list(self.sent):
            if sent in self.sent:
                self.sent.remove(sent)
                self.execute(sent)
        for session, key in list(self.waiting.items()):
            granted = self.server.held.get(key) is session
            if granted or session in self.cancelled:
                if not granted:
                    self.server.line[key].remove(session)
                self.waiting.pop(session)
                error = (None, ERROR, None, LONG_WAIT)[next(self.grants) % 4] if granted else ERROR
                self.do(self.mux.waited(session, error))
