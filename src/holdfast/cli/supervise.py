"""The two processes that `holdfast run` has beside itself, both forked before there is a thread.

The *command* waits for a word before it becomes the user's program, so that nothing runs without the lease and starting
it needs no fork of a process with threads. The *watcher* ends the command's process group when holdfast is killed,
stopped or cut off: it lives in a session of its own and needs nothing but a pipe and a clock.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping

PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock() -> float:
    return time.clock_gettime(_CLOCK)


class Command:
    """The user's command, in a process group of its own, in the foreground if we are."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.terminal = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        reader, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            _become(reader, argv, self.terminal, os.getppid())
        os.close(reader)

    def start(self, environment: Mapping[str, str]) -> None:
        self._to_foreground(self.pid)
        for number in _passed_on():
            signal.signal(number, self._pass_on)
        lines = "\0".join(f"{name}={value}" for name, value in environment.items())
        os.write(self._go, b"go" + lines.encode("utf-8", "surrogateescape"))
        os.close(self._go)

    def forget(self) -> None:
        """It is not to run after all."""
        os.close(self._go)
        os.waitpid(self.pid, 0)

    def wait(self) -> int:
        """Its exit code; 128 + n when a signal ended it. Stops and goes on with it, as the shell expects."""
        while True:
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                self._to_foreground(os.getpgrp())
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            self._to_foreground(os.getpgrp())
            os.kill(os.getpid(), signal.SIGSTOP)
            self._to_foreground(self.pid)
            os.killpg(self.pid, signal.SIGCONT)

    def end_group(self, grace: float) -> None:
        """Nothing of it may outlive the lease: what the command left running is ended, too."""
        end_group(self.pid, grace)

    def _pass_on(self, number: int, _: object) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def _to_foreground(self, group: int) -> None:
        if self.terminal is not None and os.tcgetpgrp(self.terminal) in (os.getpgrp(), self.pid):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            try:
                os.tcsetpgrp(self.terminal, group)
            except OSError:
                pass  # gone already, or not ours any more
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTTOU})


def _passed_on() -> list[int]:
    return [getattr(signal, name) for name in PASSED_ON]


def _become(reader: int, argv: list[str], terminal: int | None, parent: int) -> None:
    """In the child: wait for the word, then be the user's program. Whoever closes the pipe instead means no."""
    status = 0
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _die_with(parent)
        said = b""
        while received := os.read(reader, 65536):
            said += received
        if said[:2] == b"go":
            pairs = (each.partition("=") for each in said[2:].decode("utf-8", "surrogateescape").split("\0"))
            os.execvpe(argv[0], argv, {name: value for name, _, value in pairs})
    except OSError as error:
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        os.write(2, f"holdfast: cannot run {argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(status)


def _die_with(parent: int) -> None:
    """On Linux the kernel kills us when holdfast dies, even if the watcher died first."""
    try:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(0)


class Watcher:
    """Hears ``group N``, ``until T`` with every heartbeat, ``lost``, and ``done``. Silence past T means the same as
    ``lost``, and the end of the pipe without ``done`` that holdfast was killed."""

    def __init__(self, grace: float) -> None:
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            try:
                os.setsid()
                for number in _passed_on():
                    signal.signal(number, signal.SIG_IGN)
                _watch(reader, grace)
            finally:
                os._exit(0)
        os.close(reader)

    def say(self, line: str) -> None:
        try:
            os.write(self._writer, f"{line}\n".encode())
        except OSError:
            pass

    def close(self) -> None:
        self.say("done")
        os.close(self._writer)
        os.waitpid(self.pid, 0)


def _watch(reader: int, grace: float) -> None:
    group, until, rest = 0, float("inf"), b""
    while True:
        left = None if until == float("inf") else max(0.0, until - clock())
        if not select.select([reader], [], [], left)[0]:
            end_group(group, grace)
            return
        received = os.read(reader, 4096)
        if not received:
            end_group(group, 0.0)
            return
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            word, _, value = line.partition(b" ")
            if word == b"group":
                group = int(value)
            elif word == b"until":
                until = float(value)
            elif word == b"lost":
                until = 0.0
            else:
                return


def end_group(group: int, grace: float) -> None:
    """TERM, and KILL when ``grace`` seconds did not do it."""
    if not group:
        return
    deadline = clock() + grace
    try:
        os.killpg(group, signal.SIGTERM if grace else signal.SIGKILL)
        while clock() < deadline:
            time.sleep(0.005)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
