"""`holdfast run` as a process, its children, and what /proc shows of them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import holdfast
from tests import fork_server
from tests.children import PATIENCE, eventually
from tests.cli.command import IMPORTED, PROGRAM, SCRIPT, environment
from tests.fork_server import Forked

FAMILY = ("sh", "-c", "sleep 1000 & echo $$ $!; wait")
"""A command with a child of its own; it prints both pids."""
STUBBORN = ("sh", "-c", "trap '' TERM HUP INT; sleep 1000 & echo $$ $!; while :; do wait; done")
"""The same, and both ignore TERM, HUP and INT."""

OFTEN = """
from holdfast.cli import run
def often(url, schema, name, argv, terms, *others, run_once=run._run):
    return run_once(url, schema, name, argv, {**terms, "renew_every": 0.2}, *others)
run._run, run.REPORTS = often, 1000
"""
"""Run before the command line: heartbeats and reports to the watchdog several times a second, whatever the TTL."""


JUMP = f"""{OFTEN}
import os, time
from holdfast.runtime.clock import now
real = time.clock_gettime
def jumping(clock): return real(clock) + 600 * os.path.exists(os.environ["JUMP"])
time.clock_gettime = jumping
now.__setstate__((jumping, (time.CLOCK_BOOTTIME,), {{}}, None))  # which modules have by its name
"""
"""Run before the command line: its clocks are ten minutes ahead once the file named JUMP is there."""


def finish(
    url: str, *arguments: str | bytes, more: Mapping[str, str] | None = None, cwd: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `holdfast run …` to its end. With ``options`` of ``subprocess.run`` it has an interpreter of its own."""
    env = environment(HOLDFAST_URL=url, **(more or {}))
    if not options:
        command = [SCRIPT, "run", *map(os.fsdecode, arguments)]
        return fork_server.finish(PROGRAM, *command, timeout=PATIENCE, cwd=cwd, env=env, also=IMPORTED)
    options = {"capture_output": True, "stdin": subprocess.DEVNULL, "text": True, **options}
    return subprocess.run([SCRIPT, "run", *arguments], timeout=PATIENCE, check=False, cwd=cwd, env=env, **options)


class Run:
    """A running `holdfast run`, forked from a process that has imported its modules. It and its children are killed at
    the end of the block. ``before`` is Python code that runs before the command line. With ``own`` it has an
    interpreter of its own, so that the process list shows its command line. By default its TTL is ten minutes: it must
    not lose its lease while the machine stands still."""

    def __init__(
        self, url: str, *options: str, command: Sequence[str] = FAMILY, more: Mapping[str, str] | None = None,
        name: str = "job", before: str = "", own: bool = False,
    ) -> None:  # fmt: skip
        self._url, self._name = url, name
        ttl = () if "--ttl" in options else ("--ttl", "600")
        words = [SCRIPT, "run", *ttl, *options, name, "--", *command]
        env = environment(HOLDFAST_URL=url, **(more or {}))
        stdin, stdin_writer = os.pipe()
        stdout_reader, stdout = os.pipe()
        stderr_reader, stderr = os.pipe()
        streams = (stdin, stdout, stderr)
        self.process: Forked | subprocess.Popen[bytes]
        if own:
            self.process = subprocess.Popen(
                words, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=True
            )
        else:
            program = f"{before}\n{PROGRAM}"
            self.process = Forked(
                program, *words, streams=streams, buffered=True, also=IMPORTED, env=env, new_session=True
            )
        for stream in streams:
            os.close(stream)
        self.pid = self.process.pid
        self.family: list[int] = []
        self._stdin = os.fdopen(stdin_writer, "w")
        self._output: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._output_reader = self._start_reader(os.fdopen(stdout_reader), self._output)
        self._error_reader = self._start_reader(os.fdopen(stderr_reader), self._errors)

    def _start_reader(self, stream: IO[str], lines: queue.SimpleQueue[str]) -> threading.Thread:
        def read() -> None:
            with stream:
                for line in stream:
                    lines.put(line.rstrip("\n"))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def line(self) -> str:
        """The next line that the command prints."""
        return self._output.get(timeout=PATIENCE)

    def say(self, text: str) -> None:
        """Write a line that the command reads."""
        self._stdin.write(f"{text}\n")
        self._stdin.flush()

    def pids(self) -> list[int]:
        """The pids that the command prints when it starts."""
        self.family += map(int, self.line().split())
        return self.family

    def watchdog(self) -> int:
        """The pid of the watchdog, once it leads a session."""
        leaders: list[int] = []

        def is_there() -> bool:
            leaders[:] = [pid for pid in children(self.pid) if session(pid) == pid]
            return len(leaders) == 1

        eventually(is_there, "the watchdog leads a session of its own")
        return leaders[0]

    def waits(self) -> None:
        """Wait until it waits for the lease. Until then it imports: a signal there may interrupt what swallows it."""
        with holdfast.Client(self._url) as client:
            eventually(
                lambda: (lease := client.leases.get(self._name)) and lease.waiting == 1, "it waits for the lease"
            )

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def errors(self) -> str:
        """All lines on stderr, once every process that could write to it has ended."""
        self._error_reader.join(PATIENCE)
        lines = []
        while not self._errors.empty():
            lines.append(self._errors.get())
        return "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own_children = [] if self.process.poll() is not None else children(self.pid)
        for pid in (self.pid, *own_children, *self.family):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        with suppress(BrokenPipeError):
            self._stdin.close()
        for reader in (self._output_reader, self._error_reader):
            reader.join(PATIENCE)


def _stat(pid: int | str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


def session(pid: int) -> int | None:
    """The session of a process; None when there is no such process."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def state(pid: int) -> str:
    """The state as in ps: R, S, T, Z …; X when there is no such process."""
    return _stat(pid)[0]


def alive(pid: int) -> bool:
    return state(pid) not in "XZ"


def command_lines() -> str:
    """The command lines of all processes, which every user of the machine can see."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_text(errors="replace").replace("\0", " "))
    return "\n".join(lines)


def children(pid: int) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if int(_stat(path.name)[1]) == pid]


def gone(pids: Sequence[int]) -> float:
    """Wait until none of them runs. Returns the time."""
    deadline = time.monotonic() + PATIENCE
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[(pid, state(pid)) for pid in pids]}"
        time.sleep(0.005)
    return time.time()
