"""The same world with events that are cut short anywhere, as by Ctrl-C in the middle of a pump, and then put right."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from holdfast.lock.mend import mend
from holdfast.lock.mux import Mux
from holdfast.lock.tickets import Action, Key, Open, Settle, Ticket
from tests.interrupts import Interrupt
from tests.lock.internals.mux_world import LIMITS, World

PURE = tuple(f"/holdfast/lock/{name}.py" for name in ("claims", "mend", "mux", "sessions", "standing", "tickets"))


class CutMux(Mux):
    """The next event is cut short at ``cut_at``."""

    cut_at: int | None = None
    was_cut = False
    world: CutWorld


def _cut(name: str) -> Any:
    event = getattr(Mux, name)

    def cut(self: CutMux, *args: Any) -> Any:
        at, self.cut_at = self.cut_at, None
        if at is None:
            return event(self, *args)
        try:
            with Interrupt(at, *PURE):
                return event(self, *args)
        except KeyboardInterrupt:
            self.was_cut = True
            return self.world.put_right(name, *args)

    return cut


EVENTS = ("ask", "give_up", "release", "hand_on", "opened", "answered", "refused", "waited", "lost", "sweep")
for each in EVENTS:
    setattr(CutMux, each, _cut(each))


class CutWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.mux = CutMux(**LIMITS)
        self.mux.world = self
        self.leaving: list[Ticket] = []

    @rule(at=st.integers(0, 250))
    def cut(self, at: int) -> None:
        """The next event, whichever it is."""
        assert isinstance(self.mux, CutMux)
        self.mux.cut_at = at

    def put_right(self, name: str, *args: Any) -> list[Action]:
        self.do(self.mux.told)
        own = args[0] if name in ("ask", "give_up", "release", "hand_on") else None
        busy = {each.session for each in self.sent} | set(self.waiting)
        waiting = [each for each in self.all if each not in (own, *self.settled) and each.state != "gone"]
        leaving = [each for each in self.leaving if each is not own]
        idle = {each for each in self.alive if each not in busy}
        sessions = [*self.alive, *self.opening, *(args[:1] if name == "lost" else ())]  # until it is closed
        self.do(mend(self.mux, sessions, idle, waiting, leaving))
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

    @rule(ticket=World.tickets)
    def hand_on(self, ticket: Ticket) -> None:
        if ticket.state == "held" and not self.is_leaving(ticket):
            heir: Any = self.mux.hand_on(ticket)
            if heir is None:
                CutWorld.release(self, ticket)
            else:  # a list: it was cut short, and given up
                self.do(heir if isinstance(heir, list) else [Settle(ticket), Settle(heir)])

    def is_leaving(self, ticket: Ticket) -> bool:
        return ticket in self.leaving or super().is_leaving(ticket)

    def teardown(self) -> None:
        assert isinstance(self.mux, CutMux)
        self.mux.cut_at = None
        super().teardown()
        assert self.leaving == []
