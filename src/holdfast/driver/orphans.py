"""Kills the processes of a sandbox whose supervisor was killed.

The kernel has killed the first process with the supervisor. It gives the others to the driver, if that has started the
supervisor. All others are found by a variable in their environment, and killed through a pidfd: a pid that another
process has got meanwhile is never hit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator

from holdfast.driver.supervisor.process import children
from holdfast.driver.supervisor.program import PR_SET_CHILD_SUBREAPER, prctl


class Subreaper:
    """Makes the kernel give this process the orphans of its supervisors, also of those that have left their session and
    cleared their environment. It must start no other children; those that it has already are left alone."""

    def __init__(self) -> None:
        self._others = frozenset(children())
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def kill_adopted(self, supervisors: Collection[int]) -> bool:
        """Kill all children but ``supervisors``; whether any is left. An unreaped child keeps its pid."""
        while adopted := {*children()} - self._others - {*supervisors}:
            for pid in adopted:
                os.kill(pid, signal.SIGKILL)
            reaped = {os.waitpid(pid, os.WNOHANG)[0] for pid in adopted}
            if reaped != adopted:
                return True
        return False  # the children of those that were reaped would have become ours


def kill(run: str) -> bool:
    """Kill all processes of a run; whether there were any."""
    any_killed = False
    for pidfd in _open_marked("environ", f"HOLDFAST_SANDBOX_RUN={run}"):
        any_killed = True
        _kill(pidfd)
    return any_killed


def kill_supervisor(script: str, argument: str) -> None:
    """Kill a supervisor that does not react, e.g. because it was stopped. It is identified by its command: its sandbox
    may have changed the pid in the file."""
    for pidfd in _open_marked("cmdline", script, argument):
        _kill(pidfd)


def _open_marked(file: str, *marks: str) -> Iterator[int]:
    """A pidfd of each process that has all ``marks`` in this file: its arguments or its environment."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            pidfd = os.pidfd_open(int(name))
        except OSError:
            continue
        if {*map(os.fsencode, marks)} <= _strings(
            name, file
        ):  # read after the pidfd was opened: if the process is gone, so is the file
            yield pidfd
        else:
            os.close(pidfd)


def _strings(pid: str, name: str) -> set[bytes]:
    """Empty for a zombie, and for the environment of a process of another user."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return {*file.read().split(b"\0")}
    except OSError:
        return set()


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        pass
    os.close(pidfd)
