"""What the multiplexer deals in: tickets, claims, sessions, and the actions that a pump carries out for it."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, NamedTuple

Name = str | tuple[str, int]
Key = tuple[bytes, ...]
"""One number (64 bits) or two (32 bits each), in the digits that a server is told: separate spaces."""

State = Literal["new", "queued", "held", "released", "lost", "busy", "reentered", "full", "failed", "gone"]
Stage = Literal["asking", "held", "freeing", "refused", "parked", "waiting", "stopping"]
Verb = Literal["try", "unlock", "cancel", "room", "note"]


class Ticket:
    """One wish for one key, from the asking to the end of the holding. ``bell``, ``tell``, ``thread`` and ``deadline``
    are the pump's."""

    __slots__ = (
        "bell", "block", "claim", "contended", "deadline", "heirs", "key", "name", "owner", "problem", "session",
        "state", "tell", "thread", "waits",
    )  # fmt: skip

    def __init__(self, key: Key, name: str, owner: object, waits: bool) -> None:
        self.key, self.name = key, name
        self.owner, self.waits = owner, waits
        self.state: State = "new"
        self.session: Session | None = None
        self.claim: Claim | None = None
        """Where it stands in line, or stood; or what became of it when others came. None: it was taken past the state
        machine, see ``Mux.ask``, and is unlocked so as well."""
        self.problem: Exception | None = None
        self.contended = False
        """Somebody else has, or had, it: we are not merely waiting for an answer."""
        self.heirs: Claim | None = None
        """Who stands in line for a key that was taken past the state machine, see ``Mux.ask``."""
        self.block = False
        """It is held by a block, which gives it back when it ends; else by whoever has the grant."""
        self.bell: Any = None
        self.tell: Any = None
        self.thread: object = None
        """Which thread is in the middle of a call for it. None: none any more, the pump has it."""
        self.deadline = 0.0


class Session:
    """One connection, opening, open or gone. ``wire`` and ``solo`` are the pump's."""

    __slots__ = (
        "__weakref__", "cancelling", "claim", "ended", "flying", "held", "opened", "over", "pending", "solo", "used",
        "waits", "wire",
    )  # fmt: skip

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self.opened = self.over = False
        self.used = True
        self.held: dict[Key, Claim | Ticket] = {}
        self.pending: list[Op] = []
        self.flying: list[Op] = []
        self.claim: Claim | None = None
        """What a session that waits is there for."""
        self.cancelling = self.ended = False
        self.solo: Ticket | None = None
        """Whose question is under way past us, see ``Mux.ask``."""
        self.wire: Any = None


class Claim:
    """A key that this client has, or is asking for, and who stands in line for it."""

    __slots__ = ("handed", "holder", "key", "leaving", "losses", "queue", "session", "stage")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.stage: Stage = "asking"
        self.holder: Ticket | None = None
        self.queue: deque[Ticket] = deque()
        self.session: Session | None = None
        self.leaving: Ticket | None = None
        """Whoever wants to know that it is unlocked."""
        self.handed = self.losses = 0


class Op(NamedTuple):
    """One thing to say in a session that holds, or an unlock in one that waits."""

    verb: Verb
    claim: Claim | None = None
    target: Session | None = None
    text: str = ""


class Unheard:
    """Instead of an answer: whoever was to hear it was interrupted, and it may have been yes or no."""


class Open(NamedTuple):
    session: Session


class Send(NamedTuple):
    session: Session
    ops: list[Op]


class Wait(NamedTuple):
    """Stand in the server's line for the key; ``Mux.waited`` when that is over."""

    session: Session
    key: Key


class Close(NamedTuple):
    session: Session


class Settle(NamedTuple):
    """The ticket's state says how it went."""

    ticket: Ticket


class Lost(NamedTuple):
    """It was held, and its session is gone."""

    ticket: Ticket
    error: Exception


Action = Open | Send | Wait | Close | Settle | Lost
