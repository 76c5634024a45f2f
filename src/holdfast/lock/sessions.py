"""The sessions of the multiplexer: which there are, what is said in them, and when they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.lock.tickets import Action, Claim, Close, Key, Op, Open, Send, Session, Ticket

TURNS = 50
"""How often in a row a lock is handed on here before those in the server's line get their turn."""
PER_SESSION = 300
"""Every statement of a session costs in proportion to the locks it holds: twice as much at a thousand."""
ENDLESS = 2**30 - 1
"""More locks than there is room for anywhere."""
ALONE = ("room", "note")
"""What is said in a statement of its own."""


class Sessions:
    """``kept`` sessions stay for a while when they are free, ``extra`` more are closed at once.

    ``lines``: the server has a fair line for each key. Where there is none, whoever has had its turns stands back.
    ``alone``: whoever takes keys past us does so in the thread that we are in.
    ``awaits``: does one owner await another? Then its block does not end before that one is done.
    """

    def __init__(
        self,
        *,
        kept: int = 15,
        extra: int = 10,
        per_session: int = PER_SESSION,
        turns: int = TURNS,
        lines: bool = True,
        alone: bool = False,
        awaits: Callable[[Any, Any], bool] = lambda one, other: False,
    ) -> None:
        self._lines, self._alone, self._awaits = lines, alone, awaits
        self.kept, self.limit, self.per_session, self.turns = kept, kept + extra, per_session, turns
        self.cap: int | None = None
        """How many locks there may be here. None: not known yet, or not needed."""
        self.due = ENDLESS
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

    def _done(self) -> list[Action]:
        self.told = self._out
        self._out = []
        return self.told

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

    def _ask_room(self, session: Session) -> None:
        """Before whatever is tried next in this session. One that opens asks in any case."""
        if session.opened and not any(op.verb == "room" for op in session.flying + session.pending):
            self._say(session, Op("room"))

    def _say(self, session: Session, op: Op) -> None:
        session.pending.append(op)
        self._flush(session)

    def _flush(self, session: Session) -> None:
        """Everything that has come together while the last statement was under way goes in one."""
        if session.flying or session.solo is not None or session.over or not session.opened:
            return
        if pending := session.pending:
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
