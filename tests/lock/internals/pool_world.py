"""Several clients, each with a pool, on one simulated server: events in any order, and checks after each of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from holdfast.errors import Refused
from holdfast.lock.pool import WAITED_LONG, Close, LockRequest, LockSession, Lose, Note, Op, Open, Pool, Send, Wait
from holdfast.lock.terms import Key

KEY_SPACE: list[Key] = [(b"1",), (b"2",), (b"3", b"4")]
NUMBERS = st.integers(0, 5)
"""Of a key or a client, modulo how many there are."""
OFTEN = st.sampled_from([True, True, True, False])
LIMITS: dict[str, int] = {"kept": 2, "extra": 1, "per_session": 2, "turns": 2}
"""One hold session and two wait sessions: of three contended keys, one is parked."""
CALLER = "the executor"
ERROR = ConnectionError("the connection was lost")
TIMED_OUT = Refused("canceling statement due to lock timeout", WAITED_LONG)
QUEUED, HELD = "queued", "held"
"""States of a request whose caller may wait for the next one."""


Step = TypeVar("Step", bound=Callable[..., None])


class Server:
    """Advisory locks in two modes. ``queues``: with a fair queue for each key, as PostgreSQL; or without, as files."""

    def __init__(self, queues: bool) -> None:
        self.queues = queues
        self.locks: dict[Key, dict[LockSession, bool]] = defaultdict(dict)
        """Sessions that hold a key, and whether in shared mode."""
        self.waiters: dict[Key, dict[LockSession, bool]] = defaultdict(dict)
        """Sessions that wait, in the order in which they came."""

    def try_lock(self, key: Key, session: LockSession, shared: bool) -> bool:
        if self.conflicts(key, session, shared):
            return False
        self._grant(key, session, shared)
        return True

    def conflicts(self, key: Key, session: LockSession, shared: bool) -> bool:
        """With the locks of other sessions, or with those that came before it into the queue."""
        modes = [mode for other, mode in self.locks[key].items() if other is not session]
        for other, mode in self.waiters[key].items() if self.queues else ():
            if other is session:
                break
            modes.append(mode)
        return not all(shared and mode for mode in modes)

    def wait(self, key: Key, session: LockSession, shared: bool) -> None:
        self.waiters[key][session] = shared
        self.serve(key)

    def serve(self, key: Key) -> None:
        for session, shared in list(self.waiters[key].items()):
            if not self.conflicts(key, session, shared):
                del self.waiters[key][session]
                self._grant(key, session, shared)

    def unlock(self, key: Key, session: LockSession, shared: bool) -> bool:
        """Only in the mode in which it was locked."""
        if self.locks[key].get(session) is not shared:
            return False
        del self.locks[key][session]
        if self.queues:
            self.serve(key)
        return True

    def leave(self, key: Key, session: LockSession) -> None:
        if self.waiters[key].pop(session, None) is not None and self.queues:
            self.serve(key)

    def end(self, session: LockSession) -> None:
        for key in KEY_SPACE:
            self.leave(key, session)
            self.unlock(key, session, self.locks[key].get(session, False))

    def _grant(self, key: Key, session: LockSession, shared: bool) -> None:
        assert session not in self.locks[key], "locked twice, it would have to be unlocked twice"
        self.locks[key][session] = shared
        assert len(self.locks[key]) == 1 or all(self.locks[key].values())


class Client:
    """A pool, and what its executor has under way. ``awaits``: callers wait for all answers, as tasks do; otherwise
    they send and receive themselves where they can, as threads do."""

    def __init__(self, server: Server, awaits: bool) -> None:
        self.server, self.awaits = server, awaits
        self.pool = Pool(**LIMITS, server_queues=server.queues)
        self.requests: list[LockRequest] = []
        """In the order in which they were made."""
        self.opening: list[LockSession] = []
        self.open: list[LockSession] = []
        self.sent: dict[LockSession, list[Op]] = {}
        """Statements that are not answered."""
        self.driven: dict[LockSession, LockRequest] = {}
        """Those of them that a caller sends."""
        self.interrupted: list[LockSession] = []
        """Those of them whose caller was interrupted."""
        self.waiting: dict[LockSession, str] = {}
        """Sessions that wait: "sent", "arrived" at the server, or "cancelled"."""
        self.closing: list[LockSession] = []
        """Sessions that were closed here, and whose end the server has not reported."""
        self.ghosts: list[LockSession] = []
        """Sessions that are over here, and that the server has not noticed yet."""
        self.callers: dict[LockRequest, str] = {}
        """Those who wait to be woken, and the state that is to change."""
        self.holding: set[LockRequest] = set()
        """Requests that held their lock after the last event."""
        self.crowds: dict[LockSession, int] = {}
        """How many locks each session had then."""
        self.was_full = False
        """Whether there could be no other session then."""
        self.granted: set[Key] = set()
        """Keys that the server granted in this event."""
        self.passes: Counter[Key] = Counter()
        """How often a key went from one request to another since the server granted it."""
        self.losses = 0
        self.room: int | None = None
        self.had_room = True

    # What callers do

    def acquire(self, key: Key, waits: bool, shared: bool, owner: int) -> LockRequest:
        entry = self.pool.entries.get(key)
        has_it = entry is not None and any(each.owner == owner for each in entry.holders)
        is_taken = entry is not None and (entry.holders or entry.queue)
        request = LockRequest(key, str(key), waits, shared)
        request.owner = owner
        request.waker = self.awaits or None
        self.requests.append(request)
        session = self.pool.acquire(request)
        assert request.state in ("queued", "held", "busy", "reentered", "full")
        assert (request.state == "reentered") == has_it
        assert request.state != "busy" or is_taken
        assert request.state != "full" or not self.had_room
        self.begin(session, request, QUEUED)
        return request

    def release(self, request: LockRequest) -> None:
        if not self.awaits:
            request.waker = None
        elif request in self.holding:
            request.waker = True
        session = self.pool.release(request, request.owner)
        self.begin(session, request, HELD)

    def begin(self, session: LockSession | None, request: LockRequest, undecided: str) -> None:
        """Its caller sends, waits, or is done."""
        if session is not None:
            assert session.sender is request
            assert len(session.under_way) == 1
            assert not session.waits
            self.under_way(session)
            self.driven[session] = request
        if request.state == undecided and (session is None or self.awaits):
            request.waker = True
            self.callers[request] = undecided
        self.carry_out()

    def give_up(self, request: LockRequest) -> None:
        self.callers.pop(request, None)
        self.pool.give_up(request, request.owner)
        assert request.state != "queued"
        assert request.state != "held" or self.is_leaving(request)
        if request.state == "held" and request.waker is not None:
            self.callers[request] = HELD
        self.carry_out()

    def interrupt(self, session: LockSession, arrived: bool) -> None:
        """The caller that uses the session is interrupted, before or after its statement arrives at the server."""
        request = self.driven.pop(session)
        if arrived:
            self.execute(session, self.sent[session][0])
        self.interrupted.append(session)
        self.give_up(request)

    def is_leaving(self, request: LockRequest) -> bool:
        return request.entry is not None and request.entry.leaving is request

    # What the executor does

    def under_way(self, session: LockSession) -> None:
        assert session in self.open
        assert session not in self.sent, "one statement at a time"
        assert session not in self.waiting, "a session that waits can do nothing else"
        self.sent[session] = list(session.under_way)
        assert self.sent[session]

    def carry_out(self) -> None:
        assert self.pool.writer is None
        while self.pool.actions:
            match self.pool.actions.popleft():
                case Open(session):
                    self.opening.append(session)
                case Send(session):
                    self.under_way(session)
                case Wait(session):
                    assert session.waits
                    assert session in self.open
                    assert session not in self.sent
                    assert session not in self.waiting
                    assert not self.will_be_cancelled(session), "the cancel would end this wait"
                    self.waiting[session] = "sent"
                case Close(session):
                    if session in self.pool.closing:
                        self.closing.append(session)
                    self.end(session)
                case Lose(request, error):
                    assert request in self.holding
                    assert (request.state, request.error) == ("lost", error)
                    self.losses += 1
        while self.pool.wakes:
            request = self.pool.wakes.popleft()
            assert request.waker is not None
            assert request.state != self.callers.pop(request), "woken although nothing has changed"
        self.check()

    def will_be_cancelled(self, session: LockSession) -> bool:
        ops = [op for each in self.sent.values() for op in each] + [
            op for each in self.pool.holds for op in each.pending
        ]
        return any(op.target is session for op in ops)

    def end(self, session: LockSession) -> None:
        """Here. The server notices later."""
        assert session.over
        for sessions in (self.opening, self.open, self.interrupted):
            if session in sessions:
                sessions.remove(session)
                self.ghosts.append(session)
        self.waiting.pop(session, None)
        self.sent.pop(session, None)
        sender = self.driven.pop(session, None)
        if sender is not None and sender.state in (QUEUED, HELD):
            sender.waker = True  # its call fails, and it waits for what becomes of its request
            self.callers[sender] = sender.state

    def opened(self, session: LockSession) -> None:
        self.opening.remove(session)
        self.open.append(session)
        self.pool.opened(session, CALLER)
        self.carry_out()

    def closed(self, session: LockSession) -> None:
        self.closing.remove(session)
        self.server.end(session)
        if session in self.ghosts:
            self.ghosts.remove(session)
        self.pool.closed(session, CALLER)
        self.carry_out()

    def execute(self, session: LockSession, op: Op) -> Any:
        """On the server."""
        entry = op.entry
        if op.verb == "try" and entry is not None:
            return self.server.try_lock(entry.key, session, entry.shared)
        if op.verb == "unlock" and entry is not None:
            return self.server.unlock(entry.key, session, entry.shared)
        if op.target is not None:
            target = op.target.entry
            assert op.target.over or (target is not None and target.stage == "stopping"), "it would end another wait"
            if self.waiting.get(op.target) == "arrived":
                self.waiting[op.target] = "cancelled"
        if op.verb == "rivals" and entry is not None:
            return bool(self.server.waiters[entry.key])
        if op.verb == "room" and self.room is not None:
            self.had_room = False
        return self.room if op.verb == "room" else True

    def finish(self, session: LockSession) -> list[Op]:
        """The statement that is under way is answered."""
        ops = self.sent.pop(session)
        assert session.under_way == ops, "what is under way is not changed"
        return ops

    def answer(self, session: LockSession) -> None:
        if session in self.interrupted:
            self.finish(session)
            self.interrupted.remove(session)
            self.pool.unanswered(session, CALLER)
            self.carry_out()
            return
        ops = self.finish(session)
        queued = [each for each in self.requests if each.state == "queued" and not each.waits]
        answers = [self.execute(session, op) for op in ops]
        self.granted = {
            op.entry.key for op, got in zip(ops, answers, strict=True) if op.verb == "try" and got and op.entry
        }
        for op, waits in zip(ops, answers, strict=True):
            if op.verb == "rivals" and op.entry is not None and not waits:
                self.passes[op.entry.key] = 0
        sender = self.driven.pop(session, None)
        if session.sender is None:
            self.pool.answered(session, answers, CALLER)
        else:
            self.pool.sender_answered(session, answers[0], CALLER)
        for request in queued:
            if request.state == "busy" and self.server.queues:
                assert self.server.conflicts(request.key, session, request.shared), "it was free"
        if sender is not None and sender.state == "queued" and sender not in self.callers:
            sender.waker = True
            self.callers[sender] = QUEUED
        self.carry_out()

    def refuse(self, session: LockSession, executed: int) -> None:
        """The server answers with an error, after a part of the statement was executed."""
        sender = self.driven.pop(session, None)
        ops = self.finish(session)
        if sender is not None:
            sender.waker = True
            self.callers[sender] = sender.state
        for op in ops[:executed]:
            self.execute(session, op)
        self.pool.refused(session, ERROR, CALLER)
        self.carry_out()

    def arrive(self, session: LockSession) -> None:
        assert session.entry is not None
        self.waiting[session] = "arrived"
        self.server.wait(session.entry.key, session, session.entry.shared)

    def waited(self, session: LockSession, error: Exception | None) -> None:
        """``error`` if it was not granted, or although it was granted."""
        assert session.entry is not None
        key = session.entry.key
        self.server.leave(key, session)
        del self.waiting[session]
        if error is None:
            self.granted = {key}
        self.pool.waited(session, error, CALLER)
        self.carry_out()

    def is_granted(self, session: LockSession) -> bool:
        assert session.entry is not None
        if not self.server.queues and self.waiting[session] != "sent":
            self.server.serve(session.entry.key)
        return session in self.server.locks[session.entry.key]

    def lose(self, session: LockSession, sender_first: bool) -> None:
        """``sender_first``: the caller that uses the session notices it before the executor."""
        sender = self.driven.get(session)
        if sender_first and sender is not None:
            sender.waker = True
            self.callers[sender] = sender.state
            del self.driven[session]
        before, held = self.losses, {each for each in self.holding if session_of(each) is session}
        self.pool.lost(session, ERROR, CALLER)
        self.end(session)
        self.carry_out()
        assert self.losses - before == len(held), "every loss is reported"
        assert {each.state for each in held} <= {"lost"}

    def sweep(self) -> None:
        self.pool.sweep(CALLER)
        self.carry_out()

    def note(self, session: LockSession) -> None:
        self.pool.note(session, Note(True, [], [], []), CALLER)
        self.carry_out()

    def close(self) -> None:
        self.driven.clear()
        self.pool.close(ERROR, CALLER)
        for session in list(self.opening):
            self.end(session)
        self.carry_out()
        assert not {each.state for each in self.requests} & {"queued", "held"}
        assert self.open == self.pool.sessions == []
        assert not self.pool.closing
        assert not self.callers
        assert not self.pool.entries
        late = LockRequest(KEY_SPACE[0], "late", True, False)
        assert self.pool.acquire(late) is None
        assert (late.state, late.error) == ("failed", ERROR)

    def is_quiet(self) -> bool:
        """Nothing is under way, and nothing will happen by itself."""
        return not (self.opening or self.closing or self.sent) and all(
            how == "arrived" and not self.is_granted(session) for session, how in list(self.waiting.items())
        )

    # What is always true

    def check(self) -> None:
        for request, undecided in self.callers.items():
            assert request.state == undecided, "decided, and its caller is not woken"
        self._check_holders()
        sessions = self.pool.sessions
        assert len(sessions) == len(set(sessions)) <= self.pool.limit
        assert not any(each.pending and each.opened and not each.under_way for each in sessions)
        assert len(self.open) + len(self.opening) + len(self.closing) <= self.pool.limit
        self._check_crowds()
        if self.is_quiet():
            self._check_rest()

    def _check_crowds(self) -> None:
        """A session takes more locks than it should only while there may be no other one. It keeps them when there may
        be again, and a session may have ended in the same step."""
        sessions, is_full = self.pool.sessions, len(self.pool.sessions) == self.pool.limit
        for each in sessions:
            if len(each.held) > max(self.pool.per_session, self.crowds.get(each, 0)):
                assert is_full or self.was_full
        self.crowds, self.was_full = {each: len(each.held) for each in sessions}, is_full

    def _check_holders(self) -> None:
        holding = {each for entry in self.pool.entries.values() for each in entry.holders}
        for request in holding:
            assert request.state == "held"
            assert session_of(request) in self.open
            assert self.server.locks[request.key].get(session_of(request)) is request.shared
        for request in self.requests:
            assert request.state != "held" or request in holding or self.is_leaving(request)
        for key in self.granted:
            self.passes[key] = 0
        for request in holding - self.holding:
            if request.key not in self.granted:
                self.passes[request.key] += 1
            for other in self.requests[: self.requests.index(request)]:
                assert other.key != request.key or other.state != "queued", "first come, first served"
        assert all(each <= self.pool.turns for each in self.passes.values()), "others get their turn"
        self.holding, self.granted = holding, set()

    def _check_rest(self) -> None:
        """Every request is decided, or behind a holder; and what is locked on the server is held by a request."""
        for request in self.requests:
            if request.state == "queued":
                assert request.entry is self.pool.entries[request.key]
                assert request in request.entry.queue
        for entry in self.pool.entries.values():
            self._check_entry_at_rest(entry)
        for key in KEY_SPACE:
            for session in self.server.locks[key]:
                if session in self.open:
                    entry = self.pool.entries[key]
                    assert entry.session is session
                    assert entry.stage in ("held", "refused"), "left behind"

    def _check_entry_at_rest(self, entry: Any) -> None:
        pool, first = self.pool, entry.queue[0] if entry.queue else None
        match entry.stage:
            case "held":
                assert entry.holders
                if first is not None and first.shared and entry.shared:
                    assert self.passes[entry.key] == pool.turns, "it could join the others"
            case "waiting":
                assert first is not None
                assert self.server.conflicts(entry.key, entry.session, first.shared), "it waits for nothing"
            case "parked":
                assert first is not None
                assert max(1, len(pool.holds)) + len(pool.waits) == pool.limit, "one is kept for a hold session"
                assert not pool._idle_waits
            case "refused":
                assert entry in pool._refused
            case "stopping":  # its cancel arrived before its wait did; the sweep sends it again
                assert not entry.session.cancelling
            case _:
                raise AssertionError(f"{entry.stage}, and nothing is under way")
        if entry.stage in ("waiting", "parked"):
            assert all(each.waits for each in entry.queue)


def has(name: str) -> Callable[[Step], Step]:
    """Only if one of the clients has such a thing."""
    return precondition(lambda world: any(getattr(client, name) for client in world.clients))


def session_of(request: LockRequest) -> Any:
    return request.entry and request.entry.session


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.owners = count(100)

    @initialize(
        queues=OFTEN,
        keys=st.integers(1, len(KEY_SPACE)),
        awaits=st.lists(st.booleans(), min_size=2, max_size=3),
        wishes=st.lists(st.tuples(NUMBERS, NUMBERS, OFTEN, st.booleans()), min_size=2, max_size=12),
        steps=st.integers(0, 6),
    )
    def begin(
        self, queues: bool, keys: int, awaits: list[bool], wishes: list[tuple[int, int, bool, bool]], steps: int
    ) -> None:
        """Some keys are contended from the beginning: few examples would come to that by themselves."""
        self.server = Server(queues)
        self.keys = KEY_SPACE[:keys]
        self.clients = [Client(self.server, each) for each in awaits]
        for client, key, waits, shared in wishes:
            self.client(client).acquire(self.keys[key % keys], waits, shared, next(self.owners))
        for _ in range(steps):
            self.catch_up()

    def client(self, number: int) -> Client:
        return self.clients[number % len(self.clients)]

    def choose(self, data: Any, name: str) -> tuple[Client, Any]:
        found = [(client, each) for client in self.clients for each in getattr(client, name)]
        drawn: tuple[Client, Any] = data.draw(st.sampled_from(found))
        return drawn

    @rule(number=NUMBERS, key=NUMBERS, waits=OFTEN, shared=st.booleans(), owner=st.integers(1, 20))
    def acquire(self, number: int, key: int, waits: bool, shared: bool, owner: int) -> None:
        owner = owner if owner < 4 else next(self.owners)
        self.client(number).acquire(self.keys[key % len(self.keys)], waits, shared, owner)

    @has("holding")
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        client, request = self.draw_request(data, "held")
        if request in client.holding or not client.awaits:
            client.release(request)

    @has("requests")
    @rule(data=st.data(), state=st.sampled_from(["queued", "queued", "held", "any"]))
    def give_up(self, data: Any, state: str) -> None:
        client, request = self.draw_request(data, state)
        if request not in client.driven.values():
            client.give_up(request)

    @has("waiting")
    @rule(data=st.data(), number=st.integers(1, 3))
    def stop_waiting(self, data: Any, number: int) -> None:
        """The first in a queue give up, or all: draws seldom hit them."""
        client, session = self.choose(data, "waiting")
        for request in list(session.entry.queue)[:number]:
            client.give_up(request)

    def draw_request(self, data: Any, state: str) -> tuple[Client, LockRequest]:
        found = [(client, each) for client in self.clients for each in client.requests]
        found = [(client, each) for client, each in found if each.state == state] or found
        drawn: tuple[Client, LockRequest] = data.draw(st.sampled_from(found))
        return drawn

    @has("driven")
    @rule(data=st.data(), arrived=st.booleans())
    def interrupt(self, data: Any, arrived: bool) -> None:
        client, session = self.choose(data, "driven")
        client.interrupt(session, arrived)

    @has("closing")
    @rule(data=st.data())
    def close_on_server(self, data: Any) -> None:
        client, session = self.choose(data, "closing")
        client.closed(session)

    @has("opening")
    @rule(data=st.data())
    def open(self, data: Any) -> None:
        client, session = self.choose(data, "opening")
        client.opened(session)

    @has("sent")
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        client, session = self.choose(data, "sent")
        client.answer(session)

    @has("sent")
    @rule(data=st.data(), executed=st.integers(0, 3))
    def refuse(self, data: Any, executed: int) -> None:
        client, session = self.choose(data, "sent")
        if session not in client.interrupted:
            client.refuse(session, executed)

    @has("waiting")
    @rule(data=st.data(), error=st.sampled_from([None, None, ERROR, TIMED_OUT]))
    def end_wait(self, data: Any, error: Exception | None) -> None:
        """With the lock; with an error; or with both: the server granted it, and then answered with an error."""
        client, session = self.choose(data, "waiting")
        if client.waiting[session] == "sent":
            client.arrive(session)
        elif client.is_granted(session):
            client.waited(session, error)
        elif client.waiting[session] == "cancelled" or error is not None:
            client.waited(session, error or ERROR)

    @has("open")
    @rule(data=st.data(), trouble=st.sampled_from(["lose", "lose", "fail to open", "end", "note", "fill", "close"]))
    def cause(self, data: Any, trouble: str) -> None:
        """Not a rule for each: the others would be too seldom."""
        name = {"fail to open": "opening", "end": "ghosts"}.get(trouble, "open")
        if not any(getattr(client, name) for client in self.clients):
            return
        client, session = self.choose(data, name)
        match trouble:
            case "end":
                client.ghosts.remove(session)
                self.server.end(session)
            case "note" if not session.waits:
                client.note(session)
            case "fill":  # how much room there is in the server's lock table
                client.room = data.draw(st.sampled_from([None, None, 0, 1, 2]))
            case "close":
                client.close()
                self.clients[self.clients.index(client)] = new = Client(self.server, client.awaits)
                new.ghosts = client.ghosts
            case "lose" | "fail to open":
                client.lose(session, sender_first=data.draw(st.booleans()))

    @rule(number=NUMBERS)
    def sweep(self, number: int) -> None:
        self.client(number).sweep()

    @rule()
    def catch_up(self) -> None:
        """All that is under way is answered, so that what takes many steps is reached in few."""
        for client in self.clients:
            for session in list(client.closing):
                client.closed(session)
            for session in client.ghosts:
                self.server.end(session)
            client.ghosts.clear()
            for session in list(client.opening):
                client.opened(session)
            for session in list(client.sent):
                if session in client.sent:
                    client.answer(session)
            for session in list(client.waiting):
                if client.waiting.get(session) == "sent":
                    client.arrive(session)
                elif session in client.waiting and client.is_granted(session):
                    client.waited(session, None)
                elif client.waiting.get(session) == "cancelled":
                    client.waited(session, ERROR)

    def teardown(self) -> None:
        """All that is under way is answered, and all holders release: every request is decided, and nothing is left."""
        if not hasattr(self, "clients"):
            return
        for client in self.clients:
            client.room = None
        for step in range(300):
            self.catch_up()
            for client in self.clients:
                for request in list(client.holding):
                    if request in client.holding:
                        client.release(request)
                if step % 5 == 4:
                    client.sweep()
            if not any(client.pool.entries or client.opening or client.sent for client in self.clients):
                break
        for _ in range(4):
            for client in self.clients:
                client.sweep()
            self.catch_up()
        for client in self.clients:
            assert [each.state for each in client.requests if each.state in ("new", "queued", "held")] == []
            assert not client.callers
            assert not client.pool.entries
            assert client.pool.sessions == client.open == [], "idle sessions are closed"
        assert not any(self.server.locks.values())
        assert not any(self.server.waiters.values())
