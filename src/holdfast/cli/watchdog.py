"""The process that ends the child's group when holdfast cannot: because it was killed, stopped or starved of CPU.

It is forked before holdfast has threads, has a session of its own, and needs nothing but a pipe and a clock. When
holdfast was killed, it also releases the lease, once no process of the group runs any more.
"""

from __future__ import annotations

import os
import select
import signal
import time

from holdfast.cli.process_group import clock, end, wait_until_gone
from holdfast.cli.signals import HANDLED, fork

_RETRY_PAUSE = 0.2
_CLOCK_INTERVAL = 1.0
"""Seconds until the clock is read again: the timeout of select() does not run while the machine sleeps."""


class Watchdog:
    """The process, and our end of its pipe. Lines that it reads:

    ``group N``   the process group to end
    ``lease T N`` the token of the lease, and its name
    ``until T``   the lease can be trusted until T on ``clock``; sent again with every heartbeat
    ``lost``      the lease is lost

    It ends the group, within ``grace`` seconds, after ``lost`` or when T has passed; and at once when the pipe is
    closed, because then holdfast is dead. In that case it releases the lease in the database ``url``.
    """

    def __init__(self, grace: float, url: str, schema: str) -> None:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self.pid = fork()
        if self.pid == 0:
            try:
                os.close(self._writer)
                os.setsid()
                for number in HANDLED:
                    signal.signal(number, signal.SIG_IGN)
                _watch(reader, grace, url, schema)
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


def _watch(reader: int, grace: float, url: str, schema: str) -> None:
    group, until, rest, token, name = 0, float("inf"), b"", b"", b""
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
                _release(group, until, url, schema, name.decode(), token.decode())
            return
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            word, _, value = line.partition(b" ")
            if word == b"group":
                group = int(value)
            elif word == b"lease":
                token, _, name = value.partition(b" ")
            elif word == b"until":
                until = float(value)
            else:
                until = clock()


def _release(group: int, until: float, url: str, schema: str, name: str, token: str) -> None:
    """Release the lease of a dead holdfast once no process of the killed group runs any more, unless trust in it ends
    before. The standard streams are the user's, and are not kept open."""
    wait_until_gone(group, lambda: clock() >= until)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    from holdfast import Client, EngineError, HoldfastError

    while clock() < until:
        try:
            with Client(url, schema=schema) as client:
                client.lease(name).adopt(token).release()
            return
        except EngineError:
            time.sleep(_RETRY_PAUSE)
        except HoldfastError:  # it has passed on
            return
