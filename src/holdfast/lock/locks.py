"""The locks of one client for threads: straight to a free session if there is one, else through the pump's thread.

Every acquire may be interrupted anywhere by Ctrl-C, or by whatever else raises in a thread from outside. What it has
begun is then the pump's to finish and to undo, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

from holdfast.database.url import Database
from holdfast.errors import EngineError, Unanswered, Unreachable
from holdfast.lock import background
from holdfast.lock.mux import Mux
from holdfast.lock.pump import CALL_TIMEOUT
from holdfast.lock.shared_pump import SharedPump
from holdfast.lock.tickets import Key, Session, State, Ticket
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import NAP, Owner

_CLOSE_TIMEOUT = 2.0
NOTHING = None
"""Where there is nothing to wait for."""


class _Me(threading.local):
    """One thread: the numbers of threads are used again, and contexts are handed round."""

    def __init__(self) -> None:
        self.owner = object()


_me = _Me()


def owner() -> object:
    """Who is asking."""
    return _me.owner


class Locks:
    def __init__(self, database: Database, _: Owner, usable: Callable[[], None], *, kept: int, extra: int) -> None:
        """``usable`` raises once the client is closed."""
        self.database = database
        self.namespaces: dict[str, bytes] = {}
        self._limits = (kept, extra)
        self._pid = os.getpid()
        self._usable = usable
        self._pump: SharedPump | None = None
        self._starting = threading.RLock()
        """A signal's handler may come in between, in the same thread."""

    def acquire(self, ticket: Ticket, timeout: float) -> State:
        """What became of it. When it raises, nothing of it stays.

        If there is a session that is free, the key is tried in this thread, with nothing called that need not be."""
        pump = self._pump or self._start()
        mux, session, key = pump.mux, pump.fast, ticket.key
        ticket.owner = ticket.thread = _me.owner
        if key not in pump.noted:
            pump.know(ticket)
        ticket.deadline = now() + timeout
        try:
            claims = mux.claims
            if session is None or len(claims) >= mux.due or len(session.held) >= mux.per_session:
                return self._ask(pump, ticket)
            ticket.session = session
            if claims.setdefault(key, ticket) is not ticket:
                return self._ask(pump, ticket)
            if pump.drivers.setdefault(session, ticket) is not ticket:
                self._check_driver(pump, ticket, session)
                return self._ask(pump, ticket)
            if session.over:
                self._let_go(pump, session)
                return self._ask(pump, ticket)
            session.held[key] = ticket
            session.used = True
            try:
                got = session.wire.run("try", key, timeout * 1e3 if timeout < CALL_TIMEOUT else background.patience)
                if got:
                    ticket.state = "held"
                    if session.over:  # before that, and nobody was told
                        raise Unanswered(f"a session on {self.database} was given up")
            except Unanswered as error:
                pump.post(pump.fell, session, error)
                ticket.thread = None
                return self._ask(pump, ticket)
            if got:
                pump.drivers.pop(session, None)
                if pump.held_up:
                    pump.post(pump.resume, session)
                return "held"
            return self._not_had(pump, ticket, session, got)
        except BaseException:
            pump.post(pump.recover, ticket)
            ticket.thread = None
            raise

    def release(self, ticket: Ticket) -> object:
        """The ticket is "released" then, if it was still ours; there is nothing to await.

        What was taken in a thread is unlocked in one, if the session is free and nobody stands in line."""
        pump, session, key = self._pump, ticket.session, ticket.key
        if pump is None or session is None:
            return NOTHING
        try:
            if ticket.claim is not None or ticket.heirs is not None:
                return self._leave(pump, ticket)
            claims, ticket.thread = pump.mux.claims, _me.owner
            if pump.drivers.setdefault(session, ticket) is not ticket:
                self._check_driver(pump, ticket, session)
                return self._leave(pump, ticket)
            if session.over or ticket.claim is not None:
                self._let_go(pump, session)
                return self._leave(pump, ticket)
            ticket.state = "released"
            try:
                if session.wire.run("unlock", key, background.patience) is None:
                    raise Unanswered(f"{self.database} did not answer in time")
            except Unanswered as error:
                return self._fell(pump, ticket, session, error)
            session.held.pop(key, None)
            claims.pop(key, None)
            pump.drivers.pop(session, None)
            if pump.held_up:
                pump.post(pump.resume, session)
            if ticket.heirs is not None:
                pump.post(pump.freed, ticket)
            return NOTHING
        except BaseException:
            pump.post(pump.recover, ticket)
            ticket.thread = None
            raise

    def abandon(self, ticket: Ticket) -> None:
        """Unlock it, whatever has become of it; nobody waits for that."""
        if self._pump is not None:
            self._pump.post(self._pump.recover, ticket)

    def close(self, error: EngineError) -> None:
        pump, self._pump = self._pump, None
        if pump is None or self._pid != os.getpid():
            return
        closed = threading.Event()

        def close() -> None:
            pump.close(error)
            closed.set()

        pump.post(close)
        closed.wait(_CLOSE_TIMEOUT)

    @property
    def names(self) -> dict[Key, str]:
        """Of what was locked here, by key: in the database they are a moment later."""
        return {} if self._pump is None else self._pump.noted.copy()

    def notice_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._pump, self._starting = os.getpid(), None, threading.RLock()

    def _start(self) -> SharedPump:
        with self._starting:
            self._usable()
            return self._pump or self._keep(self._make())

    def _make(self) -> SharedPump:
        kept, extra = self._limits
        return SharedPump(self.database, Mux(kept=kept, extra=extra, lines=self.database.dialect == "postgres"))

    def _keep(self, made: SharedPump) -> SharedPump:
        """But the one that a signal's handler has made meanwhile is in use."""
        self._pump = self._pump or made
        return self._pump

    def _wait(self, pump: SharedPump, event: object, ticket: Ticket, deadline: float) -> bool:
        """Leave it to the pump; False when it has not come about in time."""
        ticket.bell = bell = threading.Lock()
        bell.acquire()
        pump.post(event, ticket)  # type: ignore[arg-type]
        # In naps: Python handles a signal that arrives just before a wait only after it.
        while not bell.acquire(timeout=max(0.0, min(deadline - now(), NAP))):
            if now() >= deadline:
                return False
        return True

    def _ask(self, pump: SharedPump, ticket: Ticket) -> State:
        event = pump.contended if ticket.contended else pump.ask
        return ticket.state if self._wait(pump, event, ticket, ticket.deadline) else self._late(pump, ticket)

    def _not_had(self, pump: SharedPump, ticket: Ticket, session: Session, got: bool | None) -> State:
        """Somebody else has it, or there was no answer."""
        if got is None:
            ticket.state = self._late(pump, ticket)
            return ticket.state
        ticket.contended = True
        if ticket.waits:
            self._let_go(pump, session)
            return self._ask(pump, ticket)
        ticket.state = "busy"
        session.held.pop(ticket.key, None)
        pump.mux.claims.pop(ticket.key, None)
        self._let_go(pump, session)
        if ticket.heirs is not None:
            pump.post(pump.freed, ticket)
        return "busy"

    def _late(self, pump: SharedPump, ticket: Ticket) -> State:
        pump.post(pump.recover, ticket)  # it may have been granted this very moment
        ticket.thread = None
        return "gone"

    def _leave(self, pump: SharedPump, ticket: Ticket) -> object:
        if asyncio._get_running_loop() is pump.loop:  # the garbage collector ends a block, and in the pump's own thread
            pump.post(pump.release, ticket)
            return NOTHING
        if not self._wait(pump, pump.release, ticket, now() + CALL_TIMEOUT + 1.0):
            raise Unanswered(f"{self.database} did not answer in time")
        return NOTHING

    def _fell(self, pump: SharedPump, ticket: Ticket, session: Session, error: Unanswered) -> object:
        """Whether it was unlocked nobody knows; the session ends, and then it is."""
        ticket.state = "lost"
        session.held.pop(ticket.key, None)
        pump.mux.claims.pop(ticket.key, None)
        pump.post(pump.fell, session, error)
        ticket.thread = None
        if ticket.heirs is not None:
            pump.post(pump.freed, ticket)
        return NOTHING

    def _check_driver(self, pump: SharedPump, ticket: Ticket, session: Session) -> None:
        """Somebody drives it; but not we ourselves, further down in this thread?"""
        driver = pump.drivers.get(session)
        if isinstance(driver, Ticket) and driver.thread == ticket.thread:
            raise Unreachable(
                f"this thread is in the middle of a call for lock {driver.name!r}, which a signal has interrupted, and "
                "would wait for itself"
            )

    def _let_go(self, pump: SharedPump, session: Session) -> None:
        pump.drivers.pop(session, None)
        if pump.held_up:
            pump.post(pump.resume, session)


__all__ = ["CALL_TIMEOUT", "Locks", "owner"]
