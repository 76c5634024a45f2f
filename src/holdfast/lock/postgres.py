"""One PostgreSQL session for locks, with as little as possible between the caller and libpq. It decides nothing.

``run`` is for a thread that has the session to itself and may wait for the answer; ``send``, ``wait`` and ``receive``
are for an event loop, and do not wait for an answer.
"""

from __future__ import annotations

import json
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
from holdfast.lock.pool import Answers, Entry, Note, Op
from holdfast.lock.pooler import PROBE, check_that_it_stays
from holdfast.lock.terms import Key, number
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
# hot: bench lock_pair
_ANSWERS: dict[bytes | None, tuple[bool]] = {b"t": (True,), b"f": (False,)}
_CODES = {"try": 0, "unlock": 4, "cancel": 8}
_STATEMENTS = (
    *(name.decode() for modes in _NAMES.values() for names in modes for name in names if name),
    "lock_batch", "lock_room", "lock_note", "lock_rivals",
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

    def run(self, entry: Entry, unlocks: bool, patience: float | None) -> bool | None:
        """Nothing is flushed: all that was sent before is answered, so there is room for a few bytes; if they ever
        stayed behind, there would be no answer in time. Polling without a timeout is cheaper: the kernel sets no
        timer."""
        pgconn, key, result = self._pgconn, entry.key, None
        try:
            self._put((_UNLOCK if unlocks else _TRY)[entry.shared][len(key)], key)
            while self._poll(patience):
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

    def start(self, entry: Entry, unlocks: bool) -> None:
        """Nothing is flushed, as in ``run``."""
        key = entry.key
        try:
            self._put((_UNLOCK if unlocks else _TRY)[entry.shared][len(key)], key)
        except OperationalError as error:
            raise self._lost(error) from error
        self._expected = "answers"

    def send(self, ops: Sequence[Op]) -> None:
        op = ops[0]
        if op.verb == "room":
            self._send(b"lock_room", ())
        elif op.verb == "rivals" and op.entry is not None:
            key = op.entry.key
            self._send(b"lock_rivals", (b"t" if len(key) == 2 else b"f", b"%d" % number(key)))
        elif op.note is not None:
            self._send(b"lock_note", _note(op.note))
        else:
            self._send(b"lock_batch", _batch(ops))

    def wait(self, key: Key, shared: bool) -> None:
        self._send(_WAIT[shared][len(key)], key)

    def receive(self) -> Answers | EngineError | None:
        """Take what has arrived. ``get_result`` only when libpq is not busy: it would block with the interpreter's lock
        held, and after a FATAL message the answer ends with the connection."""
        pgconn, result, expected = self._pgconn, self._result, self._expected
        try:
            pgconn.consume_input()
            if result is None and not pgconn.is_busy():
                self._result = result = pgconn.get_result()
            if pgconn.is_busy() or not expected:  # not expected: the server's message as it shuts down
                return None
        except OperationalError as error:
            raise self._lost(error) from error
        self._result, self._expected = None, ""
        if expected == "nothing":
            return ()
        if result is not None and result.ntuples == 1 and (answer := _ANSWERS.get(result.get_value(0, 0))) is not None:
            return answer
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

    def has_failed_note(self) -> bool:
        return False  # it is answered with an error

    def hang_up(self) -> None:
        """The server notices, and frees what the session holds."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._session.close()

    def end(self) -> None:
        """Close it, and wait up to PROBE for the server to close its side, when its process has ended. Does nothing if
        it is closed already."""
        try:
            with suppress(OSError, OperationalError), socket.socket(fileno=os.dup(self._pgconn.socket)) as ours:
                self._session.close()
                ours.settimeout(PROBE)
                while ours.recv(4096):
                    pass
        finally:  # there may be no descriptor for the second one
            self._session.close()

    def _send(self, statement: bytes, parameters: Sequence[bytes]) -> None:
        try:
            self._put(statement, parameters)
            if self._pgconn.flush():
                self._session._flush(now() + PROBE)
        except OperationalError as error:
            raise self._lost(error) from error
        self._expected = "answers"

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


def _note(note: Note) -> tuple[bytes, ...]:
    held = [[len(key) == 2, number(key), age, waiting] for key, age, waiting in note.held]
    gone = [[len(key) == 2, number(key)] for key in note.gone]
    lists = [name for _, name in note.names], held, gone
    return (b"t" if note.is_first else b"f", *(json.dumps(each).encode() for each in lists))


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
