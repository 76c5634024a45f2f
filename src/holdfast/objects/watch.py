# Generated from watch_async.py by scripts/unasync.py. Do not edit.
"""A watch on the log of changes: reads from where it stands, and waits where there is nothing to read.

Whoever writes notifies only while somebody watches; asking again, a little more often than once a second, is the net.
On SQLite, where it is done far more often, and through a pooler there is only the asking.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Self

from holdfast.database.background import Background
from holdfast.database.engine import Engine
from holdfast.database.listener import OBJECTS
from holdfast.errors import Unanswered, Unreachable
from holdfast.names import check_timeout
from holdfast.objects.changes import BATCH, Change, Position
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import Wakeup, current_id, sleep
from holdfast.runtime.log import logger

log = logger("holdfast.objects")


class Watch:
    """Iterate over it, or call ``next(timeout=…)``. ``close()`` ends it, and so does the end of a ``with`` block."""

    def __init__(self, engine: Engine, type: str | None, position: Position | None) -> None:
        self._engine, self._type, self._position = engine, type, position
        self._read: deque[Change] = deque()
        self._told: Position | str | None = position
        self._signal: Wakeup | None = None
        self._background: Background | None = None
        self._closed = False
        self._reader: int | None = None
        self._poll = min(engine.poll * 2, 0.6)
        """Seconds, about, until it asks on its own; below one, so that the session stays open."""

    @property
    def cursor(self) -> str | None:
        """Everything up to here has been told; None before a watch from now on has begun."""
        return None if self._told is None else str(self._told)

    def begin(self) -> str:
        """Decide where to watch from, if it was not said: here and now. Returns the cursor."""
        if self._position is None:
            [row] = self._engine.call("object_cursor", {})
            self._told = self._position = Position.parse(row["cursor"], self._engine.database.dialect)
        return str(self._told)

    def next(self, *, timeout: float | None = None) -> Change | None:
        """The next change, or None when there is none within ``timeout`` seconds (None: wait for ever).

        CursorExpired when changes that were not told yet have been trimmed. A database that is away is waited for.
        """
        until, me = now() + check_timeout(timeout), current_id()
        if self._reader not in (None, me):  # both would read from the same place, and tell the same
            raise RuntimeError(
                "somebody else is reading this watch: each reader needs one of its own, objects.watch(…)"
            )
        self._reader = me
        try:
            return self._next(until)
        finally:
            self._reader = None

    def _next(self, until: float) -> Change | None:
        while not self._read and not self._closed:
            self._look(until)
            if self._read or now() >= until:
                break
            self._wait(until - now())
        if self._closed or not self._read:
            return None
        change = self._read.popleft()
        self._told = change.cursor if self._read else self._position
        return change

    def close(self) -> None:
        """Whoever waits for a change gets None, and an iteration ends, even if more was read: ``cursor`` says what
        was told."""
        self._closed = True
        self._unwatch()
        if self._signal is not None:
            self._signal.set()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        change = self.next()
        if change is None:
            raise StopIteration
        return change

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._unwatch()

    def _look(self, until: float) -> None:
        """Read a batch. While the database is away there is nothing to read, and nothing is lost by it."""
        pause = 0.05
        while True:
            try:
                self.begin()
                assert self._position is not None
                listening = {"type": self._type, "most": BATCH, "listening": self._background is not None}
                rows = self._engine.call("object_changes", self._position.parameters() | listening)
                break
            except (Unreachable, Unanswered) as error:
                if self._engine.closed or now() + pause >= until:
                    raise
                log.debug("a watch on %s asks again: %s", self._engine.database, error)
            sleep(pause)
            pause = min(pause * 2, 1.0)
        before = self._position
        changes, self._position = before.read(rows, BATCH)
        self._read.extend(changes)
        if not changes:
            self._told = self._position
            if before.after is not None:  # that was the end of what there was when the batch was begun
                self._look(until)

    def _wait(self, longest: float) -> None:
        """Woken by a writer; and once when listening has begun, so that nothing falls in between."""
        if self._signal is None:
            self._signal = Wakeup()
        if self._background is None and self._engine.database.dialect == "postgres":
            self._background = self._engine.background
            self._background.subscribe(OBJECTS, self._signal.set)
        self._signal.wait(min(longest, self._poll * jitter(0.75, 1.25)))

    def _unwatch(self) -> None:
        background, self._background = self._background, None
        if background is not None and self._signal is not None:
            background.unsubscribe(OBJECTS, self._signal.set)
