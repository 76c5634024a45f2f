"""The SQLite session for asyncio: the blocking one in a thread of its own, because a commit waits for the disk."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from holdfast.database.call_queue import Answer
from holdfast.database.sessions import Calls, Row
from holdfast.database.sqlite import SqliteSession
from holdfast.database.url import Database
from holdfast.errors import Refused, Unanswered

T = TypeVar("T")


class AsyncSqliteSession:
    pooled, shares = False, True
    identity: Row | None = {}  # noqa: RUF012 - never changed

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._session: SqliteSession | None = None
        threading.Thread(target=self._run, name="holdfast-sqlite", daemon=True).start()

    @classmethod
    async def open(cls, database: Database, timeout: float, *, for_examination: bool = False) -> AsyncSqliteSession:
        self = cls(asyncio.get_running_loop())
        try:
            self._session = await self._submit(
                lambda: SqliteSession.open(database, timeout, for_examination=for_examination)
            )
        except Exception:
            self._jobs.put(None)
            raise
        return self

    @property
    def _opened(self) -> SqliteSession:
        if self._session is None:
            raise Unanswered("the session is closed")
        return self._session

    async def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
        session = self._opened
        return await self._submit(lambda: session.call(name, parameters, timeout))

    async def call_together(self, calls: Calls, timeout: float) -> list[Answer]:
        session = self._opened
        return await self._submit(lambda: session.call_together(calls, timeout))

    async def script(self, text: str, timeout: float) -> None:
        session = self._opened
        await self._submit(lambda: session.script(text, timeout))

    async def rehearse(
        self, calls: Iterable[tuple[str, Mapping[str, Any]]], timeout: float
    ) -> list[list[Row] | Refused]:
        session = self._opened
        return await self._submit(lambda: session.rehearse(calls, timeout))

    def check_target(self) -> None:
        self._opened.check_target()

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._jobs.put(session.close)
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _submit(self, action: Callable[[], T]) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = self._loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():  # the caller was cancelled
                self._drop(result)
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def job() -> None:
            result, failed = None, None
            try:
                result = action()
            except Exception as error:
                failed = error
            try:
                self._loop.call_soon_threadsafe(settle, result, failed)
            except RuntimeError:  # the loop was closed meanwhile
                self._drop(result)

        self._jobs.put(job)
        return answer

    def _drop(self, result: object) -> None:
        """Close a session whose caller was cancelled while it was opened, and end the thread if it has none."""
        if isinstance(result, SqliteSession):
            self._jobs.put(result.close)
        if self._session is None:
            self._jobs.put(None)
