"""The output of a sandbox, bounded, in files that are only appended to."""

from __future__ import annotations

import os


class OutputLog:
    """At most two pieces, each named by the offset of its first byte, and each half of the limit."""

    def __init__(self, limit: int) -> None:
        self._limit, self.end, self.dropped = max(limit // 2, 1), 0, 0
        self._pieces: list[int] = []
        self._file = -1

    def add(self, data: bytes) -> None:
        while data:
            if not self._pieces or self.end - self._pieces[-1] >= self._limit:
                self._rotate()
            room = self._limit - (self.end - self._pieces[-1])
            part, data = data[:room], data[room:]
            try:
                written = os.write(self._file, part)
            except OSError:  # the disk is full: the program continues, and its output is lost
                self.dropped += len(part)
                continue
            self.end += written
            data = part[written:] + data

    def _rotate(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._pieces.append(self.end)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(f"log.{self.end}", flags, 0o600)
        except OSError:
            self._file = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        while len(self._pieces) > 2:
            try:
                os.unlink(f"log.{self._pieces.pop(0)}")
            except OSError:  # deleted already
                pass
