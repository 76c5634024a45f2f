"""A terminal in full-screen mode: lines that are shown, and keys that are read.

A signal is an event that ``read`` returns, like a key: its handler raises nothing, so it cannot interrupt what restores
the terminal. However the block ends, the terminal has its modes, its cursor and its former content again.
"""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import termios
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.text import Text

ENDED, HUNG_UP, INTERRUPTED, RESIZED, STOPPED = "SIGTERM", "SIGHUP", "SIGINT", "SIGWINCH", "SIGTSTP"
_SIGNALS = [signal.Signals[name] for name in (ENDED, HUNG_UP, INTERRUPTED, RESIZED, STOPPED)]
_KEY = re.compile(r"\x1b(?:\[[0-9;?]*[@-~]|O.)|.", re.DOTALL)
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-9;?]*|O)?$")
_NAMES = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[C": "right", "\x1bOC": "right",
    "\x1b[D": "left", "\x1bOD": "left", "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home",
    "\x1bOH": "home", "\x1b[1~": "home", "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end", "\x1b[Z": "back tab",
    "\x1b": "escape", "\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\b": "backspace",
    "\x15": "erase",
}  # fmt: skip
_SEQUENCE_ENDS_WITHIN = 0.05
"""Seconds within which the rest of a key arrives, over a slow line, too. After an escape alone, Esc was pressed."""


class FullScreen:
    def __init__(self, console: Console) -> None:
        self.console = console
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Self:
        self._modes = termios.tcgetattr(0)
        self._events, self._event_writer = os.pipe()
        os.set_blocking(self._event_writer, False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._event_writer, warn_on_full_buffer=False)
        try:
            self._enter()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._leave()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        writer, self._event_writer = self._event_writer, -1
        os.close(writer)
        os.close(self._events)

    def _enter(self) -> None:
        modes: list[Any] = termios.tcgetattr(0)
        modes[0] &= ~(termios.IXON | termios.ICRNL)  # Ctrl-S must not stop the view, nor the signal that ends it
        modes[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
        termios.tcsetattr(0, termios.TCSADRAIN, modes)
        self.console.set_alt_screen(True)
        self.console.show_cursor(False)

    def _leave(self) -> None:
        with suppress(OSError):  # the terminal was hung up
            self.console.show_cursor(True)
            self.console.set_alt_screen(False)
        with suppress(termios.error):
            termios.tcsetattr(0, termios.TCSAFLUSH, self._modes)

    def show(self, lines: Sequence[Text]) -> None:
        """Show these lines, cut to the size of the terminal."""
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        self.console.update_screen(Group(*lines[: self.console.height]))

    def wake(self) -> None:
        """Let ``read`` return. For another thread."""
        with suppress(OSError):  # it is full, or the block has ended
            os.write(self._event_writer, b"\0")

    def read(self, timeout: float) -> list[str]:
        """The keys that were pressed and the names of the signals that arrived; none after ``timeout`` seconds, or when
        another thread called ``wake``. A stop has been obeyed when it is returned."""
        ready, _, _ = select.select([0, self._events], [], [], timeout)
        events = []
        if self._events in ready:
            events = [signal.Signals(number).name for number in os.read(self._events, 1024) if number]
        if STOPPED in events:
            self._stop()
        return [*events, *(self._read_keys() if 0 in ready else [])]

    def _read_keys(self) -> list[str]:
        text = ""
        while True:
            try:
                received = os.read(0, 1024)
            except OSError:
                return [HUNG_UP]
            if not received:
                return [HUNG_UP]
            text += self._decoder.decode(received)
            if not _INCOMPLETE.search(text) or not select.select([0], [], [], _SEQUENCE_ENDS_WITHIN)[0]:
                return [_NAMES.get(key, key) for key in _KEY.findall(text)]

    def _stop(self) -> None:
        """Ctrl-Z. The kernel ignores the second signal where no shell could resume us."""
        self._leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._enter()
