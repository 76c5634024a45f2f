"""A watch on the change log: reads batches from its cursor, and waits while there is nothing to read.

On PostgreSQL a writer notifies while there are watches; polling about every 0.6 s catches lost notifications. On
SQLite, and through a pooler, there is only polling (on SQLite far more often). Never writes an object.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Self

from holdfast.database.background import Background
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.listener import OBJECTS
from holdfast.errors import Unanswered, Unreachable
from holdfast.names import check_timeout
from holdfast.objects.changes import BATCH, Change, Position
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency_async import AsyncWakeup, current_id, sleep
from holdfast.runtime.log import logger

log = logger("holdfast.objects")


class AsyncObjectWatch:
    """Iterate over it, or call ``next(timeout=…)``. ``close()`` ends it, and so does the end of ``async with``."""

    def __init__(self, engine: AsyncEngine, type: str | None, position: Position | None) -> None:
        self._engine, self._type = engine, type
        self._position = position
        """Where the next batch begins; None while ``begin`` has not set it."""
        self._buffer: deque[Change] = deque()
        """Changes read and not yet returned."""
        self._returned: Position | str | None = position
        """Everything up to here was returned: the cursor of the last change or, after a whole batch, its end."""
        self._signal: AsyncWakeup | None = None
        self._background: Background | None = None
        self._closed = False
        self._reader: int | None = None
        self._poll = min(engine.poll * 2, 0.6)
        """Mean interval of polling, shorter than the time after which an idle session is closed."""

    @property
    def cursor(self) -> str | None:
        """Everything up to here has been returned; None if ``since`` was not given and the watch has not begun."""
        return None if self._returned is None else str(self._returned)

    async def begin(self) -> str:
        """Set the starting point, the present end of the log unless ``since`` was given, and return its cursor."""
        if self._position is None:
            [row] = await self._engine.call("object_cursor", {})
            self._returned = self._position = Position.parse(row["cursor"], self._engine.database.dialect)
        return str(self._returned)

    async def next(self, *, timeout: float | None = None) -> Change | None:
        """The next change, or None when there is none within ``timeout`` seconds (None: wait for ever).

        CursorExpired when changes that were not returned yet have been trimmed. While the database cannot be reached,
        it is retried until the timeout; then Unreachable or Unanswered is raised.
        """
        until, caller = now() + check_timeout(timeout), current_id()
        if self._reader not in (None, caller):  # both would read the same batch
            raise RuntimeError(
                "another task or thread is reading this watch: give each reader its own objects.watch(…)"
            )
        self._reader = caller
        try:
            return await self._next(until)
        finally:
            self._reader = None

    async def _next(self, until: float) -> Change | None:
        while not self._buffer and not self._closed:
            await self._read_batch(until)
            if self._buffer or now() >= until:
                break
            await self._wait(until - now())
        if self._closed or not self._buffer:
            return None
        change = self._buffer.popleft()
        self._returned = change.cursor if self._buffer else self._position
        return change

    async def close(self) -> None:
        """End iterations, and let a waiting ``next`` return None. Changes read ahead are dropped: see ``cursor``."""
        self._closed = True
        self._unsubscribe()
        if self._signal is not None:
            self._signal.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        change = await self.next()
        if change is None:
            raise StopAsyncIteration
        return change

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        self._unsubscribe()

    async def _read_batch(self, until: float) -> None:
        """Read a batch into the buffer. Retries until ``until`` while the database cannot be reached."""
        pause = 0.05
        while True:
            try:
                await self.begin()
                assert self._position is not None
                filters = {"type": self._type, "limit": BATCH, "listening": self._background is not None}
                rows = await self._engine.call("object_changes", self._position.parameters() | filters)
                break
            except (Unreachable, Unanswered) as error:
                if self._engine.closed or now() + pause >= until:
                    raise
                log.debug("a watch on %s retries: %s", self._engine.database, error)
            await sleep(pause)
            pause = min(pause * 2, 1.0)
        before = self._position
        changes, self._position = before.read(rows, BATCH)
        self._buffer.extend(changes)
        if not changes:
            self._returned = self._position
            if (
                before.after is not None
            ):  # it ended a batch that was cut at BATCH rows: later changes may be there already
                await self._read_batch(until)

    async def _wait(self, longest: float) -> None:
        """Wait for a notification or the next poll. Subscribing wakes it once: a change between the last batch and the
        start of listening is not missed."""
        if self._signal is None:
            self._signal = AsyncWakeup()
        if self._background is None and self._engine.database.dialect == "postgres":
            self._background = self._engine.background
            self._background.subscribe(OBJECTS, self._signal.set)
        await self._signal.wait(min(longest, self._poll * jitter(0.75, 1.25)))

    def _unsubscribe(self) -> None:
        background, self._background = self._background, None
        if background is not None and self._signal is not None:
            background.unsubscribe(OBJECTS, self._signal.set)
