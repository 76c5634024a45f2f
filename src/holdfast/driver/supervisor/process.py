"""The supervisor: it locks its folder, starts the program, copies its output, obeys orders, reaps children, and records
the exit."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import struct
import time
from typing import Any

from .log import OutputLog
from .program import PR_SET_CHILD_SUBREAPER, execute, prctl

TICK = 0.02
LOCK = "hhqqi4x"
"""The struct flock of Linux on 64 bits: l_type, l_whence, l_start, l_len, l_pid."""


def write(name: str, value: dict[str, Any]) -> None:
    """Write atomically; the file is on disk on return."""
    with open(f"{name}.new", "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{name}.new", name)
    folder = os.open(".", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def acquire_lock(attempts: int = 100) -> int | None:
    """The descriptor that holds the lock; None when another supervisor has it."""
    descriptor = os.open("lock", os.O_RDWR | os.O_CLOEXEC)
    for _ in range(attempts):  # the driver holds it for a moment when it checks for a supervisor
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return descriptor
        except (BlockingIOError, PermissionError):
            time.sleep(TICK)
    return None


class Supervisor:
    def __init__(self, spec: dict[str, Any], run: str, life: int) -> None:
        self._spec, self._run, self._life = spec, run, life
        self._orders = os.open("orders", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._log = OutputLog(spec["log_bytes"])
        self._wakeup, wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        self._pid, self._has_no_children = 0, False
        self._status: int | None = None
        self._problem: str | None = None
        self._kill_at: float | None = None
        self._output = -1

    def run(self) -> None:
        self._start()
        poll = select.poll()
        for descriptor in (self._wakeup, self._orders, self._output):
            poll.register(descriptor, select.POLLIN)
        while not self._has_no_children:
            wait = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic()) * 1000
            if self._status is not None or wait == 0:
                wait = TICK * 1000
            for descriptor, _ in poll.poll(wait):
                if descriptor == self._output and not self._copy_output():
                    poll.unregister(descriptor)
                elif descriptor == self._wakeup and signal.SIGTERM in os.read(self._wakeup, 4096):
                    self._end(self._spec["grace"])
                elif descriptor == self._orders:
                    self._obey(os.read(self._orders, 4096))
            self._reap()
            if self._status is not None or (self._kill_at is not None and time.monotonic() >= self._kill_at):
                self._kill()
        while self._copy_output():
            pass
        self._finish()

    def _start(self) -> None:
        """Fork the program. It waits for a byte that is sent after `started.json` is on disk."""
        self._output, output = os.pipe()
        go, go_writer = os.pipe()
        failure, failure_writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            execute(self._spec, self._run, output, go, failure_writer, (go_writer, failure, self._output))
        for descriptor in (output, go, failure_writer):
            os.close(descriptor)
        os.set_blocking(self._output, False)
        write("started.json", {"pid": self._pid, "supervisor": os.getpid(), "started_at": time.time()})
        os.write(go_writer, b"go")
        os.close(go_writer)
        problem = os.read(failure, 1000)
        os.close(failure)
        if problem:
            self._problem = problem.decode("utf-8", "replace")
        else:
            os.close(os.open("running", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._notify_driver()

    def _notify_driver(self) -> None:
        try:
            os.write(self._life, b".")
        except BlockingIOError:  # no driver has read for a long time; the next one reads the files
            pass

    def _copy_output(self) -> bool:
        """Log what the program has written; whether there may be more."""
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return not self._has_no_children
        self._log.add(data)
        return bool(data)

    def _obey(self, orders: bytes) -> None:
        for order in orders.decode("ascii", "replace").splitlines():
            word, _, seconds = order.partition(" ")
            if word == "end":
                self._end(float(seconds))

    def _end(self, grace: float) -> None:
        """Send TERM, also to stopped processes, and KILL after the grace. Of several orders the earliest end counts."""
        by = time.monotonic() + grace
        self._kill_at = by if self._kill_at is None else min(self._kill_at, by)
        if grace > 0:
            self._signal_group(signal.SIGTERM)
            self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: int) -> None:
        """Signal the process group until its leader is reaped: until then no other process can have its pid."""
        if self._status is None:
            try:
                os.killpg(self._pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _reap(self) -> None:
        """Reap children that have ended. The end of the program kills its process group, as in a container."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._has_no_children = True
                return
            if ended is None:
                return
            if ended.si_pid == self._pid:
                self._signal_group(signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            if ended.si_pid == self._pid:
                self._status = status

    def _kill(self) -> None:
        """Kill all children. Called repeatedly: their children become ours."""
        self._signal_group(signal.SIGKILL)
        for child in children():
            try:
                os.kill(child, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def _finish(self) -> None:
        """Record the exit, and retry until the disk accepts it: nothing else knows it. Gives up when the sandbox is
        to be deleted."""
        code = os.waitstatus_to_exitcode(self._status or 0)
        end = {
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "problem": self._problem,
            "ended": self._kill_at is not None,
            "finished_at": time.time(),
            "log_dropped": self._log.dropped,
        }
        while True:
            try:
                write("exit.json", end)
                return
            except FileNotFoundError:  # the folder is gone, and the sandbox with it
                raise
            except OSError:
                if os.path.exists("deleting"):
                    return
            time.sleep(1.0)


def children() -> list[int]:
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b") ")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if parent == os.getpid():
                pids.append(int(name))
    return pids


def main(folder: str, run: str, open_files: str | None = None) -> int:
    os.chdir(folder)
    os.umask(0o077)
    if open_files is not None:  # the driver has raised its own limit
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(open_files), hard))
    life = os.open("life", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # before the lock: see Sandbox.subscribe
    lock = acquire_lock()
    if lock is None or any(map(os.path.exists, ("deleting", "started.json", "exit.json"))):
        return 0
    with open("spec.json", encoding="utf-8") as file:
        spec = json.load(file)
    if spec["run"] != run:  # another sandbox has this folder by now
        return 0
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(spec, run, life).run()
    return 0
