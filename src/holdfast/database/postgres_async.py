"""A PostgreSQL session on an event loop: one reader for the life of the connection, requests in a queue.

A request runs to its end even if its task is cancelled, so the session is never left half read; undoing what it may
have been granted is up to the caller. Connecting happens in a thread of its own, because name resolution blocks and the
loop's thread pool may be full of the user's work.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import OperationalError, pq

from holdfast.database.call_queue import Again, Answer
from holdfast.database.postgres import PostgresConnection, PostgresSession
from holdfast.database.sessions import Calls, Row, is_readable, session_class
from holdfast.database.statements import Statement
from holdfast.database.url import Database
from holdfast.errors import Refused, Unanswered, Unreachable


@dataclass(slots=True, eq=False)
class _Request:
    statements: list[Statement]
    """One, or several that are sent as a pipeline; none for a script."""
    parameters: list[Mapping[str, Any]]
    text: str
    answer: asyncio.Future[Any]
    """Of rows; of a list of answers for a pipeline."""
    is_pipeline: bool = False
    timer: asyncio.TimerHandle | None = None
    preparing: Statement | None = None
    results: list[pq.abc.PGresult] = field(default_factory=list)


class AsyncPostgresSession(PostgresConnection):
    def __init__(self, session: PostgresSession, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(session.database, session.pgconn)
        self.pooled, self.version, self._prepared = session.pooled, session.version, session._prepared
        self.shares, self.identity = session.shares, session.identity
        self._loop = loop
        self._queue: deque[_Request] = deque()
        self._closed = False
        self._writing = False
        self._socket = self.pgconn.socket
        loop.add_reader(self._socket, self._readable)

    @classmethod
    async def open(cls, database: Database, timeout: float, *, for_examination: bool = False) -> AsyncPostgresSession:
        """Connect in a thread, because resolving the host's name blocks; raises as PostgresSession.open does."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[PostgresSession] = loop.create_future()

        def deliver(session: PostgresSession | None, error: BaseException | None) -> None:
            if opened.done():
                if session is not None:
                    session.close()
            elif session is not None:
                opened.set_result(session)
            else:
                opened.set_exception(error or Unanswered("no session"))

        def connect() -> None:
            session, failed = None, None
            try:
                session = PostgresSession.open(database, timeout, for_examination=for_examination)
            except Exception as error:
                failed = error
            try:
                loop.call_soon_threadsafe(deliver, session, failed)
            except RuntimeError:  # the loop was closed meanwhile
                if session is not None:
                    session.close()

        threading.Thread(target=connect, name="holdfast-connect", daemon=True).start()
        return session_class(cls)(await opened, loop)

    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> asyncio.Future[list[Row]]:
        return self._submit([self._statements[name]], [parameters], timeout)

    def call_together(self, calls: Calls, timeout: float) -> asyncio.Future[list[Answer]]:
        """Run named statements in one transaction. Unanswered when that of all of them is unknown."""
        statements, parameters = [self._statements[name] for name, _ in calls], [given for _, given in calls]
        return self._submit(statements, parameters, timeout, is_pipeline=True)

    async def script(self, text: str, timeout: float) -> None:
        await self._submit([], [], timeout, text=text)

    def close(self) -> None:
        if self._closed:  # its descriptor may belong to another file by now
            return
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self.pgconn.finish()
        self._fail_all(Unanswered(f"the session on {self.database} was closed"))

    def abandon(self) -> None:
        super().abandon()
        self._closed = True
        self._queue.clear()

    def _submit(
        self,
        statements: list[Statement],
        parameters: list[Mapping[str, Any]],
        timeout: float,
        *,
        is_pipeline: bool = False,
        text: str = "",
    ) -> asyncio.Future[Any]:
        request = _Request(statements, parameters, text, self._loop.create_future(), is_pipeline)
        if self._closed:
            request.answer.set_exception(Unanswered(f"the session on {self.database} was closed"))
            return request.answer
        request.timer = self._loop.call_later(timeout, self._on_timeout, request)
        self._queue.append(request)
        if len(self._queue) == 1:
            self._start()
        return request.answer

    def _start(self) -> None:
        """Send the request at the head of the queue, or prepare a statement of it first."""
        while self._queue:
            request = self._queue[0]
            if request.answer.cancelled():  # cancelled before it was sent
                self._take()
                continue
            request.results.clear()
            try:
                request.preparing = next(filter(self._must_prepare, request.statements), None)
                if request.is_pipeline and request.preparing is None and self._must_prepare(self._statements["share"]):
                    request.preparing = self._statements["share"]
                if request.preparing is not None:
                    self._send_prepare(request.preparing)
                elif request.is_pipeline:
                    self._start_pipeline(request)
                elif request.statements:
                    self._send(request.statements[0], request.parameters[0])
                else:
                    self._in_doubt = False
                    self.pgconn.send_query(request.text.encode())
                self._write()
            except OperationalError as error:
                self._on_lost(error)
            except Exception as error:  # a value that cannot be encoded: nothing was sent
                self._finish(error)
            return

    def _start_pipeline(self, request: _Request) -> None:
        values: list[list[bytes | None]] = []
        for statement, parameters in zip(request.statements, request.parameters, strict=True):
            try:
                values.append(self._values(statement, parameters))
            except Exception:
                refused, number = len(values), len(request.statements)
                self._finish([Again.ALONE if i == refused else Again.TOGETHER for i in range(number)])
                return
        self._send_pipeline(request.statements, values)

    def _take(self) -> _Request:
        request = self._queue.popleft()
        if request.timer is not None:
            request.timer.cancel()
        return request

    def _write(self) -> None:
        if self.pgconn.flush():
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._socket, self._writable)
        elif self._writing:
            self._writing = False
            self._loop.remove_writer(self._socket)

    def _writable(self) -> None:
        try:
            self._write()
        except OperationalError as error:
            self._on_lost(error)

    def _readable(self) -> None:
        try:
            self.pgconn.consume_input()
            if not self._queue:
                while self.pgconn.notifies() is not None:
                    pass
                return
            request = self._queue[0]
            is_pipeline = request.is_pipeline and request.preparing is None
            while not self.pgconn.is_busy():
                result = self.pgconn.get_result()
                if result is not None:
                    request.results.append(result)
                if (
                    (result is not None and result.status == pq.ExecStatus.PIPELINE_SYNC)
                    if is_pipeline
                    else result is None
                ):
                    self._on_answer(request)
                    return
            if is_readable(self._socket):
                self._loop.call_soon(self._read_more)
        except OperationalError as error:
            self._on_lost(error)

    def _read_more(self) -> None:
        if not self._closed:
            self._readable()

    def _on_answer(self, request: _Request) -> None:
        results, preparing = request.results, request.preparing
        try:
            if preparing is None and request.is_pipeline:
                self._finish(self._pipeline_answers([statement.name for statement in request.statements], results))
                return
            failed = next((result for result in results if result.status == pq.ExecStatus.FATAL_ERROR), None)
            name = request.statements[0].name if request.statements and preparing is None else None
            rows = self._rows(failed or (results[-1] if results else None), name)
        except Refused as error:
            if not self._unprepare(error):
                self._finish([Again.ALONE] * len(request.statements) if request.is_pipeline else error)
                return
        except Unanswered as error:
            self._finish(error)
            return
        else:
            if preparing is None:
                self._finish(rows)
                return
            if self._prepared is not None:
                self._prepared.add(preparing.name)
        self._start()  # the same request again: now prepared, or without preparing

    def _finish(self, outcome: Sequence[Row] | Sequence[Answer] | Exception) -> None:
        answer = self._take().answer
        if not answer.done():
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        self._start()

    def _on_timeout(self, request: _Request) -> None:
        if self._queue and self._queue[0] is request:
            self._on_lost(None, f"{self.database} did not answer in time")
            return
        self._queue.remove(request)  # it was never sent
        if not request.answer.done():
            request.answer.set_exception(
                Unreachable(f"{self.database} was busy with other requests of ours for too long")
            )

    def _on_lost(self, error: Exception | None, why: str = "") -> None:
        failure = Unanswered(why or f"the connection to {self.database} was lost")
        failure.__cause__ = error
        self._fail_all(failure)
        self.close()

    def _fail_all(self, failure: Exception) -> None:
        requests, self._queue = self._queue, deque()
        for request in requests:
            if request.timer is not None:
                request.timer.cancel()
            if not request.answer.done():
                request.answer.set_exception(failure)
                request.answer.exception()  # marks it as retrieved: the caller may be gone
