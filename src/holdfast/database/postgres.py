"""A blocking PostgreSQL session: send, poll with a deadline, read.

It waits in ``poll`` and not in libpq, so Ctrl-C interrupts at once and every call ends in time.
"""

from __future__ import annotations

import select
from collections.abc import Mapping
from typing import Any

from psycopg import OperationalError, pq

from holdfast.database.pgconn import PostgresConnection, connect
from holdfast.database.sessions import Row, session_class
from holdfast.database.url import Database
from holdfast.errors import Refused, Unanswered, Unreachable
from holdfast.runtime.clock import now


class PostgresSession(PostgresConnection):
    def __init__(self, database: Database, pgconn: pq.abc.PGconn) -> None:
        super().__init__(database, pgconn)
        self._poll = select.poll()
        self._poll.register(pgconn.socket, select.POLLIN)

    @classmethod
    def open(cls, database: Database, timeout: float, *, for_examination: bool = False) -> PostgresSession:
        """``for_examination``: a standby will do, too, and no setting of the session is changed."""
        deadline = now() + timeout
        session = session_class(cls)(database, connect(database, timeout, for_examination=for_examination))
        try:
            session._set_up(deadline, for_examination)
        except BaseException:
            session.close()
            raise
        return session

    def _set_up(self, deadline: float, for_examination: bool) -> None:
        [facts] = self.call("session_open", {}, deadline - now())
        if (facts["in_recovery"] or facts["read_only"]) and not for_examination:
            raise Unreachable(
                f"{self.database} is read-only (a standby, or set so), and leases need the primary: "
                "list every host of the cluster in the URL"
            )
        self.version = facts["version"]
        self.pooled = facts["pid"] != self.pgconn.backend_pid
        if self.pooled:
            self._prepared = None
        elif not for_examination:
            self.call("session_tune", {}, deadline - now())

    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
        """Run a named statement. If it is interrupted, its outcome is unknown and the session is closed."""
        deadline = now() + timeout
        statement = self._statements[name]
        try:
            if self._must_prepare(statement):
                self._send_prepare(statement)
                self._rows(self._answer(deadline))
                if self._prepared is not None:
                    self._prepared.add(name)
            self._send(statement, parameters)
            return self._rows(self._answer(deadline), name)
        except Refused as error:
            if not self._unprepare(error):
                raise
            return self.call(name, parameters, deadline - now())
        except OperationalError as error:
            self.close()
            raise Unanswered(f"the connection to {self.database} was lost") from error
        except BaseException:  # a timeout or Ctrl-C: the answer is half read
            self.close()
            raise

    def script(self, text: str, timeout: float) -> None:
        """Several statements in one message: one transaction, unless the text says otherwise."""
        self._in_doubt = False
        try:
            self.pgconn.send_query(text.encode())
            self._rows(self._answer(now() + timeout))
        except OperationalError as error:
            self.close()
            raise Unanswered(f"the connection to {self.database} was lost") from error

    def post(self, name: str, parameters: Mapping[str, Any], timeout: float) -> None:
        self.call("wait_long", {}, timeout)
        self._prepared = None
        self._send(self._statements[name], parameters)
        self._flush(now() + timeout)

    def answered(self) -> bool:
        try:
            self.pgconn.consume_input()
            return not self.pgconn.is_busy()
        except OperationalError:
            return True

    def hold(self, key: int, timeout: float) -> bool:
        return bool(self.call("session_hold", {"session_key": key}, timeout)[0]["done"])

    def _answer(self, deadline: float) -> pq.abc.PGresult | None:
        pgconn = self.pgconn
        if pgconn.flush():
            self._flush(deadline)
        answer = None
        while True:
            while pgconn.is_busy():
                if not self._poll.poll(max(0.0, deadline - now()) * 1000):
                    raise Unanswered(f"{self.database} did not answer in time")
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                return answer
            if answer is None or answer.status != pq.ExecStatus.FATAL_ERROR:
                answer = result

    def _flush(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN | select.POLLOUT)
        while self.pgconn.flush():
            if not poll.poll(max(0.0, deadline - now()) * 1000):
                raise Unanswered(f"{self.database} did not take our request in time")
            self.pgconn.consume_input()
