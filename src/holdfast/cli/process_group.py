"""Signal a process group from outside, end it, and wait until none of its processes runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_POLL_INTERVAL = 0.005
_POLLS_BEFORE_PROC = 10
"""Polls until /proc is read, which is slow: most groups are gone by then."""


def clock() -> float:
    """The clock that leases are trusted by. It runs on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def send_signal(group: int, number: int) -> bool:
    """False when the group has no process, or none that we may signal. Signal 0 only tests it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end(group: int, by: float) -> None:
    """Send TERM, continue processes that are stopped, and send KILL at ``by`` on ``clock``. When it is later than
    that already, send KILL at once."""
    if clock() < by:
        send_signal(group, signal.SIGTERM)
        send_signal(group, signal.SIGCONT)
    while clock() < by:
        if not send_signal(group, 0):
            return
        time.sleep(_POLL_INTERVAL)
    send_signal(group, signal.SIGKILL)


def wait_until_gone(group: int, give_up: Callable[[], bool]) -> None:
    """Wait until no process of a killed group runs any more, or until ``give_up`` returns true: a process inside a
    system call dies only when it comes out of it."""
    polls = 0
    while send_signal(group, 0) and not give_up():
        _reap_orphans()
        polls += 1
        if polls > _POLLS_BEFORE_PROC and not _is_running(group):
            return
        time.sleep(_POLL_INTERVAL)


def _reap_orphans() -> None:
    """As process 1 of a container we are the parent of every orphan."""
    if os.getpid() == 1:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _is_running(group: int) -> bool:
    """Whether the group has a process that is no zombie. A zombie stays until its parent reaps it, perhaps for ever."""
    try:
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return False
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, _, its_group = file.read().rpartition(b") ")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state not in (b"Z", b"X"):
            return True
    return False
