"""Runs one server, and ends it when the process that started it is gone.

A test process killed with SIGKILL cannot clean up; the watchdog outlives it for a moment and does. It is run as a
script by its path, so it imports the standard library only and starts in a few milliseconds. It exits when the server
and all processes of the server have ended, with the server's exit status.

    child_watchdog.py OWNER-PID FOLDER-TO-REMOVE-OR-"" COMMAND...
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

_CHECK_EVERY = 0.25
"""Seconds between two checks that the owner lives. The watchdog compares its parent's pid: a pipe would stay open in
children that the owner forked, and a parent-death signal fires already when the *thread* that started us ends."""

_GRACE = 5.0
"""Seconds for an immediate shutdown, which also frees shared memory, before everything is killed."""


def descendants(pid: int) -> dict[int, str]:
    """The living descendants of a process, parents first, with their state as `ps` shows it.

    A process group would not contain them: each backend of PostgreSQL leads its own.
    """
    states: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for child, parent, state in list_processes():
        states[child] = state
        children.setdefault(parent, []).append(child)
    family = list(children.get(pid, ()))
    for member in family:
        family.extend(children.get(member, ()))
    return {member: states[member] for member in family if states[member] not in "ZX"}


def list_processes() -> list[tuple[int, int, str]]:
    """Pid, parent's pid and state of every process."""
    if sys.platform != "linux":
        import subprocess

        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=True)
        rows = [line.split() for line in listing.stdout.splitlines()]
        return [(int(pid), int(parent), state[0]) for pid, parent, state in rows]
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            processes.append((int(stat.parent.name), int(parent), state))
    return processes


def send_signal(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to each of these processes that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _adopt_orphans() -> None:
    """Become the parent of backends whose postmaster was killed, so that `waitpid` reports their end."""
    if sys.platform == "linux":
        import ctypes

        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


class ChildWatchdog:
    """The server process, its descendants, and whether they have to end."""

    def __init__(self, owner: int, command: list[str]) -> None:
        self.owner = owner
        self.stop_requested = False
        self.status = 1
        self.wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._request_stop)
        self.server = os.posix_spawnp(command[0], command, os.environ, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])
        self.server_runs = True

    def _request_stop(self, *_: object) -> None:
        self.stop_requested = True

    @property
    def owner_is_gone(self) -> bool:
        return os.getppid() != self.owner

    def run(self) -> None:
        """Return when the last process of the server has ended."""
        kill_at: float | None = None
        while self._reap():
            if not self.server_runs or (kill_at is not None and time.monotonic() > kill_at):
                send_signal(list(descendants(os.getpid())), signal.SIGKILL)
            elif kill_at is None and (self.stop_requested or self.owner_is_gone):
                kill_at = time.monotonic() + _GRACE
                send_signal(list(descendants(os.getpid())), signal.SIGCONT)
                send_signal([self.server], signal.SIGQUIT)
            if select.select([self.wake_reader], [], [], _CHECK_EVERY)[0]:
                os.read(self.wake_reader, 4096)

    def _reap(self) -> bool:
        """Collect the exit status of ended processes. Returns whether any process is left."""
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
    watchdog = ChildWatchdog(int(owner), command)
    watchdog.run()
    if folder and watchdog.owner_is_gone:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    return abs(watchdog.status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
