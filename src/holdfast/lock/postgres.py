"""One PostgreSQL session for locks, with as little as possible between the caller and libpq.

``run`` is for a thread that has the session to itself and may wait for the answer, ``send`` and ``receive`` are for a
pump. Neither decides anything: see ``lock.mux``.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from psycopg import OperationalError, pq

from holdfast.database.postgres import PostgresConnection, PostgresSession
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, Unanswered
from holdfast.lock.pooler import PROBE, check_that_it_stays
from holdfast.lock.tickets import Key, Op, Unheard
from holdfast.runtime.clock import now

_STATEMENTS = (
    "lock_try", "lock_try_pair", "lock_unlock", "lock_unlock_pair", "lock_batch", "lock_wait", "lock_wait_pair",
    "lock_room", "lock_remember",
)  # fmt: skip
_TRY, _UNLOCK, _WAIT = ((b"", b"lock_%b" % each, b"lock_%b_pair" % each) for each in (b"try", b"unlock", b"wait"))
"""By how many numbers a key has."""
_CODES = {"try": 0, "unlock": 2, "cancel": 4}
Answers = list[Any]


class PostgresLockWire:
    later = None

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
        self._wait = poll.poll
        self._result: pq.abc.PGresult | None = None
        self._verb = ""

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

    def run(self, verb: str, key: Key, patience: float | None) -> bool | None:
        """One thing, now; None when there is no answer in so many milliseconds. Then, and when interrupted, ``drain``
        comes next. To wait for as long as it takes costs less: the system keeps no time.

        Nothing is flushed: all that was said before has been answered, so there is room for a few bytes; and if they
        ever stayed behind, that would be no answer in time."""
        pgconn, put, wait = self._pgconn, self._put, self._wait  # called as attributes they take longer
        result = None
        try:
            put((_TRY if verb == "try" else _UNLOCK)[len(key)], key)
            while wait(patience):
                pgconn.consume_input()
                if pgconn.is_busy():  # as in _is_whole
                    continue
                if result is None:
                    result = pgconn.get_result()
                    if pgconn.is_busy():
                        continue
                if result is not None and (done := result.get_value(0, 0)) is not None:
                    return done == b"t"
                return bool(self._answers(result))  # it raises
        except OperationalError as error:
            raise self._gone(error) from error
        return None

    def begin(self, verb: str, key: Key) -> None:
        """One thing, for ``answer`` to tell."""
        put = self._put
        try:
            put((_TRY if verb == "try" else _UNLOCK)[len(key)], key)
        except OperationalError as error:
            raise self._gone(error) from error

    def send(self, ops: Sequence[Op]) -> None:
        op = ops[0]
        self._verb = op.verb
        try:
            if op.verb == "room":
                self._say(b"lock_room", ())
            elif op.verb == "note":
                self._say(b"lock_remember", (op.text.encode(),))
            elif len(ops) == 1 and op.claim is not None:
                self._say((_TRY if op.verb == "try" else _UNLOCK)[len(op.claim.key)], op.claim.key)
            else:
                self._say(b"lock_batch", _batch(ops))
        except OperationalError as error:
            raise self._gone(error) from error

    def stand(self, key: Key) -> None:
        """In the server's line; it may take for ever."""
        self._verb = "wait"
        try:
            self._say(_WAIT[len(key)], key)
        except OperationalError as error:
            raise self._gone(error) from error

    def receive(self) -> Answers | EngineError | Unheard | None:
        """What has been answered, or why not; None when there is more to come. Raises when the connection is gone."""
        pgconn = self._pgconn
        try:
            pgconn.consume_input()
            if not self._is_whole():
                return None
        except OperationalError as error:
            raise self._gone(error) from error
        if not self._verb:  # nothing was asked: a message from the server on its way down
            return None
        result, verb, self._result, self._verb = self._result, self._verb, None, ""
        if verb == "drain":
            return []
        if result is None and pgconn.status == pq.ConnStatus.OK:
            return Unheard()
        try:
            return self._answers(result)
        except Unanswered:
            raise
        except EngineError as error:
            return error

    def answer(self) -> bool | Unheard | EngineError | None:
        """The same for ``begin``."""
        pgconn, result = self._pgconn, self._result
        try:
            pgconn.consume_input()
            if pgconn.is_busy():  # as in _is_whole
                return None
            if result is None:
                result = pgconn.get_result()
                if pgconn.is_busy():
                    self._result = result
                    return None
            if result is not None and (done := result.get_value(0, 0)) is not None:
                self._result = None
                return done == b"t"
            return self._no_answer(result)
        except OperationalError as error:
            raise self._gone(error) from error

    def _no_answer(self, result: pq.abc.PGresult | None) -> Unheard | EngineError:
        self._result = None
        if result is None and self._pgconn.status == pq.ConnStatus.OK:  # it was taken, or never asked for
            return Unheard()
        try:
            self._answers(result)
        except Refused as error:
            return error
        raise self._gone(None)

    @property
    def idle(self) -> bool:
        """Nothing is asked that was not answered, and no answer is left to be taken."""
        return self._pgconn.transaction_status != pq.TransactionStatus.ACTIVE

    def drain(self) -> bool:
        """After an interruption: is there an answer still to come? It is nobody's."""
        self._result = None
        try:
            if self._pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                self._verb = "drain"
                return True
            while self._pgconn.get_result() is not None:
                pass
        except OperationalError as error:
            raise self._gone(error) from error
        return False

    def look(self) -> None:
        return None

    def hang_up(self) -> None:
        """From any thread, whoever is in the middle of a call: it gets an error, and the server frees what is held."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._session.close()

    def _say(self, statement: bytes, parameters: Sequence[bytes]) -> None:
        self._put(statement, parameters)
        if self._pgconn.flush():
            self._session._flush(now() + PROBE)

    def _is_whole(self) -> bool:
        """Take what has come, up to the end of the answer. Whoever takes more waits for it, and all threads with him:
        libpq's ``get_result`` keeps the interpreter to itself, and after a FATAL the end is the socket's."""
        pgconn = self._pgconn
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                return True
            self._result = result
        return False

    def _answers(self, result: pq.abc.PGresult | None) -> Answers:
        if result is None:
            raise self._gone(None)
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise self._session._as_error(result)
        if result.ftype(0) == 16:
            return [result.get_value(row, 0) == b"t" for row in range(result.ntuples)]
        return [int(result.get_value(row, 0) or 0) for row in range(result.ntuples)]

    def _gone(self, error: Exception | None) -> Unanswered:
        why = " ".join(str(error or "").split())  # libpq takes several lines for it
        return Unanswered(f"the connection to {self._session.database} was lost{why and ': '}{why}")


def _put_in_full(session: PostgresSession, statement: bytes, parameters: Sequence[bytes]) -> None:
    session.pgconn.send_query_params(session._statements[statement.decode()].sql.encode(), parameters)


def _batch(ops: Sequence[Op]) -> tuple[bytes, bytes, bytes]:
    codes, firsts, seconds = [], [], []
    for op in ops:
        key: Key = (b"%d" % op.target.wire.pid,) if op.target is not None else op.claim.key  # type: ignore[union-attr]
        codes.append(b"%d" % (_CODES[op.verb] + (len(key) - 1)))
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
