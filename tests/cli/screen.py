"""A program on a terminal of its own, with keys to press and a screen to read."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import termios
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.children import PATIENCE, eventually
from tests.cli.command import environment
from tests.cli.runs import children


class Screen:
    """A new session on a new terminal. The terminal does not echo, so everything on it was written by a program."""

    def __init__(self, *command: str, url: str, **more: str) -> None:
        self._master, slave = pty.openpty()
        modes = termios.tcgetattr(slave)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        enter = 'exec 0<>"$0" 1>&0 2>&0; exec "$@"'  # the first terminal that a session leader opens becomes its own
        self.process = subprocess.Popen(
            ["sh", "-c", enter, os.ttyname(slave), *command],
            env=environment(**{"HOLDFAST_URL": url, "PS1": "", "TERM": "dumb", **more}),
            start_new_session=True,
        )
        self._slave = slave
        self._text = ""
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while received := os.read(self._master, 65536):
                self._text += received.decode("utf-8", "replace")
        except OSError:
            pass

    def keys(self, text: str) -> None:
        os.write(self._master, text.encode())

    def sees(self, text: str) -> str:
        """Wait for it; what was said since the last look."""
        eventually(lambda: text in self._text[self._seen :], f"{text!r} in {self._text!r}", PATIENCE)
        start, self._seen = self._seen, self._text.index(text, self._seen) + len(text)
        return self._text[start : self._seen]

    def number(self, before: str) -> int:
        """The number on a line that begins so."""
        self.sees(before)
        return int(self.sees("\n"))

    def foreground(self) -> int:
        return os.tcgetpgrp(self._master)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in _descendants(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._slave)
        self._reader.join(PATIENCE)
        os.close(self._master)


def _descendants(pid: int) -> list[int]:
    below = children(pid)
    return [*below, *(each for child in below for each in _descendants(child))]
