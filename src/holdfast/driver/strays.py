"""Processes whose supervisor was killed. The kernel has killed the sandbox's first process with it; the others are
known by the mark in their environment, and are hit through a pidfd, so that a number that was given to another process
in the meantime is never mistaken for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator


def kill(run: str) -> bool:
    """All that carry this mark; whether there were any."""
    found = False
    for pidfd in _marked(f"HOLDFAST_SANDBOX_RUN={run}".encode()):
        found = True
        _send(pidfd, signal.SIGKILL)
        os.close(pidfd)
    return found


def kill_supervisor(pid: int, lives: Callable[[], bool]) -> None:
    """It does not do what it is told: somebody has stopped it. If it still lives after its pidfd was opened, the pidfd
    is its own."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    if lives():
        _send(pidfd, signal.SIGKILL)
    os.close(pidfd)


def _marked(mark: bytes) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            pidfd = os.pidfd_open(int(name))
        except OSError:
            continue
        if mark in _environment(name):  # read after the pidfd was opened: if the process is gone, so is the file
            yield pidfd
        else:
            os.close(pidfd)


def _environment(name: str) -> list[bytes]:
    """None of a zombie, nor of anybody else's process."""
    try:
        with open(f"/proc/{name}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _send(pidfd: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass
