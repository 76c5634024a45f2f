"""The process that ends the command when holdfast cannot: because it was killed, stopped, or starved.

It is forked before there is a thread, lives in a session of its own and needs nothing but a pipe and a clock.
"""

from __future__ import annotations

import os
import select
import signal

from holdfast.cli.group import clock, end
from holdfast.cli.signals import HANDLED, fork

_LOOK_EVERY = 1.0
"""Seconds after which the clock is looked at again: select() does not count those that the machine sleeps."""


class Watcher:
    """Hears ``group N``, ``until T`` with every heartbeat, and ``lost``. Silence past T means the same as ``lost``, and
    the end of the pipe that holdfast was killed."""

    def __init__(self, grace: float) -> None:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self.pid = fork()
        if self.pid == 0:
            try:
                os.close(self._writer)
                os.setsid()
                for number in HANDLED:
                    signal.signal(number, signal.SIG_IGN)
                _watch(reader, grace)
            finally:
                os._exit(0)
        os.close(reader)

    def say(self, line: str) -> bool:
        """False when it is not there to hear it."""
        try:
            os.write(self._writer, f"{line}\n".encode())
        except OSError:
            return False
        return True

    def close(self) -> None:
        """It has nothing to do any more."""
        try:
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass
        os.close(self._writer)


def _watch(reader: int, grace: float) -> None:
    group, until, rest = 0, float("inf"), b""
    while True:
        left = until - clock()
        if left <= 0:
            end(group, until + grace)
            return
        if not select.select([reader], [], [], min(left, _LOOK_EVERY) if group else None)[0]:
            continue
        received = os.read(reader, 4096)
        if not received:
            if group:
                end(group, 0.0)
            return
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            word, _, value = line.partition(b" ")
            if word == b"group":
                group = int(value)
            elif word == b"until":
                until = float(value)
            else:
                until = clock()
