"""Python processes whose imports are done: each is forked off one that has imported what nearly all of them need.

A test process starts hundreds, and a fifth of a second of a processor is what psycopg, click and rich take to import.
Otherwise they are what ``python -c PROGRAM`` is: a main module of their own, arguments, streams, working directory,
environment and session as asked for, and an end by way of the interpreter's. What is to be seen of imports, or of what
the interpreter reads from its environment, wants a process of its own.
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
_one_at_a_time = threading.Lock()
_SERVE = "import tests.nursery, sys; exec(*tests.nursery.serve(*sys.argv[1:]))"


class Forked:
    """One of them, with the part of ``subprocess.Popen`` that tests use. Its ``streams`` are copies of those given, and
    it may be forked off one that has imported ``also`` as well."""

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
        asked = {
            "program": program, "argv": list(arguments), "cwd": str(cwd or Path.cwd()), "new_session": new_session,
            "env": dict(os.environ) if env is None else env,
        }  # fmt: skip
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            with _one_at_a_time:
                nursery = _nursery(buffered, also)
            socket.send_fds(nursery, [json.dumps(asked).encode()], [*streams, theirs.fileno()])
        self.pid = int(self._line.recv(16))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            line = select.poll()
            line.register(self._line, select.POLLIN)
            if not line.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(self._line.recv(16))
            self._line.send(b".")  # it may be buried: nobody has its number before that
            self._line.recv(1)
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def finish(
    program: str, *arguments: str, timeout: float, cwd: Path | None, env: dict[str, str], also: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """One that has nothing to read, to its end; what it says goes through pipes."""
    (out, said), (err, complained) = os.pipe(), os.pipe()
    with open(os.devnull) as nothing:  # noqa: PTH123
        streams = (nothing.fileno(), said, complained)
        process = Forked(program, *arguments, streams=streams, buffered=True, also=also, cwd=cwd, env=env)
    os.close(said)
    os.close(complained)
    with ThreadPoolExecutor(2) as pool:
        heard = pool.map(_all, (out, err))
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, code, *heard)


def _all(stream: int) -> str:
    with open(stream, encoding="utf-8") as text:
        return text.read()


@cache
def _nursery(buffered: bool, also: tuple[str, ...]) -> socket.socket:
    """Where this test process asks for those whose stdout is ``buffered`` and who need that, too. It ends with us."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, *([] if buffered else ["-u"]), "-c", _SERVE, str(theirs.fileno()), *also]
        stdin = subprocess.DEVNULL if buffered else subprocess.PIPE  # as theirs: Python looks at them but once
        process = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True, stdin=stdin, stdout=subprocess.PIPE
        )
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.returncode = 0  # it ends when we do, and is nobody's to wait for
    atexit.register(ours.close)
    return ours


def serve(asking: str, *also: str) -> tuple[CodeType, dict[str, Any]]:
    """Fork until nobody asks any more, then end. Returns in the processes forked off alone: with what they are to do,
    done at the top of the main module, as by any other interpreter."""
    for name in (*NEEDED, *also):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return _Nursery(int(asking)).serve()


class _Nursery:
    def __init__(self, asking: int) -> None:
        self._asking = asking
        self._poll = select.poll()
        self._poll.register(asking, select.POLLIN)
        self._alive: dict[int, tuple[int, int]] = {}
        """By what can be read when a process has ended: its number, and where to tell of it."""
        self._told: dict[int, int] = {}
        """By where that was told, which can be read when it may be buried: its number."""

    def serve(self) -> tuple[CodeType, dict[str, Any]]:
        while True:
            for ready, _ in self._poll.poll():
                if ready in self._alive:
                    self._tell(ready)
                elif ready in self._told:
                    os.read(ready, 1)
                    os.waitpid(self._told.pop(ready), 0)
                    with suppress(OSError):
                        os.write(ready, b".")  # a process stopped as it was forked has a copy: there is no end to read
                    self._close(ready)
                elif (job := self._fork()) is not None:
                    return job

    def _fork(self) -> tuple[CodeType, dict[str, Any]] | None:
        with socket.socket(fileno=os.dup(self._asking)) as asking:
            said, given, _, _ = socket.recv_fds(asking, 1 << 20, 4)
        if not said:
            os._exit(0)
        *streams, line = given
        if (pid := os.fork()) == 0:
            return _begin(json.loads(said), streams)
        for each in streams:
            os.close(each)
        os.write(line, str(pid).encode())
        end = os.pidfd_open(pid)
        self._alive[end] = pid, line
        self._poll.register(end, select.POLLIN)
        return None

    def _tell(self, end: int) -> None:
        pid, line = self._alive.pop(end)
        self._close(end)
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with suppress(OSError):
            os.write(line, str(code).encode())
        self._told[line] = pid
        self._poll.register(line, select.POLLIN)

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
