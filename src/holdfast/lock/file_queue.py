"""A queue for locks of the kernel, between processes.

The kernel frees a lock without giving it to a waiter: a process that releases a lock and asks again at once always wins
over one that polls. So a waiter marks the lock's byte in a file beside the lock files. The process that holds the mark
is the first in the queue, and the others wait for the mark. A process that asks for a marked lock lets the first one go
ahead, once a sweep for each lock: a pause at every turn would cost too much. The first one stamps the mark at every
poll; if it is paused, and does not, the others go ahead.
"""

from __future__ import annotations

import os
from contextlib import suppress

from holdfast.database.file_turns import SessionLocks

PAUSED = 0.15
"""Seconds without a stamp after which the first in the queue counts as paused. It polls every few milliseconds."""


class FileQueue:
    """As one session sees it. Where its file cannot be written, there is no queue."""

    passed: set[int] | None = None
    """Bytes that were asked for since the last sweep. None: no process waits for any."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._marks: SessionLocks | None = None
        self._ours: int | None = None

    def sweep(self) -> None:
        """Look whether any process waits for any lock."""
        self.passed = None
        if self._marks is not None or os.path.exists(self._path):
            marks = self._open()
            if marks is not None and not marks.is_free(0, 0):
                self.passed = set()

    def is_others_turn(self, byte: int, shared: bool) -> bool:
        """Whether to let a waiter go ahead. Readers always do: readers that overlap would never let a writer in."""
        if shared:
            return self.has_waiters(byte)
        if self.passed is None or self._marks is None or byte in self.passed:
            return False
        self.passed.add(byte)
        return not self._marks.is_free(byte)

    def has_waiters(self, byte: int) -> bool:
        """Of other sessions."""
        marks = self._open() if os.path.exists(self._path) else None
        return marks is not None and not marks.is_free(byte)

    def is_own_turn(self, byte: int) -> bool:
        """Of a session that waits: whether to try now."""
        marks = self._open()
        with suppress(OSError):
            if marks is not None and self._ours is None and not marks.hold(byte):
                return marks.stamp_age(byte) > PAUSED
            self._ours = byte
            if marks is not None:
                marks.stamp(byte)
        return True

    def leave(self) -> None:
        if self._ours is not None and self._marks is not None:
            self._marks.drop(self._ours)
        self._ours = None

    def close(self) -> None:
        marks, self._marks, self._ours, self.passed = self._marks, None, None, None
        if marks is not None:
            marks.close()

    def _open(self) -> SessionLocks | None:
        if self._marks is None:
            with suppress(OSError):
                self._marks = SessionLocks(self._path)
        return self._marks
