"""Many locks over few sessions: decides what to send where, who is next, and when a session ends.

A *hold* session runs statements that never wait, for up to 300 locks. A key that another client holds gets a *wait*
session, which blocks in the server's queue and keeps the lock it wins. Requests for a key that this client already
has, or already asks for, queue here, first come, first served, and are handed the lock without a round trip: at most
fifty times in a row, because other clients wait in the server's queue.

    a request     new -> queued -> held -> released
                   |      |         `-> lost            its session is gone
                   |      `-> busy, full, failed, gone  gone: it timed out or was cancelled
                   `-> busy, reentered, full, failed

    a key         asking -> held -> freeing             on a hold session
                    `-> waiting -> held -> freeing      on a wait session; parked until there is one
                          `-> stopping                  no request waits in this mode any more: it is being cancelled
                  freeing -> refused                    the server did not unlock it; the sweep tries again

The pool does no I/O and knows no clock, no thread and no event loop. Its executor calls its methods, the *events*,
under one lock, one at a time. What is to be done is appended to ``actions``, and requests that are decided to
``wakes``; both stay there until the executor is done with them, so that an interrupt loses none. A session that
``acquire`` or ``release`` returns is for the caller, who sends its own try or unlock there; then ``sender_answered``,
``refused`` or ``unanswered``.

Invariants:
- A statement that is under way belongs to its key and not to the request that caused it. A request that gives up leaves
  the queue; an answer goes to the first in the queue, and if there is none, the key is unlocked.
- After an error the key is unlocked in any case: the server may hold it although it answered with an error.
- An open session has something ``pending`` only while a statement is under way.
- Only the methods of ``Pool`` change a pool, its entries, its sessions and the states of its requests. The executor
  sets the few attributes that are called its own.
- ``writer`` is set while an event changes the pool. If it is set when the next event begins, the last one was
  interrupted, and nothing here can be trusted: ``successor`` is a new pool, which closes all sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, NamedTuple

from holdfast.lock.terms import Key, State

TURNS = 50
"""How many requests get a key here, by hand-over or as readers that join others, before it is unlocked for other
clients. Readers that wait together when it is granted do not count. If no other client waits, the count begins anew."""
PER_SESSION = 300
"""Every statement of a session costs in proportion to the locks that the session holds: twice as much at 1,000."""
SPEND, SHARE = 32, 64
"""After how many more keys the room in the server's lock table is asked for again: this many, but at most this share of
the room, because other clients were told of the same room."""
MAX_LOSSES = 3
"""How often a key is asked for again after its session was lost, before its requests fail."""
UNLIMITED = 2**30
WAITED_LONG = "55P03"
"""The SQLSTATE of a wait that ended by lock_timeout: it goes to the end of the queue, so that vacuum can proceed."""
ALONE = ("room", "note", "rivals")
"""Ops that are sent in a statement of their own."""

Verb = Literal["try", "unlock", "cancel", "room", "note", "rivals"]
Stage = Literal["asking", "held", "freeing", "refused", "parked", "waiting", "stopping"]


class LockRequest:
    """A caller's wish for one key, until the lock is released. ``owner``, ``waker``, ``on_loss``, ``caller``, ``since``
    and ``deadline`` are the executor's."""

    __slots__ = (
        "__weakref__", "caller", "contended", "deadline", "entry", "error", "key", "label", "on_loss", "owner",
        "shared", "since", "state", "waits", "waker",
    )  # fmt: skip

    def __init__(self, key: Key, label: str, waits: bool, shared: bool) -> None:
        self.key, self.label = key, label
        self.waits, self.shared = waits, shared
        self.state: State = "new"
        self.owner: object = None
        self.entry: Entry | None = None
        self.error: Exception | None = None
        self.contended = False
        """Another holder has the key, or had it: the request does not merely wait for an answer."""
        self.waker: Any = None
        self.on_loss: Any = None
        self.caller: object = None
        """Who is in a call for it, and sends for it: not always the owner, because any thread may release."""
        self.since = self.deadline = 0.0
        """``since``: when its own statement was sent; if it had to wait for more than that, when it was decided."""


class Entry:
    """A key that this client has or asks for, its holders, and the requests in the queue for it."""

    __slots__ = ("asks_rivals", "handed", "holders", "key", "leaving", "losses", "queue", "session", "shared", "stage")

    def __init__(self, key: Key, first: LockRequest) -> None:
        self.key = key
        self.shared = first.shared
        """The mode in which the server is asked, or holds it."""
        self.stage: Stage = "asking"
        self.session: LockSession | None = None
        self.leaving: LockRequest | None = None
        """The request whose release waits for the unlock."""
        self.handed = self.losses = 0
        self.asks_rivals = False
        """The server is asked whether other clients wait for it."""
        self.holders: list[LockRequest] = []
        self.queue = [first]  # a deque takes 600 bytes more, and most queues stay empty


class Note(NamedTuple):
    """Rows for ``locks.list()``. ``held``: for each key, the seconds that this session has held it (None: another one
    does), and how many requests wait for it in this process."""

    is_first: bool
    names: list[tuple[Key, str]]
    held: list[tuple[Key, float | None, int]]
    gone: list[Key]


class Op(NamedTuple):
    """A part of a statement. ``target``: the session whose statement is cancelled. ``note``: what is written down."""

    verb: Verb
    entry: Entry | None = None
    target: LockSession | None = None
    note: Note | None = None


Answers = Sequence[bool | int | None]
"""To a statement: one for each op."""


class LockSession:
    """One connection: being opened, open, or over. ``wire`` and ``noted`` belong to the executor."""

    __slots__ = (
        "cancelling", "ended", "entry", "flight", "held", "noted", "opened", "over", "pending", "sender", "used",
        "waits", "wire",
    )  # fmt: skip

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self.opened = self.over = False
        self.used = True
        """Since the last sweep."""
        self.held: dict[Key, Entry] = {}
        """Keys that it holds, asks for or waits for."""
        self.flight: list[Op] = []
        """The statement of the executor that is under way."""
        self.pending: list[Op] = []
        """What is sent after it, in one statement."""
        self.sender: LockRequest | None = None
        """The request whose own try or unlock is under way: its caller has sent it. Then there is no ``flight``."""
        self.entry: Entry | None = None
        """What a wait session waits for."""
        self.cancelling = self.ended = False
        """Of a wait session that is stopping: its cancel is not yet answered; its wait has ended."""
        self.wire: Any = None
        self.noted: dict[Key, tuple[LockRequest | None, int]] | None = None
        """What the database knows of its keys: the holder, and how many wait here. None: it was not told yet."""

    @property
    def under_way(self) -> list[Op]:
        """What was sent and is not answered."""
        if self.sender is None or self.sender.entry is None:
            return self.flight
        return [Op("unlock" if self.sender.entry.stage == "freeing" else "try", self.sender.entry)]


class Open(NamedTuple):
    session: LockSession


class Send(NamedTuple):
    """Send ``session.flight``; then ``answered`` or ``refused``."""

    session: LockSession


class Wait(NamedTuple):
    """Block in the server's queue for the key of ``session.entry``; then ``waited``."""

    session: LockSession


class Close(NamedTuple):
    """Then ``closed``, if the session is in ``closing``."""

    session: LockSession


class Lose(NamedTuple):
    """The request was held, and its session is gone."""

    request: LockRequest
    error: Exception


Action = Open | Send | Wait | Close | Lose


class Counts(NamedTuple):
    held: int
    waiting: int
    """Requests behind another holder, of this client or another one."""


class Pool:
    """There are at most ``kept + extra`` sessions, also as the server counts them: if one is needed while the server is
    still closing another, it is opened after that. Sessions that were lost do not count. A wait session that becomes
    idle is closed at once if there are more than ``kept``; every other idle session is closed after two sweeps.

    ``server_queues``: the server has a fair queue for each key. If it has none, a key is not asked for again at once
    after it was handed over ``turns`` times.
    """

    def __init__(
        self,
        *,
        kept: int = 15,
        extra: int = 10,
        per_session: int = PER_SESSION,
        turns: int = TURNS,
        server_queues: bool = True,
    ) -> None:
        self.kept, self.limit, self.per_session, self.turns = kept, kept + extra, per_session, turns
        self._server_queues = server_queues
        self.writer: object = None
        """The caller of the event in progress, or of one that was interrupted."""
        self.actions: deque[Action] = deque()
        self.wakes: deque[LockRequest] = deque()
        """Requests whose state is decided, and whose callers wait for it."""
        self.entries: dict[Key, Entry] = {}
        self.holds: list[LockSession] = []
        self.waits: list[LockSession] = []
        self._idle_waits: list[LockSession] = []
        self.closing: set[LockSession] = set()
        """Closed here, and not yet by the server."""
        self._unopened: deque[LockSession] = deque()
        """They are opened when one of ``closing`` is closed."""
        self._parked: deque[Entry] = deque()
        """Contended keys for which there is no session to wait in."""
        self._refused: list[Entry] = []
        """Keys that the server would not unlock; the sweep tries again."""
        self.cap: int | None = None
        """How many keys there may be here, by the room in the server's lock table. None: unknown, or no limit."""
        self._due = UNLIMITED
        """With how many keys the room is asked for again."""
        self._plenty = per_session
        """With fewer keys than this there is room in every session and in the server's lock table."""
        self._spend = 0
        self._full = False
        self._closed: Exception | None = None

    @property
    def sessions(self) -> list[LockSession]:
        return [*self.holds, *self.waits]

    def counts(self) -> Counts:
        entries = list(self.entries.values())
        return Counts(
            sum(len(entry.holders) for entry in entries),
            sum(len(entry.queue) for entry in entries if entry.stage != "asking"),
        )

    # Events of callers

    def acquire(self, request: LockRequest) -> LockSession | None:
        """Ask for a key. Returns the session on which the caller sends its own try. None: the request is decided, or
        will be in ``wakes``."""
        self.writer = request.owner
        key, entries, holds = request.key, self.entries, self.holds
        session = holds[0] if holds else None
        if (
            session is None or session.sender or session.flight or not session.opened
            or key in entries or len(entries) >= self._plenty
        ):  # fmt: skip
            session = self._ask(request)
        else:  # hot: what ``_ask`` does for a new key and a free session
            session.sender, session.used = request, True
            request.entry = entries[key] = session.held[key] = entry = Entry(key, request)
            entry.session, request.state = session, "queued"
        self.writer = None
        return session

    def release(self, request: LockRequest, caller: object) -> LockSession | None:
        """The holder is done. Returns the session on which the caller sends the unlock. None: the request is released,
        or will be in ``wakes``."""
        self.writer = caller
        entry, session = request.entry, None
        if request.state == "held" and entry is not None and request in entry.holders:
            entry.holders.remove(request)
            session = entry.session
            if session is None or session.sender or session.flight or session.waits or entry.queue or entry.holders:
                session = self._leave(entry, request, sends=True)
            else:  # hot: what ``_leave`` does for a free session
                entry.stage, entry.leaving, session.sender = "freeing", request, request
        self.writer = None
        return session

    def _ask(self, request: LockRequest) -> LockSession | None:
        key, entries = request.key, self.entries
        entry = entries.get(key)
        if self._closed is not None:
            request.state, request.error = "failed", self._closed
        elif entry is not None:
            self._join(entry, request)
        elif self.cap is not None and len(entries) >= self.cap:
            self._full = True
            request.state = "full"
        else:
            request.entry = entries[key] = entry = Entry(key, request)
            request.state = "queued"
            if len(entries) > self._due:
                self._ask_room(self._hold_session())
            return self._try(entry, request)
        return None

    def give_up(self, request: LockRequest, caller: object) -> None:
        """It timed out, was cancelled or interrupted. Nothing of it stays, whatever was granted meanwhile."""
        self.writer = caller
        entry = request.entry
        if request.state == "queued" and entry is not None:
            entry.queue.remove(request)
            request.state = "gone"
            if not entry.queue or (entry.stage == "waiting" and entry.queue[0].shared and not entry.shared):
                self._stop_waiting(entry)
            elif entry.stage == "held" and entry.shared:
                self._admit(entry)
        elif request.state == "held" and entry is not None and request in entry.holders:
            entry.holders.remove(request)
            self._leave(entry, request, sends=False)
        self.writer = None

    def close(self, error: Exception, caller: object) -> None:
        """All locks end, all sessions are closed, and further requests fail."""
        self.writer, self._closed = caller, error
        for entry in list(self.entries.values()):
            for request in entry.holders:
                request.state = "released"
            if entry.leaving is not None:
                entry.leaving.state = "released"
                self._wake(entry.leaving)
            self._fail(entry, error)
        self.entries.clear()
        self._parked.clear()
        for session in self.sessions:
            self._end(session)
        self.closing.clear()
        self.writer = None

    # Events of sessions

    def opened(self, session: LockSession, caller: object) -> None:
        self.writer = caller
        session.opened = session.used = True
        if session.over:
            self.actions.append(Close(session))
        elif not session.waits:
            session.pending.insert(0, Op("room"))
            self._flush(session)
        elif session.entry is not None:
            self.actions.append(Wait(session))
        else:
            self._set_idle(session)
        self.writer = None

    def sender_answered(self, session: LockSession, answer: bool, caller: object) -> bool:
        """The own try or unlock of ``session.sender`` was answered. True: the executor has something to do."""
        self.writer = caller
        request, session.sender = session.sender, None
        entry = None if request is None else request.entry
        if entry is not None and entry.session is session and not session.over:
            if entry.stage == "freeing":
                self._unlocked(entry)
            elif answer:
                self._granted(entry)
            else:
                self._denied(entry)
            if session.pending:
                self._flush(session)
        self.writer = None
        return bool(self.actions or self.wakes or session.over)

    def answered(self, session: LockSession, answers: Sequence[Any], caller: object) -> None:
        """``session.flight`` was answered, with one value for each op."""
        self.writer = caller
        flight, session.flight = session.flight, []
        if not session.over:
            for op, answer in zip(flight, answers, strict=True):
                if op.verb == "room":
                    self._set_room(session, answer)
                elif op.verb == "cancel":
                    self._cancelled(op.target)
                elif op.verb == "rivals":
                    self._set_rivals(op.entry, bool(answer))
                elif op.entry is None or op.entry.session is not session:
                    pass  # a note, or a key that was lost meanwhile
                elif op.verb == "unlock":
                    self._unlocked(op.entry)
                elif answer:
                    self._granted(op.entry)
                else:
                    self._denied(op.entry)
            self._flush(session)
        self.writer = None

    def refused(self, session: LockSession, error: Exception, caller: object) -> None:
        """What was under way was answered with an error. A part of it may be done: what was tried is unlocked."""
        self.writer = caller
        ops, session.flight, session.sender = session.under_way, [], None
        for op in ops:
            if op.verb == "cancel":
                self._drop(op.target, error)
            elif op.verb == "rivals":
                self._set_rivals(op.entry, True)
            elif op.entry is not None and op.entry.session is session:
                if op.verb == "try":
                    self._fail(op.entry, error)
                    self._unlock(op.entry)
                elif len(ops) > 1:  # another op may have caused the error
                    self._unlock(op.entry)
                else:
                    op.entry.stage = "refused"
                    self._refused.append(op.entry)
        self._flush(session)
        self.writer = None

    def unanswered(self, session: LockSession, caller: object) -> None:
        """The caller that used the session was interrupted or timed out: whether its op was sent, and what was
        answered, is unknown. Its key is unlocked, and tried again if it has a queue."""
        self.writer = caller
        request, session.sender = session.sender, None
        entry = None if request is None else request.entry
        if not session.over:
            if entry is not None and entry.session is session:
                self._unlock(entry)
            self._flush(session)
        self.writer = None

    def left(self, session: LockSession, caller: object) -> None:
        """Its sender will not use it any more: the session has ended, or is about to."""
        self.writer = caller
        session.sender = None
        self.writer = None

    def waited(self, session: LockSession, error: Exception | None, caller: object) -> None:
        """``Wait`` has ended: with the lock, or with an error, and then the server may hold it all the same."""
        self.writer = caller
        entry = session.entry
        if not session.over and entry is not None:
            session.ended = True
            if entry.stage == "stopping":
                self._stopped(session)
            elif error is None:
                self._granted(entry)
            else:
                if getattr(error, "sqlstate", None) != WAITED_LONG:
                    self._fail(entry, error)
                self._unlock(entry)
        self.writer = None

    def closed(self, session: LockSession, caller: object) -> None:
        """The server has closed it, too."""
        self.writer = caller
        self.closing.discard(session)
        self._open_next()
        self.writer = None

    def lost(self, session: LockSession, error: Exception, caller: object) -> None:
        """The session is gone, or could not be opened. The server frees what it held."""
        self.writer = caller
        self._drop(session, error)
        self.writer = None

    def sweep(self, caller: object) -> None:
        """Now and then: close sessions that were not used since the last time, unlock again what was refused, cancel
        again what did not stop, and try parked keys."""
        self.writer = caller
        is_waiting = any(entry.stage == "waiting" for entry in self.entries.values())
        for session in self.sessions:
            is_needed = is_waiting and not session.waits  # to cancel a wait, and to note who waits
            if session.held or session.pending or session.under_way or not session.opened or is_needed:
                session.used = True
            elif session.used:
                session.used = False
            else:
                self._end(session)
        open_session = next((each for each in self.holds if each.opened), None)
        if self._full and open_session is not None:
            self._full = False
            self._ask_room(open_session)
        elif self.cap is not None:  # other clients may have taken the room of locks that were released since
            self._set_due(min(self._due, len(self.entries) + self._spend))
        refused, self._refused = self._refused, []
        for entry in refused:
            if entry.stage == "refused":
                self._unlock(entry)
        for session in list(self.waits):
            stopping = session.entry is not None and session.entry.stage == "stopping"
            if stopping and not session.ended and not session.cancelling:
                self._cancel(session)  # the last cancel arrived before the statement did
        for entry in list(self.entries.values()):
            if entry.queue and entry.queue[0].shared:
                self._ask_rivals(entry)
        parked, self._parked = self._parked, deque()
        for entry in parked:  # it may be free by now, or there may be a session to wait in
            self._try(entry)
        self.writer = None

    # After an interrupt in the middle of an event

    def break_off(self, caller: object) -> None:
        """If it was an event of this caller: the caller has left it, and may call again."""
        if self.writer is caller:
            self.writer = self

    def successor(
        self,
        error: Exception,
        sessions: Iterable[LockSession],
        waiting: Iterable[LockRequest],
        in_use: AbstractSet[LockSession],
    ) -> Pool:
        """A new pool, which begins with closing ``sessions`` and reporting every grant as lost. Requests that wait have
        failed: those in the queues here, and ``waiting``, which an interrupted event may have taken out of them.
        ``in_use``: sessions that a caller's thread reads from. If this is interrupted, too, it can be repeated."""
        pool = Pool(
            kept=self.kept, extra=self.limit - self.kept, per_session=self.per_session, turns=self.turns,
            server_queues=self._server_queues,
        )  # fmt: skip
        losses = {action.request: action for action in self.actions if isinstance(action, Lose)}
        entries = list(self.entries.values())
        for request in [each for entry in entries for each in (*entry.holders, entry.leaving) if each is not None]:
            losses.setdefault(request, Lose(request, error))
            request.state, request.error = "lost", error
        failed = {*waiting, *(request for entry in entries for request in entry.queue)} - losses.keys()
        for request in failed:
            request.state, request.error = "failed", error
        pool.closing = self.closing.copy()
        for session in sessions:
            session.over = True
            if session.opened and session not in in_use:
                pool.closing.add(session)
            pool.actions.append(Close(session))
        pool.actions.extend(losses.values())
        pool.wakes.extend(request for request in (*losses, *failed) if request.waker is not None)
        return pool

    def fail(self, request: LockRequest, undecided: State, error: Exception) -> None:
        """This pool has a successor, and an interrupted event had lost the request."""
        if request.state == undecided:
            request.state, request.error = "failed", error

    # Notes for ``locks.list()``

    def note(self, session: LockSession, note: Note, caller: object) -> None:
        """Write something down in a session that is open and does not wait, behind what is sent there for callers."""
        self.writer = caller
        self._enqueue(session, Op("note", note=note))
        self.writer = None

    def can_note(self, session: LockSession) -> bool:
        if not session.opened or session.over or any(op.verb == "note" for op in session.flight + session.pending):
            return False
        return not session.waits or (session.entry is not None and session.entry.stage == "held")

    def labels(self) -> dict[Key, str]:
        """Names of what is locked or asked for here: the database has them a moment later."""
        requests = [each for entry in list(self.entries.values()) for each in (*entry.holders, *entry.queue)]
        return {request.key: request.label for request in requests}

    def waiting(self, entry: Entry) -> int:
        """How many requests wait for a key, other than in a session that the server's list of locks shows."""
        if entry.stage == "asking":
            return 0
        return len(entry.queue) - (entry.stage == "waiting" and self._server_queues)

    # The queue of a key

    def _join(self, entry: Entry, request: LockRequest) -> None:
        """A request for a key that is known here."""
        owner, label = request.owner, request.label
        for holder in entry.holders:
            if holder.owner == owner and holder.label == label:
                request.state = "reentered"
                return
        beside = request.shared and entry.shared and all(other.shared for other in entry.queue)
        if beside and entry.stage == "held" and entry.handed < self.turns:
            entry.handed += 1
            self._hold(entry, request)
        elif beside and entry.stage == "held":
            request.entry, request.state, request.contended = entry, "queued", True
            entry.queue.append(request)
            self._ask_rivals(entry)
        elif not request.waits and (entry.holders or entry.queue) and not (beside and entry.stage == "asking"):
            request.state, request.contended = "busy", True
        else:
            request.contended = entry.stage != "asking"
            request.entry, request.state = entry, "queued"
            entry.queue.append(request)

    def _wake(self, request: LockRequest) -> None:
        if request.waker is not None:  # None: its caller sends for it, and looks at the state itself
            self.wakes.append(request)

    def _hold(self, entry: Entry, request: LockRequest) -> None:
        entry.holders.append(request)
        request.entry, request.state = entry, "held"

    def _admit(self, entry: Entry) -> None:
        """Readers at the head of the queue join the readers that hold it."""
        while entry.queue and entry.queue[0].shared and entry.handed < self.turns:
            entry.handed += 1
            self._hold(entry, request := entry.queue.pop(0))
            self._wake(request)

    def _ask_rivals(self, entry: Entry) -> None:
        """Readers hold it, and as many have joined as may: more may join if no other client waits for it."""
        session, is_full = entry.session, entry.shared and entry.handed >= self.turns
        if entry.stage == "held" and is_full and session is not None and not entry.asks_rivals:
            entry.asks_rivals = True
            self._enqueue(session, Op("rivals", entry))

    def _set_rivals(self, entry: Entry | None, waits: bool) -> None:
        if entry is None:
            return
        entry.asks_rivals = False
        if not waits:
            entry.handed = 0
            if entry.stage == "held" and entry.shared:
                self._admit(entry)
                return
        for request in [each for each in entry.queue if not each.waits and each.shared and entry.stage == "held"]:
            entry.queue.remove(request)
            request.state = "busy"
            self._wake(request)

    def _granted(self, entry: Entry) -> None:
        """The server gave it to us. The mode may not be the one that the first in the queue wants: others gave up."""
        queue = entry.queue
        if not queue or queue[0].shared != entry.shared:
            self._unlock(entry)
            return
        entry.stage, entry.losses = "held", 0
        request = queue.pop(0)
        entry.holders.append(request)
        request.state = "held"
        if request.waker is not None:
            self.wakes.append(request)
        if queue:
            while entry.shared and queue and queue[0].shared:
                self._hold(entry, request := queue.pop(0))
                self._wake(request)
            for request in queue:
                request.contended = True

    def _leave(self, entry: Entry, request: LockRequest, *, sends: bool) -> LockSession | None:
        """A holder has left: to the next in the queue, or back to the server. ``sends``: its caller can send."""
        queue = entry.queue
        if entry.holders:
            request.state = "released"
        elif queue and queue[0].shared == entry.shared and entry.handed < self.turns:
            request.state = "released"
            entry.handed += 1
            self._hold(entry, heir := queue.pop(0))
            self._wake(heir)
            if entry.shared:
                self._admit(entry)
        else:
            entry.handed = 0
            entry.leaving = request
            return self._unlock(entry, request if sends else None)
        return None

    def _fail(self, entry: Entry, error: Exception) -> None:
        while entry.queue:
            request = entry.queue.pop(0)
            request.state, request.error = "failed", error
            self._wake(request)

    def _forget(self, entry: Entry) -> None:
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]

    def _detach(self, entry: Entry) -> None:
        """It has nothing to do with its session any more."""
        session, entry.session = entry.session, None
        if session is not None:
            session.held.pop(entry.key, None)

    # What is sent

    def _try(self, entry: Entry, sender: LockRequest | None = None) -> LockSession | None:
        holds = self.holds
        session = holds[0] if holds and len(holds[0].held) < self.per_session else self._hold_session()
        entry.stage, entry.session, entry.shared = "asking", session, entry.queue[0].shared
        session.held[entry.key] = entry
        return self._enqueue(session, Op("try", entry), sender)

    def _unlock(self, entry: Entry, sender: LockRequest | None = None) -> LockSession | None:
        entry.stage = "freeing"
        session = entry.session
        if session is None:
            self._unlocked(entry)
            return None
        return self._enqueue(session, Op("unlock", entry), sender)

    def _unlocked(self, entry: Entry) -> None:
        request, entry.leaving = entry.leaving, None
        if request is not None:
            request.state = "released"
            if request.waker is not None:
                self.wakes.append(request)
        session, queue = entry.session, entry.queue
        if session is not None and not queue and not session.waits:  # hot: bench lock_pair
            del session.held[entry.key], self.entries[entry.key]
            entry.session = None
            return
        entry.handed = 0
        if session is not None and session.waits:  # it waits next, and can note nothing then
            session.pending.clear()
            session.noted = None
        if queue and session is not None and session.waits and all(each.waits for each in queue):
            self._wait_in(session, entry)
            return
        self._detach(entry)
        if session is not None and session.waits:
            session.entry = None
            self._set_idle(session)
        if queue and request is not None and not self._server_queues:
            self._contended(entry)
        elif queue:
            self._try(entry)
        else:
            self._forget(entry)

    def _denied(self, entry: Entry) -> None:
        """Another client has it."""
        self._detach(entry)
        if entry.queue and entry.queue[0].shared and not entry.shared:
            self._try(entry)  # the writer gave up; a reader may be granted what a writer is not
        else:
            self._contended(entry)

    def _contended(self, entry: Entry) -> None:
        """Another client has it: requests that do not wait are refused, the others wait in the server's queue."""
        for request in [each for each in entry.queue if not each.waits]:
            entry.queue.remove(request)
            request.state = "busy"
            self._wake(request)
        for request in entry.queue:
            request.contended = True
        if not entry.queue:
            self._forget(entry)
        elif self._idle_waits:
            self._wait_in(self._idle_waits.pop(), entry)
        elif max(1, len(self.holds)) + len(self.waits) < self.limit:  # one is kept for a hold session
            session = LockSession(waits=True)
            self.waits.append(session)
            self._open(session)
            self._wait_in(session, entry)
        else:
            entry.stage = "parked"
            self._parked.append(entry)

    def _wait_in(self, session: LockSession, entry: Entry) -> None:
        entry.stage, entry.session, entry.shared = "waiting", session, entry.queue[0].shared
        session.entry, session.held[entry.key] = entry, entry
        session.cancelling = session.ended = False
        session.used = True
        if session.opened:
            self.actions.append(Wait(session))

    def _stop_waiting(self, entry: Entry) -> None:
        """The queue is empty, or it waits as a writer and the writer gave up. A key in the stage asking or freeing
        needs no cancel: its answer comes at once."""
        session = entry.session
        if entry.stage == "parked":
            self._parked.remove(entry)
            self._forget(entry)
        elif entry.stage == "waiting" and session is not None:
            if session.opened:
                entry.stage = "stopping"
                self._cancel(session)
            elif entry.queue:
                entry.shared = True
            else:
                self._detach(entry)
                session.entry = None
                self._forget(entry)

    def _cancel(self, session: LockSession) -> None:
        """Through a hold session: a cancel of libpq's would open a connection."""
        sender = next((each for each in self.holds if each.opened), None)
        if sender is None:
            self._drop(session, ConnectionError("no request waits in it any more"))
        else:
            session.cancelling = True
            self._enqueue(sender, Op("cancel", target=session))

    def _cancelled(self, session: LockSession | None) -> None:
        if session is not None and not session.over:
            session.cancelling = False
            self._stopped(session)

    def _stopped(self, session: LockSession) -> None:
        """Go on when the wait has ended and the cancel is answered: a late cancel would hit the next statement."""
        entry = session.entry
        if session.ended and not session.cancelling and entry is not None:
            self._unlock(entry)

    def _enqueue(self, session: LockSession, op: Op, sender: LockRequest | None = None) -> LockSession | None:
        """Send ``op`` now, or with what is sent next. Returns the session if the caller of ``sender`` sends it: a hold
        session that is free."""
        if sender is None or session.waits or session.under_way or session.pending or not session.opened:
            session.pending.append(op)
            self._flush(session)
            return None
        session.used, session.sender = True, sender
        return session

    def _flush(self, session: LockSession) -> None:
        """Send in one statement what has come together while the last one was under way."""
        pending = session.pending
        if not pending or session.flight or session.sender is not None or session.over or not session.opened:
            return
        count = 0
        while count < len(pending) and pending[count].verb not in ALONE:
            count += 1
        count = count or 1
        session.flight, session.pending = pending[:count], pending[count:]
        session.used = True
        self.actions.append(Send(session))

    # Sessions, and the room in the server's lock table

    def _hold_session(self) -> LockSession:
        """The first with room for one more; if all are full a new one, or beyond the limit the one with the fewest."""
        for session in self.holds:
            if len(session.held) < self.per_session:
                return session
        if self.holds and len(self.holds) + len(self.waits) >= self.limit:
            return min(self.holds, key=lambda each: len(each.held))
        session = LockSession(waits=False)
        self.holds.append(session)
        self._open(session)
        return session

    def _open(self, session: LockSession) -> None:
        self._unopened.append(session)
        self._open_next()

    def _open_next(self) -> None:
        """As many as there may be: those that wait to be opened are among ``sessions``."""
        while self._unopened and len(self.sessions) - len(self._unopened) + len(self.closing) < self.limit:
            self.actions.append(Open(self._unopened.popleft()))

    def _set_idle(self, session: LockSession) -> None:
        """A wait session has nothing to wait for."""
        if self._parked:
            self._wait_in(session, self._parked.popleft())
        elif len(self.holds) + len(self.waits) > self.kept:
            self._end(session)
        else:
            self._idle_waits.append(session)

    def _ask_room(self, session: LockSession) -> None:
        """Before what is tried next in this session. One that is being opened asks in any case."""
        if session.opened and not any(op.verb == "room" for op in session.flight + session.pending):
            self._enqueue(session, Op("room"))

    def _set_room(self, session: LockSession, room: int | None) -> None:
        """Refuse the keys that are about to be tried and for which there is no room."""
        if room is None:
            return
        asking = [op.entry for op in session.pending if op.verb == "try" and op.entry is not None]
        self.cap = len(self.entries) - len(asking) + max(0, room)
        self._spend = min(SPEND, max(0, room - len(asking)) // SHARE)
        self._set_due(min(self.cap, len(self.entries) + self._spend))
        for entry in asking[max(0, room) :]:
            session.pending = [op for op in session.pending if op.entry is not entry]
            self._full = True
            self._detach(entry)
            self._forget(entry)
            while entry.queue:
                request = entry.queue.pop(0)
                request.state = "full"
                self._wake(request)

    def _set_due(self, due: int) -> None:
        self._due, self._plenty = due, min(due, self.per_session)

    def _end(self, session: LockSession) -> None:
        for sessions in (self.holds, self.waits, self._idle_waits):
            if session in sessions:
                sessions.remove(session)
        if session in self._unopened:
            self._unopened.remove(session)
        if not session.over:
            session.over = True
            if session.opened:
                self.closing.add(session)
                self.actions.append(Close(session))

    def _drop(self, session: LockSession | None, error: Exception) -> None:
        if session is None or session.over:
            return
        opened, ops = session.opened, session.flight + session.pending
        session.pending = []
        self._end(session)
        self.closing.discard(session)
        for op in ops:
            if op.verb == "cancel":
                self._drop(op.target, error)
        for entry in list(session.held.values()):
            self._lose(entry, error, opened)
        session.held.clear()
        if self._parked and max(1, len(self.holds)) + len(self.waits) < self.limit:
            self._contended(self._parked.popleft())
        self._open_next()

    def _lose(self, entry: Entry, error: Exception, opened: bool) -> None:
        entry.handed, entry.asks_rivals = 0, False
        if (leaving := entry.leaving) is not None:
            leaving.error, leaving.state, entry.leaving = error, "lost", None
            self._wake(leaving)
        for holder in entry.holders:
            holder.error, holder.state = error, "lost"
            self.actions.append(Lose(holder, error))
        entry.holders = []
        entry.losses += 1
        if not opened or entry.losses >= MAX_LOSSES:
            self._fail(entry, error)
        entry.session = None
        if entry.queue:
            self._try(entry)
        else:
            self._forget(entry)
