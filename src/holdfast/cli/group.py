"""A process group from outside: tell it something, end it, know that it is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_LOOK_EVERY = 0.005


def clock() -> float:
    """The clock of the lease: it runs on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def tell(group: int, number: int) -> bool:
    """Send it a signal; False when there is nobody to hear it, or nobody we may reach."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end(group: int, by: float) -> None:
    """TERM, also to what is stopped, and KILL to what is left at ``by`` on our clock; at once when it is that late."""
    if clock() < by:
        tell(group, signal.SIGTERM)
        tell(group, signal.SIGCONT)
    while clock() < by:
        if not tell(group, 0):
            return
        time.sleep(_LOOK_EVERY)
    tell(group, signal.SIGKILL)


def await_end(group: int, enough: Callable[[], bool]) -> None:
    """Until no process of a killed group runs any more, or it is ``enough``: one inside the kernel dies only when it
    comes out."""
    looks = 0
    while tell(group, 0) and not enough():
        _bury_orphans()
        looks += 1
        if looks > 10 and not _running(group):
            return
        time.sleep(_LOOK_EVERY)


def _bury_orphans() -> None:
    """Process 1 of a container is given every orphan, and nobody else buries them."""
    if os.getpid() == 1:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _running(group: int) -> bool:
    """Whether any of it is more than a zombie, which may stay for as long as its parent neglects it."""
    try:
        processes = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return False
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                state, _, its_group = file.read().rpartition(b") ")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state not in (b"Z", b"X"):
            return True
    return False
