"""The pump of the blocking flavour: on a loop in a thread, and sharing its hold sessions with the callers' threads.

A thread that finds a session free drives it itself, with one statement at a time: that is the fast way, and nothing is
faster. Whoever drives a session is in ``drivers``. All else happens here, in a thread that no signal interrupts; also
what a caller was interrupted in.

Dictionaries are changed in single steps that the interpreter does not divide (``setdefault``, ``pop``), so whatever a
KeyboardInterrupt cuts short in a caller's thread can be told from what is there, and mended.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from holdfast.database.socket_ready import is_readable
from holdfast.database.url import Database
from holdfast.errors import EngineError, Unanswered
from holdfast.lock import background
from holdfast.lock.mux import Mux
from holdfast.lock.pump import LockPump
from holdfast.lock.tickets import Op, Session, Ticket

_HANG_UP = getattr(select, "EPOLLRDHUP", 0)


class SharedPump(LockPump):
    def __init__(self, database: Database, mux: Mux) -> None:
        super().__init__(database, mux, background.loop())
        self.drivers: dict[Session, object] = {}
        self.held_up: set[Session] = set()
        """Where we have something to say, and a thread is driving."""
        self._draining: set[Session] = set()
        self._watched: dict[int, Session] = {}
        self._epoll: Any = None

    def post(self, event: Callable[..., None], *args: object) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the process is ending, and the loop with it
            self.loop.call_soon_threadsafe(event, *args)

    def ask(self, ticket: Ticket) -> None:
        self.do(self.mux.ask(ticket))

    def contended(self, ticket: Ticket) -> None:
        self.do(self.mux.contended(ticket))

    def release(self, ticket: Ticket) -> None:
        self.do(self.mux.release(ticket))

    def freed(self, ticket: Ticket) -> None:
        self.do(self.mux.freed(ticket))

    def recover(self, ticket: Ticket) -> None:
        """Whoever had it was interrupted, anywhere: go on where it stopped, and leave nothing of it."""
        session = ticket.session
        if session is not None and self.drivers.get(session) is ticket:
            self.drivers[session] = self
            self._finish(session)
        self.do(self.mux.give_up(ticket))
        for each in list(self.held_up):
            self.resume(each)

    def fell(self, session: Session, error: Exception) -> None:
        """The connection failed under a thread that was driving."""
        self.drivers[session] = self
        if session.over:
            self._bury(session)
        else:
            self.lost(session, error)

    def resume(self, session: Session) -> None:
        """A thread has let go of a session that we were waiting for."""
        if session in self.held_up and self._drive(session):
            self.held_up.discard(session)
            if session.over:
                self._bury(session)
            elif session.flying:
                super()._send(session, session.flying)

    def _settle(self, ticket: Ticket) -> None:
        bell = ticket.bell
        if bell is not None and bell.locked():
            bell.release()

    def _drive(self, session: Session) -> bool:
        if self.drivers.setdefault(session, self) is not self or session in self._draining:
            return False
        if session.wire.descriptor is not None and not session.over:
            self.loop.add_reader(session.wire.descriptor, self._readable, session)
        return True

    def _let_go(self, session: Session) -> None:
        if session.wire.descriptor is not None:
            self.loop.remove_reader(session.wire.descriptor)
        self.drivers.pop(session, None)

    def _finish(self, session: Session) -> None:
        """Read what a thread did not."""
        if session.over:
            self._bury(session)
            return
        try:
            if session.wire.drain():
                self._draining.add(session)
                self.loop.add_reader(session.wire.descriptor, self._readable, session)
                self._drain(session)  # it may have been read already, and not been taken
            else:
                self._let_go(session)
        except EngineError as error:
            self.lost(session, error)

    def _send(self, session: Session, ops: list[Op]) -> None:
        if not session.waits and not self._drive(session):
            self.held_up.add(session)
            self.resume(session)  # it may have let go in between, and not have seen that we wait
            return
        super()._send(session, ops)

    def _readable(self, session: Session) -> None:
        if session in self._draining:
            self._drain(session)
            return
        super()._readable(session)
        if not session.waits and not session.flying and not session.over and self.drivers.get(session) is self:
            self._let_go(session)
            self.publish()

    def _drain(self, session: Session) -> None:
        try:
            if session.wire.receive() is None:
                return
        except EngineError as error:
            self._draining.discard(session)
            self.lost(session, error)
            return
        self._draining.discard(session)
        self._let_go(session)
        self.resume(session)

    def _watch(self, session: Session) -> None:
        if session.waits:
            super()._watch(session)
        elif _HANG_UP and session.wire.descriptor is not None:
            if self._epoll is None:
                self._epoll = select.epoll()
                self.loop.add_reader(self._epoll.fileno(), self._hung_up)
            self._watched[session.wire.descriptor] = session
            self._epoll.register(session.wire.descriptor, _HANG_UP)

    def _unwatch(self, session: Session) -> None:
        if self._watched.pop(session.wire.descriptor, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(session.wire.descriptor)
            if not self._watched:  # a client that nobody closes leaves no descriptor
                self.loop.remove_reader(self._epoll.fileno())
                self._epoll.close()
                self._epoll = None

    def _hung_up(self) -> None:
        """Only the end of a connection wakes us, never an answer that a thread is waiting for."""
        for descriptor, _ in self._epoll.poll(0):
            if (session := self._watched.get(descriptor)) is not None:
                self._unwatch(session)
                self._look(session)

    def _look(self, session: Session) -> None:
        if session.over:
            return
        if self.drivers.setdefault(session, self) is not self:
            self.loop.call_later(0.01, self._look, session)
            return
        try:
            session.wire.receive()
        except EngineError as error:
            self.lost(session, error)
        else:
            self.lost(session, Unanswered(f"{self.database} closed the connection"))

    def _hear_end(self, session: Session) -> None:
        """Where the system does not tell of it alone: nothing was asked, so whatever has come is the end."""
        try:
            session.wire.receive()
        except EngineError as error:
            self.lost(session, error)

    def _close(self, session: Session) -> None:
        self.publish()
        if session.wire is None:
            return
        self._unwatch(session)
        self.held_up.discard(session)
        self._draining.discard(session)
        if session.wire.descriptor is not None:
            self.loop.remove_reader(session.wire.descriptor)
        if not session.waits and self.drivers.setdefault(session, self) is not self:
            self.held_up.add(session)
            if session.wire.descriptor is not None:  # else nobody waits in a call, and it is closed after that
                session.wire.hang_up()
            self.resume(session)
        else:
            self._bury(session)

    def _bury(self, session: Session) -> None:
        self.held_up.discard(session)
        session.wire.close()
        self.drivers.pop(session, None)

    def close(self, error: Exception) -> None:
        self.fast = None
        super().close(error)

    def _flying(self, session: Session) -> object:
        """A thread that drives may wait for as long as it takes: we see when that is too long. But a signal's handler
        may keep it from an answer that has come."""
        driver = self.drivers.get(session)
        if not isinstance(driver, Ticket):
            return super()._flying(session)
        return None if session.wire.descriptor is None or is_readable(session.wire.descriptor) else driver

    def _close_idle(self) -> None:
        """Not what a thread is driving, nor what it might begin to drive this very moment."""
        claimed = [each for each in self.mux.holds if each.opened and self.drivers.setdefault(each, self) is self]
        busy = [each for each in self.mux.holds if each not in claimed or each.flying or each in self._draining]
        if not _HANG_UP:
            for session in claimed:
                if session not in busy:
                    self._hear_end(session)
        self.do(self.mux.sweep(busy))
        for session in claimed:
            if session not in busy and not session.flying and not session.over:
                self.drivers.pop(session, None)
                self.resume(session)
