"""A fork server for tests: Python processes that are forked from one that has already imported psycopg, click and rich.

These imports take a fifth of a second, and a test process starts hundreds of processes. Otherwise they are like
``python -c PROGRAM``: their own main module, arguments, streams, working directory, environment and session, and a
regular exit of the interpreter. Tests of imports, or of variables that the interpreter reads at its start, need a
process of their own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    "asyncio", "click", "psycopg", "rich.console", "rich.table", "sqlite3", "uuid",
    "holdfast.client_async", "holdfast.database.postgres_engine_async", "holdfast.database.sqlite_engine_async",
    "holdfast.client", "holdfast.database.postgres_engine", "holdfast.database.sqlite_engine",
    "holdfast.database.background",
    "holdfast.lease.keeper",
)  # fmt: skip
_start_lock = threading.Lock()
_SERVE = "import tests.fork_server, sys; exec(*tests.fork_server.serve(*sys.argv[1:]))"


class Forked:
    """A forked process, with the methods of ``subprocess.Popen`` that tests use.

    Its ``streams`` are copies of the given descriptors. ``also`` names further modules to import before the fork.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        streams: tuple[int, int, int],
        buffered: bool = False,
        also: tuple[str, ...] = (),
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        new_session: bool = False,
    ) -> None:
        request = {
            "program": program, "argv": list(arguments), "cwd": str(cwd or Path.cwd()), "new_session": new_session,
            "env": dict(os.environ) if env is None else env,
        }  # fmt: skip
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            with _start_lock:
                server = _server(buffered, also)
            socket.send_fds(server, [json.dumps(request).encode()], [*streams, theirs.fileno()])
        self.pid = int(self._channel.recv(16))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._channel, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(self._channel.recv(16))
            self._channel.send(b".")  # now the server may reap it; until then its pid is not reused
            self._channel.recv(1)
            self._channel.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def finish(
    program: str, *arguments: str, timeout: float, cwd: Path | None, env: dict[str, str], also: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a process without input to its end, and return its output."""
    (stdout, stdout_writer), (stderr, stderr_writer) = os.pipe(), os.pipe()
    with open(os.devnull) as nothing:  # noqa: PTH123
        streams = (nothing.fileno(), stdout_writer, stderr_writer)
        process = Forked(program, *arguments, streams=streams, buffered=True, also=also, cwd=cwd, env=env)
    os.close(stdout_writer)
    os.close(stderr_writer)
    with ThreadPoolExecutor(2) as pool:
        outputs = pool.map(_read_all, (stdout, stderr))
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, code, *outputs)


def _read_all(stream: int) -> str:
    with open(stream, encoding="utf-8") as text:
        return text.read()


@cache
def _server(buffered: bool, also: tuple[str, ...]) -> socket.socket:
    """The channel to a fork server with these modules, whose stdout is ``buffered`` or not. It ends with us."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, *([] if buffered else ["-u"]), "-c", _SERVE, str(theirs.fileno()), *also]
        stdin = subprocess.DEVNULL if buffered else subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True, stdin=stdin, stdout=subprocess.PIPE
        )
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.returncode = 0  # it ends when we do; Popen must not warn that it runs
    atexit.register(ours.close)
    return ours


def serve(channel: str, *also: str) -> tuple[CodeType, dict[str, Any]]:
    """Fork a process for each request until the channel is closed, then exit.

    Returns only in the forked processes, with the code to execute at the top of the main module and its globals.
    """
    for name in (*NEEDED, *also):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return _ForkServer(int(channel)).serve()


class _ForkServer:
    def __init__(self, channel: int) -> None:
        self._requests = channel
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._alive: dict[int, tuple[int, int]] = {}
        """By pidfd: the pid, and the channel of its owner."""
        self._reported: dict[int, int] = {}
        """By channel: the pid of an ended process that its owner has not acknowledged yet."""

    def serve(self) -> tuple[CodeType, dict[str, Any]]:
        while True:
            for ready, _ in self._poll.poll():
                if ready in self._alive:
                    self._report(ready)
                elif ready in self._reported:
                    os.read(ready, 1)
                    os.waitpid(self._reported.pop(ready), 0)
                    with suppress(OSError):
                        os.write(ready, b".")  # closing it may not suffice: another child may have a copy
                    self._close(ready)
                elif (job := self._fork()) is not None:
                    return job

    def _fork(self) -> tuple[CodeType, dict[str, Any]] | None:
        with socket.socket(fileno=os.dup(self._requests)) as requests:
            request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not request:
            os._exit(0)
        *streams, channel = descriptors
        if (pid := os.fork()) == 0:
            return _begin(json.loads(request), streams)
        for stream in streams:
            os.close(stream)
        os.write(channel, str(pid).encode())
        end = os.pidfd_open(pid)
        self._alive[end] = pid, channel
        self._poll.register(end, select.POLLIN)
        return None

    def _report(self, end: int) -> None:
        pid, channel = self._alive.pop(end)
        self._close(end)
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert status is not None
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        with suppress(OSError):
            os.write(channel, str(code).encode())
        self._reported[channel] = pid
        self._poll.register(channel, select.POLLIN)

    def _close(self, number: int) -> None:
        self._poll.unregister(number)
        os.close(number)


def _begin(job: dict[str, Any], streams: list[int]) -> tuple[CodeType, dict[str, Any]]:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 4096)
    if job["new_session"]:
        os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv[:] = job["argv"]
    sys.path[0] = ""
    main = sys.modules["__main__"] = ModuleType("__main__")
    return compile(job["program"], "<string>", "exec"), main.__dict__
