"""Runs one PostgreSQL server, and takes it down when the process that wanted it is gone.

A test process killed with SIGKILL cannot tidy up; this one outlives it for a moment and does. It is started by its
path, as a script, so it uses the standard library alone and starts in a few milliseconds. It ends when the server
and every process of the server have ended, with the server's exit status.

    watcher.py OWNER-PID FOLDER-TO-REMOVE-OR-"" COMMAND...
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

_LOOK = 0.25
"""Seconds between two looks at the owner. Its pid as our parent is asked for, because a pipe would stay open in
children it forked, and a parent-death signal fires when merely the *thread* that started us ends."""

_GRACE = 5.0
"""Seconds for an immediate shutdown, which also frees shared memory, before everything is killed."""


def family(pid: int) -> dict[int, str]:
    """The living descendants of a process, parents first, and the state of each as ps shows it.

    They cannot be had as a process group, because each backend leads its own.
    """
    states: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for child, parent, state in processes():
        states[child] = state
        children.setdefault(parent, []).append(child)
    found = list(children.get(pid, ()))
    for one in found:
        found.extend(children.get(one, ()))
    return {one: states[one] for one in found if states[one] not in "ZX"}


def processes() -> list[tuple[int, int, str]]:
    """Pid, parent and state of each process."""
    if sys.platform != "linux":
        import subprocess

        told = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=True)
        rows = [line.split() for line in told.stdout.splitlines()]
        return [(int(pid), int(parent), state[0]) for pid, parent, state in rows]
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            found.append((int(stat.parent.name), int(parent), state))
    return found


def tell(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _adopt_orphans() -> None:
    """Become the parent of backends whose postmaster was killed, so that their end is seen here."""
    if sys.platform == "linux":
        import ctypes

        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


class Watch:
    """The server, its processes, and whether they may go on."""

    def __init__(self, owner: int, command: list[str]) -> None:
        self.owner = owner
        self.asked_to_stop = False
        self.status = 1
        self.wake, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        self.server = os.posix_spawnp(command[0], command, os.environ, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])
        self.server_runs = True

    def _ask_to_stop(self, *_: object) -> None:
        self.asked_to_stop = True

    @property
    def owner_is_gone(self) -> bool:
        return os.getppid() != self.owner

    def run(self) -> None:
        """Until the last process of the server has ended."""
        kill_at: float | None = None
        while self._reap():
            if not self.server_runs or (kill_at is not None and time.monotonic() > kill_at):
                tell(list(family(os.getpid())), signal.SIGKILL)
            elif kill_at is None and (self.asked_to_stop or self.owner_is_gone):
                kill_at = time.monotonic() + _GRACE
                tell(list(family(os.getpid())), signal.SIGCONT)
                tell([self.server], signal.SIGQUIT)
            if select.select([self.wake], [], [], _LOOK)[0]:
                os.read(self.wake, 4096)

    def _reap(self) -> bool:
        """Take in the processes that ended; whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.server:
                self.server_runs = False
                self.status = os.waitstatus_to_exitcode(status)


def main(arguments: list[str]) -> int:
    owner, folder, *command = arguments
    _adopt_orphans()
    watch = Watch(int(owner), command)
    watch.run()
    if folder and watch.owner_is_gone:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    return abs(watch.status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
