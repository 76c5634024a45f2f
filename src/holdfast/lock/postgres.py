"""One PostgreSQL session for locks, with as little as possible between the caller and libpq. It decides nothing.

``run`` is for a thread that has the session to itself and may wait for the answer; ``send``, ``wait`` and ``receive``
never wait, and are for an event loop.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from psycopg import OperationalError, pq

from holdfast.database.postgres import PostgresConnection, PostgresSession
from holdfast.database.url import Database
from holdfast.errors import EngineError, Unanswered
from holdfast.lock.pool import Op
from holdfast.lock.pooler import PROBE, check_that_it_stays
from holdfast.lock.terms import Key
from holdfast.lock.wire import Answers
from holdfast.runtime.clock import now

_NAMES = {
    verb: tuple(
        (b"", b"lock_%b%b" % (verb.encode(), mode), b"lock_%b%b_pair" % (verb.encode(), mode))
        for mode in (b"", b"_shared")
    )
    for verb in ("try", "unlock", "wait")
}
"""Statements by verb, then by mode, then by how many numbers a key has."""
_TRY, _UNLOCK, _WAIT = _NAMES.values()
_CODES = {"try": 0, "unlock": 4, "cancel": 8}
_STATEMENTS = (
    *(name.decode() for modes in _NAMES.values() for names in modes for name in names if name),
    "lock_batch", "lock_room", "lock_remember",
)  # fmt: skip


class PostgresLockWire:
    pause = 0.0

    def __init__(self, session: PostgresSession, pid: int) -> None:
        self.pid = pid
        self.descriptor = session.pgconn.socket
        self._session, self._pgconn = session, session.pgconn
        unprepared = session._prepared is None
        self._put: Callable[[bytes, Sequence[bytes]], None] = (
            partial(_put_in_full, session) if unprepared else session.pgconn.send_query_prepared
        )
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        self._poll = poll.poll
        self._result: pq.abc.PGresult | None = None
        self._expected = ""
        """What ``receive`` is to return: "answers", "nothing" after ``drain``, or "" when nothing was sent."""

    @property
    def is_expecting(self) -> bool:
        return bool(self._expected)

    @classmethod
    def open(cls, database: Database, timeout: float) -> PostgresLockWire:
        deadline = now() + timeout
        session = PostgresSession.open(database, timeout)
        try:
            pid = check_that_it_stays(database, session, deadline)
            if session.pooled:
                session.call("session_tune", {}, deadline - now())
            session.call("lock_tune", {}, deadline - now())
            if session._prepared is not None:
                _prepare(session, deadline)
        except BaseException:
            session.close()
            raise
        return cls(session, pid)

    def run(self, op: Op, patience: float | None) -> bool | None:
        """Nothing is flushed: all that was sent before is answered, so there is room for a few bytes; if they ever
        stayed behind, there would be no answer in time. Polling without a timeout is cheaper: the kernel sets no
        timer."""
        pgconn, put, poll, entry = self._pgconn, self._put, self._poll, op.entry  # hot: 2 % of bench lock_pair
        result = None
        try:
            put((_TRY if op.verb == "try" else _UNLOCK)[entry.shared][len(entry.key)], entry.key)  # type: ignore[union-attr]
            while poll(patience):
                pgconn.consume_input()
                if pgconn.is_busy():
                    continue
                if result is None:
                    result = pgconn.get_result()
                    if pgconn.is_busy():
                        continue
                if result is not None and (value := result.get_value(0, 0)) is not None:
                    return value == b"t"
                return bool(self._values(result))  # it raises
        except OperationalError as error:
            raise self._lost(error) from error
        return None

    def send(self, ops: Sequence[Op]) -> None:
        op = ops[0]
        entry = op.entry
        if op.verb == "room":
            self._send(b"lock_room", ())
        elif op.verb == "note":
            self._send(b"lock_remember", (op.text.encode(),))
        elif entry is not None and len(ops) == 1:
            self._send((_TRY if op.verb == "try" else _UNLOCK)[entry.shared][len(entry.key)], entry.key)
        else:
            self._send(b"lock_batch", _batch(ops))
        self._expected = "answers"

    def wait(self, key: Key, shared: bool) -> None:
        self._send(_WAIT[shared][len(key)], key)
        self._expected = "answers"

    def cancel(self) -> None:
        """Nothing to do: the server ends it."""

    def receive(self) -> Answers | EngineError | None:
        try:
            self._pgconn.consume_input()
            if not self._is_complete() or not self._expected:  # not expected: the server's message as it shuts down
                return None
        except OperationalError as error:
            raise self._lost(error) from error
        result, expected, self._result, self._expected = self._result, self._expected, None, ""
        if expected == "nothing":
            return []
        try:
            return self._values(result)
        except Unanswered:
            raise
        except EngineError as error:
            return error

    def drain(self) -> bool:
        self._result = None
        try:
            if self._pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                self._expected = "nothing"
                return True
            while self._pgconn.get_result() is not None:
                pass
            self._expected = ""
        except OperationalError as error:
            raise self._lost(error) from error
        return False

    def problem(self) -> None:
        return None

    def hang_up(self) -> None:
        """The server notices, and frees what the session holds."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._session.close()

    def _send(self, statement: bytes, parameters: Sequence[bytes]) -> None:
        try:
            self._put(statement, parameters)
            if self._pgconn.flush():
                self._session._flush(now() + PROBE)
        except OperationalError as error:
            raise self._lost(error) from error

    def _is_complete(self) -> bool:
        """Take what has arrived, up to the end of the answer. Never more: libpq's ``get_result`` would block with the
        interpreter's lock held, and after a FATAL message the answer ends with the connection."""
        pgconn = self._pgconn
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                return True
            self._result = result
        return False

    def _values(self, result: pq.abc.PGresult | None) -> Answers:
        if result is None:
            raise self._lost(None)
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise self._session._as_error(result)
        if result.ftype(0) == 16:
            return [result.get_value(row, 0) == b"t" for row in range(result.ntuples)]
        return [int(result.get_value(row, 0) or 0) for row in range(result.ntuples)]

    def _lost(self, error: Exception | None) -> Unanswered:
        reason = " ".join(str(error or "").split())  # libpq's message has several lines
        return Unanswered(f"the connection to {self._session.database} was lost{reason and ': '}{reason}")


def _put_in_full(session: PostgresSession, statement: bytes, parameters: Sequence[bytes]) -> None:
    session.pgconn.send_query_params(session._statements[statement.decode()].sql.encode(), parameters)


def _batch(ops: Sequence[Op]) -> tuple[bytes, bytes, bytes]:
    codes, firsts, seconds = [], [], []
    for op in ops:
        code, key = _CODES[op.verb], (b"%d" % op.target.wire.pid,) if op.target is not None else op.entry.key  # type: ignore[union-attr]
        if op.entry is not None:
            code += 2 * op.entry.shared + (len(key) - 1)
        codes.append(b"%d" % code)
        firsts.append(key[0])
        seconds.append(key[1] if len(key) > 1 else b"0")
    return tuple(b"{%b}" % b",".join(each) for each in (codes, firsts, seconds))  # type: ignore[return-value]


def _prepare(session: PostgresSession, deadline: float) -> None:
    """All of them in one round trip."""
    pgconn = session.pgconn
    pgconn.enter_pipeline_mode()
    for name in _STATEMENTS:
        session._send_prepare(session._statements[name])
    pgconn.pipeline_sync()
    for _ in _STATEMENTS:
        PostgresConnection._rows(session, session._answer(deadline))
    while (result := session._answer(deadline)) is None or result.status != pq.ExecStatus.PIPELINE_SYNC:
        pass
    pgconn.exit_pipeline_mode()
