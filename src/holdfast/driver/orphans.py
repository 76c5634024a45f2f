"""Kills the processes of a sandbox whose supervisor was killed.

The kernel has killed the first process with the supervisor. The others are found by a variable in their environment,
and killed through a pidfd: a pid that another process has got meanwhile is never hit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator


def kill(run: str) -> bool:
    """Kill all processes of a run; whether there were any."""
    any_killed = False
    for pidfd in _open_marked(f"HOLDFAST_SANDBOX_RUN={run}".encode()):
        any_killed = True
        _send(pidfd, signal.SIGKILL)
        os.close(pidfd)
    return any_killed


def kill_supervisor(pid: int, is_alive: Callable[[], bool]) -> None:
    """Kill a supervisor that does not react, e.g. because it was stopped. When it is still alive after the pidfd was
    opened, the pidfd is its own."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    if is_alive():
        _send(pidfd, signal.SIGKILL)
    os.close(pidfd)


def _open_marked(mark: bytes) -> Iterator[int]:
    """A pidfd of each process that has ``mark`` in its environment."""
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
    """Empty for a zombie, and for a process of another user."""
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
