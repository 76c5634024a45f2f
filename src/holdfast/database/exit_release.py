"""``client.release_on_exit``: releases what clients hold when a signal ends this process.

The signal's handler interrupts the main thread, which may be in the middle of a call and hold locks of ours. So what is
held is taken out of memory in that thread, where our locks are reentrant, and sent by threads of their own, on sessions
of their own. The handler waits for them, bounded. The main thread does no work meanwhile, and other threads go on.

Locks are not released: they live with the sessions of the process, and go with it.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Protocol

from holdfast.database.sessions import Statement, open_session
from holdfast.database.url import Database
from holdfast.errors import Busy, EngineError, Refused
from holdfast.runtime import forks
from holdfast.runtime.clock import now
from holdfast.runtime.exit_handler import ExitHandler
from holdfast.runtime.log import WARNING, logger

log = logger("holdfast.exit")

BUDGET = 2.0
"""Seconds that the signal waits for the database."""
_SENDING = 0.9
"""The part of it that is spent on calls. The rest is for the log."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ExitHolder(Protocol):
    """The engine of a client."""

    @property
    def database(self) -> Database: ...
    def give_up(self, *, dies: bool) -> list[Statement]:
        """Forget everything that is held; returns what gives it back. Called in a handler of a signal."""


_holders: dict[signal.Signals, list[ExitHolder]] = {}


def register(holder: ExitHolder, signals: Iterable[int]) -> None:
    """ValueError when a signal is not one that asks a process to end, or outside the main thread."""
    numbers = [_check_signal(number) for number in signals]
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("release_on_exit must be called in the main thread: only there Python accepts signal handlers")
    handlers = {number: signal.getsignal(number) for number in numbers}
    for number, handler in handlers.items():
        if handler is None:
            raise ValueError(f"{number.name} has a handler that was not installed from Python: it could not be called")
    for number, handler in handlers.items():
        if handler is signal.SIG_IGN:  # as by nohup: it ends nothing
            continue
        holders = _holders.setdefault(number, [])
        if holder not in holders:
            holders.append(holder)
        if not isinstance(handler, ExitHandler):
            signal.signal(number, ExitHandler(handler, partial(_release, number)))


def forget(holder: ExitHolder) -> None:
    """The client was closed. The last one restores the handlers, unless others were installed over ours since."""
    for number, holders in list(_holders.items()):
        if holder in holders:
            holders.remove(holder)
        is_main = threading.current_thread() is threading.main_thread()
        if not holders and is_main and isinstance(handler := signal.getsignal(number), ExitHandler):
            signal.signal(number, handler.before)


def _check_signal(number: int) -> signal.Signals:
    if number not in SIGNALS:
        names = ", ".join(each.name for each in SIGNALS)
        raise ValueError(f"signals must be of {names}, which ask a process to end, not {number!r}")
    return signal.Signals(number)


def _release(number: signal.Signals, dies: bool) -> None:
    """In the main thread, in the handler."""
    until = now() + BUDGET
    statements: dict[Database, list[Statement]] = {}
    for holder in _holders.get(number, ()):
        statements.setdefault(holder.database, []).extend(holder.give_up(dies=dies))
    reader, writer = os.pipe()
    try:
        running = 0
        for database, last in statements.items():
            if last:
                _thread.start_new_thread(_send, (database, last, until - (1 - _SENDING) * BUDGET, os.dup(writer)))
                running += 1
        os.close(writer)
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        while running and (left := until - now()) > 0:
            if poll.poll(left * 1000):
                running -= len(os.read(reader, running))
    finally:
        os.close(reader)


def _send(database: Database, last: list[Statement], until: float, done: int) -> None:
    """In a thread of its own."""
    count = len(last)
    try:
        try:
            session = open_session(database, max(0.05, until - now()))
            while last and (left := until - now()) > 0:
                try:
                    rows = session.call(*last[-1], left)
                    if rows and rows[0].get("ended"):
                        continue  # there may be another batch
                except (Refused, Busy):  # of this one alone: a transaction that it protects is open
                    log.debug("%s was refused when the process ended", last[-1][0])
                last.pop()
            session.close()
        except EngineError as error:
            log.event(
                "client.released_late", WARNING,
                "leases on %(database)s were not released before the process ended, and expire: %(error)s",
                database=str(database), error=str(error), left=len(last), count=count,
            )  # fmt: skip
    finally:
        with suppress(OSError):  # the handler waits no more
            os.write(done, b".")
        os.close(done)


@forks.in_child
def _forget_all() -> None:
    """A forked child holds nothing of its parent."""
    _holders.clear()
