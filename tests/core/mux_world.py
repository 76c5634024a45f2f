"""A model of the server and of a pump, for the multiplexer to be let loose in."""

from __future__ import annotations

import sys
from collections import deque
from itertools import count
from types import FrameType
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.core.mend import mend
from holdfast.core.mux import Mux
from holdfast.core.tickets import Action, Close, Key, Lost, Op, Open, Send, Session, Settle, Ticket, Wait

KEYS = st.sampled_from([(1,), (2,), (3, 4)])
OTHER = "another process"
ERROR = ConnectionError("the test says so")


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
        self.mux = Mux(kept=2, extra=2, per_session=3, turns=2, lines=self.lines)
        self.server = Server()
        self.opening: list[Session] = []
        self.sent: list[Send] = []
        self.waiting: dict[Session, Key] = {}
        self.cancelled: set[Session] = set()
        self.alive: dict[Session, None] = {}
        self.all: list[Ticket] = []
        self.settled: list[Ticket] = []
        self.lost_told: list[Ticket] = []
        self.numbers = count()
        self.room: int | None = None

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
                    assert not session.cancelling, "the cancel would hit this statement"
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

    def end(self, session: Session) -> None:
        self.alive.pop(session, None)
        self.waiting.pop(session, None)
        self.sent = [each for each in self.sent if each.session is not session]
        self.server.end(session)

    @rule(target=tickets, key=KEYS, waits=st.booleans(), owner=st.integers(0, 2))
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

    def is_leaving(self, ticket: Ticket) -> bool:
        claim: Any = self.mux.claims.get(ticket.key)
        return claim is not None and claim.leaving is ticket

    @rule(ticket=tickets)
    def release(self, ticket: Ticket) -> None:
        if ticket.state == "held":
            self.do(self.mux.release(ticket))

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

    @rule(room=st.one_of(st.none(), st.integers(0, 2)))
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
        cancelled = session in self.cancelled or data.draw(st.integers(0, 4)) == 0
        if not granted and not cancelled:
            return
        del self.waiting[session]
        if not granted:
            self.server.line[key].remove(session)
        phantom = cancelled and granted and data.draw(st.booleans())
        self.do(self.mux.waited(session, ERROR if phantom or not granted else None))

    @rule(key=KEYS)
    def others(self, key: Key) -> None:
        """Another process takes what is free, or frees what it has."""
        if not self.server.try_lock(key, OTHER) if self.server.held.get(key) != OTHER else True:
            return
        self.server.unlock(key, OTHER) if self.server.held.get(key) == OTHER and next(self.numbers) % 2 else None

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        session = data.draw(st.sampled_from(list(self.alive)))
        self.end(session)
        self.do(self.mux.lost(session, ERROR))

    @rule()
    def sweep(self) -> None:
        self.do(self.mux.sweep())

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
        assert len(self.alive) + len(self.opening) <= 4 + len([each for each in self.opening if each.over])

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
                self.do(self.mux.waited(session, None if granted else ERROR))


class PastWorld(World):
    """The same, and a pump that takes and unlocks free keys past the multiplexer, as the pumps do; without lines."""

    lines = False

    @initialize()
    def begin(self) -> None:
        """With a session that is free."""
        first = self.asked((9,), True, 9)
        for _ in range(4):
            self.step_once()
        self.do(self.mux.release(first))
        self.step_once()
        assert self.free_session() is not None

    def free_session(self) -> Session | None:
        for session in self.mux.holds:
            if session in self.alive and not session.flying and len(session.held) < self.mux.per_session:
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
        session.flying = [Op("note")]
        for other in range(data.draw(st.integers(0, 2))):
            self.asked(key, data.draw(st.booleans()), 5 + other)
        end = data.draw(st.sampled_from(["answered", "answered", "answered", "interrupted", "granted and interrupted"]))
        got = end != "interrupted" and self.server.try_lock(key, session)
        session.flying = []
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


class Interrupt:
    """Raises before instruction number ``at`` of the multiplexer."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        if "/holdfast/core/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self._left -= 1
            if self._left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._step


class CutMux(Mux):
    """The next event is cut short at ``cut_at``."""

    cut_at: int | None = None
    world: CutWorld


def _cut(name: str) -> Any:
    event = getattr(Mux, name)

    def cut(self: CutMux, *args: Any) -> Any:
        at, self.cut_at = self.cut_at, None
        if at is None:
            return event(self, *args)
        try:
            with Interrupt(at):
                return event(self, *args)
        except KeyboardInterrupt:
            return self.world.put_right(name, *args)

    return cut


EVENTS = ("ask", "give_up", "release", "opened", "answered", "refused", "waited", "lost", "sweep")
for each in EVENTS:
    setattr(CutMux, each, _cut(each))


class CutWorld(World):
    """The same, with events that are cut short anywhere, as by Ctrl-C in the middle of a pump, and then put right."""

    def __init__(self) -> None:
        super().__init__()
        self.mux = CutMux(kept=2, extra=2, per_session=3, turns=2)
        self.mux.world = self
        self.leaving: list[Ticket] = []

    @rule(at=st.integers(0, 250))
    def cut(self, at: int) -> None:
        """The next event, whichever it is."""
        assert isinstance(self.mux, CutMux)
        self.mux.cut_at = at

    def put_right(self, name: str, *args: Any) -> list[Action]:
        self.do(self.mux.told)
        own = args[0] if name in ("ask", "give_up", "release") else None
        busy = {each.session for each in self.sent} | set(self.waiting)
        waiting = [each for each in self.all if each.state in ("new", "queued") and each is not own]
        leaving = [each for each in self.leaving if each is not own]
        idle = {each for each in self.alive if each not in busy}
        self.do(mend(self.mux, [*self.alive, *self.opening], idle, waiting, leaving))
        if own is not None:
            actions = self.mux.give_up(own)
            if own.state == "new":  # it had not even begun
                own.state = "gone"
            return actions
        if name == "lost":
            return self.mux.lost(*args)
        return []

    def do(self, actions: list[Action]) -> None:
        for action in list(actions):
            if isinstance(action, Open):
                if action.session in self.opening:
                    actions.remove(action)
                self.alive.pop(action.session, None)
            elif isinstance(action, Settle) and action.ticket in self.leaving:
                self.leaving.remove(action.ticket)
        super().do(actions)

    def asked(self, key: Key, waits: bool, owner: int) -> Ticket:
        assert isinstance(self.mux, CutMux)
        if self.mux.cut_at is None:
            return super().asked(key, waits, owner)
        ticket = Ticket(key, str(key), owner, waits=waits)
        self.all.append(ticket)
        self.do(self.mux.ask(ticket))
        return ticket

    @rule(ticket=World.tickets)
    def release(self, ticket: Ticket) -> None:
        if ticket.state == "held" and ticket not in self.leaving:
            self.leaving.append(ticket)
            self.do(self.mux.release(ticket))

    def is_leaving(self, ticket: Ticket) -> bool:
        return ticket in self.leaving or super().is_leaving(ticket)

    def teardown(self) -> None:
        assert isinstance(self.mux, CutMux)
        self.mux.cut_at = None
        super().teardown()
        assert self.leaving == []
