"""The process that ends the child's group when holdfast cannot: because it was killed, stopped or starved of CPU.

It is forked before holdfast has threads, has a session of its own, and needs nothing but a pipe and a clock.
"""

from __future__ import annotations

import os
import select
import signal

from holdfast.cli.process_group import clock, end
from holdfast.cli.signals import HANDLED, fork

_CLOCK_INTERVAL = 1.0
"""Seconds until the clock is read again: the timeout of select() does not run while the machine sleeps."""


class Watchdog:
    """The process, and our end of its pipe. Lines that it reads:

    ``group N``   the process group to end
    ``until T``   the lease can be trusted until T on ``clock``; sent again with every heartbeat
    ``lost``      the lease is lost

    It ends the group, within ``grace`` seconds, after ``lost`` or when T has passed; and at once when the pipe is
    closed, because then holdfast is dead.
    """

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

    def send(self, line: str) -> bool:
        """False when it is dead, or so late that its pipe is full."""
        try:
            os.write(self._writer, f"{line}\n".encode())
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End it."""
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
        if not select.select([reader], [], [], min(left, _CLOCK_INTERVAL) if group else None)[0]:
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
