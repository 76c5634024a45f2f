"""`holdfast run` as a process, and the processes below it."""

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

from tests import fork_server
from tests.children import PATIENCE, eventually
from tests.cli.command import PROGRAM, SCRIPT, environment
from tests.fork_server import Forked

FAMILY = ("sh", "-c", "sleep 1000 & echo $$ $!; wait")
"""A command with a child of its own; it prints both pids."""
STUBBORN = ("sh", "-c", "trap '' TERM HUP INT; sleep 1000 & echo $$ $!; while :; do wait; done")
"""The same, and neither ends when it is asked to."""

OFTEN = """
from holdfast.cli import run
def often(url, schema, name, argv, terms, *others, run_once=run._run):
    return run_once(url, schema, name, argv, {**terms, "renew_every": 0.2}, *others)
run._run, run.REPORTS = often, 1000
"""
"""Run before the command line: heartbeats and reports to the watchdog several times a second, whatever the TTL."""


def finish(
    url: str, *arguments: str | bytes, more: Mapping[str, str] | None = None, cwd: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`holdfast run …`, and how it ended. With ``options`` of ``subprocess.run``, in an interpreter of its own."""
    env = environment(HOLDFAST_URL=url, **(more or {}))
    if not options:
        command = [SCRIPT, "run", *map(os.fsdecode, arguments)]
        return fork_server.finish(PROGRAM, *command, timeout=PATIENCE, cwd=cwd, env=env)
    options = {"capture_output": True, "stdin": subprocess.DEVNULL, "text": True, **options}
    return subprocess.run([SCRIPT, "run", *arguments], timeout=PATIENCE, check=False, cwd=cwd, env=env, **options)


class Run:
    """A `holdfast run` under way, forked off a process that has imported what it needs. Whatever it started is killed
    at the end of the block. ``before`` is Python that is executed before the command line is. With ``own`` it has an
    interpreter and a command line of its own, for a process list to show."""

    def __init__(
        self, url: str, *options: str, command: Sequence[str] = FAMILY, more: Mapping[str, str] | None = None,
        name: str = "job", before: str = "", own: bool = False,
    ) -> None:  # fmt: skip
        words = [SCRIPT, "run", *options, name, "--", *command]
        env = environment(HOLDFAST_URL=url, **(more or {}))
        (given, giving), (said, saying), (complained, complaining) = os.pipe(), os.pipe(), os.pipe()
        streams = (given, saying, complaining)
        self.process: Forked | subprocess.Popen[bytes]
        if own:
            self.process = subprocess.Popen(
                words, stdin=given, stdout=saying, stderr=complaining, env=env, start_new_session=True
            )
        else:
            program = f"{before}\n{PROGRAM}"
            self.process = Forked(program, *words, streams=streams, buffered=True, env=env, new_session=True)
        for stream in streams:
            os.close(stream)
        self.pid = self.process.pid
        self.family: list[int] = []
        self._stdin = os.fdopen(giving, "w")
        self._said: dict[str, queue.SimpleQueue[str]] = {}
        self._readers = [self._listen("out", os.fdopen(said)), self._listen("err", os.fdopen(complained))]

    def _listen(self, name: str, stream: IO[str]) -> threading.Thread:
        said = self._said[name] = queue.SimpleQueue()

        def read() -> None:
            with stream:
                for line in stream:
                    said.put(line.rstrip("\n"))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def line(self) -> str:
        """The next line that the command prints."""
        return self._said["out"].get(timeout=PATIENCE)

    def say(self, text: str) -> None:
        """A line for the command to read."""
        self._stdin.write(f"{text}\n")
        self._stdin.flush()

    def pids(self) -> list[int]:
        """The pids that the command prints when it runs."""
        self.family += map(int, self.line().split())
        return self.family

    def watchdog(self) -> int:
        """The pid of the process that holdfast has beside the command, once it leads a session."""
        leaders: list[int] = []

        def is_there() -> bool:
            leaders[:] = [pid for pid in children(self.pid) if session(pid) == pid]
            return len(leaders) == 1

        eventually(is_there, "the watchdog leads a session of its own")
        return leaders[0]

    def waits(self) -> None:
        """Until it has forked the child and its watchdog, and has the threads of a client that asks for the lease."""
        eventually(lambda: len(children(self.pid)) == 2 and threads(self.pid) > 1, "it waits for the lease")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def errors(self) -> str:
        """All that was said on stderr, once everybody who could say something has ended."""
        self._readers[1].join(PATIENCE)
        lines = []
        while not self._said["err"].empty():
            lines.append(self._said["err"].get())
        return "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        below = [] if self.process.poll() is not None else children(self.pid)
        for pid in (self.pid, *below, *self.family):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        with suppress(BrokenPipeError):
            self._stdin.close()
        for reader in self._readers:
            reader.join(PATIENCE)


def _stat(pid: int | str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]


def session(pid: int) -> int | None:
    """The session that it belongs to; None when there is no such process."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    except (FileNotFoundError, ProcessLookupError):
        return 0


def state(pid: int) -> str:
    """As in ps: R, S, T, Z …; X when there is none."""
    return _stat(pid)[0]


def alive(pid: int) -> bool:
    return state(pid) not in "XZ"


def command_lines() -> str:
    """What everybody on this machine can see of every process."""
    lines = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(each.read_text(errors="replace").replace("\0", " "))
    return "\n".join(lines)


def children(pid: int) -> list[int]:
    return [int(each.name) for each in Path("/proc").glob("[0-9]*") if int(_stat(each.name)[1]) == pid]


def gone(pids: Sequence[int]) -> float:
    """Wait until none of them runs; when that was."""
    deadline = time.monotonic() + PATIENCE
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[(pid, state(pid)) for pid in pids]}"
        time.sleep(0.005)
    return time.time()
