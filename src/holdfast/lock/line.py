"""Who waits for the kernel's locks in any process, so that whoever takes one again and again lets others in.

The kernel frees a lock and gives it to nobody: whoever lets go and asks again is always quicker than somebody who asks
now and then. So whoever waits marks the lock's byte in a file of its own. The one who has the mark is first in line;
the others wait for the mark. Whoever comes past them lets the first one in, once a look for each lock: at every turn,
that would cost a pause each time. And a process that was stopped when it was first holds nobody up for long.
"""

from __future__ import annotations

import os
from contextlib import suppress

from holdfast.database.file_turns import SessionLocks

OVERTAKES = 25
"""Every so many times that somebody who is not the first asks, it is its turn all the same: that is some 0.15 s."""


class Line:
    """As seen from one session. Where its file may not be written there is none, and nobody waits for that."""

    passed: set[int] | None = None
    """What was asked for here since the last look, and let somebody in if need was. None: nobody stands in line."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._marks: SessionLocks | None = None
        self._ours: int | None = None
        self._asked = 0

    def look(self) -> None:
        """Now and then: does anybody wait for anything?"""
        self.passed = None
        if self._marks is not None or os.path.exists(self._path):
            marks = self._open()
            if marks is not None and not marks.is_free(0, 0):
                self.passed = set()

    def lets_in(self, byte: int) -> bool:
        """Is it somebody else's turn?"""
        if self.passed is None or byte in self.passed or self._marks is None:
            return False
        self.passed.add(byte)
        return not self._marks.is_free(byte)

    def is_turn(self, byte: int) -> bool:
        """Of whoever waits here."""
        if self._ours is None:
            self._asked += 1
            marks = self._open()
            with suppress(OSError):
                if marks is not None and not marks.hold(byte):
                    return self._asked % OVERTAKES == 0
            self._ours = byte
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
