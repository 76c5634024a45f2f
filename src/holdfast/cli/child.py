"""The child process that becomes the user's command.

It is forked before holdfast has threads, and before holdfast has the lease. It then waits on a pipe: once the lease is
held, its environment arrives there, and it replaces itself by the command. So nothing runs without the lease, and no
process with threads is forked. It has a process group of its own, in the foreground if holdfast is.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping

from holdfast.cli import process_group
from holdfast.cli.process_group import clock, send_signal
from holdfast.cli.signals import SignalPipe, fork, no_action
from holdfast.cli.terminal import Terminal

NOT_FOUND, NOT_EXECUTABLE = 127, 126
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""A program expects their default actions."""
_PR_SET_PDEATHSIG = 1


class Child:
    def __init__(self, argv: list[str]) -> None:
        self._terminal = Terminal()
        parent = os.getpid()
        reader, self._start_pipe = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            try:
                os.close(self._start_pipe)
                os.setpgid(0, 0)
                die_with(parent)
                _wait_and_exec(reader, argv)
            finally:
                os._exit(NOT_EXECUTABLE)
        os.close(reader)
        try:
            os.setpgid(self.pid, self.pid)  # the child does it as well: whichever runs first
        except OSError:
            pass

    def start(self, environment: Mapping[bytes, bytes]) -> None:
        """Let it become the command, with this environment."""
        self._terminal.pass_foreground(self.pid, child=self.pid)
        message = b"".join(b"%s=%s\0" % variable for variable in environment.items()) + b"\0"
        try:
            while message:
                message = message[os.write(self._start_pipe, message) :]
        except BrokenPipeError:
            pass  # it was killed while it waited: its exit code shows that
        os.close(self._start_pipe)

    def discard(self) -> None:
        """End it before it was started."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._start_pipe)

    def wait(self, signals: SignalPipe) -> int:
        """Its exit code, or 128 + n when signal n ended it. Meanwhile signals are passed on to it, and when it stops we
        stop with it, as the shell expects."""
        pid_to_wait_for = self.pid if os.getpid() != 1 else -1  # process 1 of a container reaps every orphan
        while True:
            pid, status = os.waitpid(pid_to_wait_for, os.WUNTRACED | os.WNOHANG)
            if pid == 0:
                for number in signals.wait():
                    self._pass_on(number)
            elif pid == self.pid and os.WIFSTOPPED(status):
                self._stop_with_it(os.WSTOPSIG(status), signals)
            elif pid == self.pid:
                self._terminal.pass_foreground(os.getpgrp(), child=self.pid)
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)

    def end_group(self, grace: float, is_lost: Callable[[], bool]) -> None:
        """End what the command has left running: none of it may outlive the lease. Waits until it is gone, or until the
        lease is lost."""
        process_group.end(self.pid, clock() + grace)
        process_group.wait_until_gone(self.pid, is_lost)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGCONT:
            self._terminal.pass_foreground(self.pid, child=self.pid)
        if number != signal.SIGCHLD:
            send_signal(self.pid, number)

    def _stop_with_it(self, number: int, signals: SignalPipe) -> None:
        """Stop our own group as well, after Ctrl-Z or a read from the background, so that the shell sees it; continue
        the child when we are continued.

        A `kill -STOP` of the command that does not come from the terminal stops the command alone. The lease is still
        renewed then.
        """
        if not self._terminal.exists or (number == signal.SIGSTOP and not self._terminal.has_in_foreground(self.pid)):
            return
        if number in (signal.SIGTTIN, signal.SIGTTOU) and self._terminal.has_in_foreground(os.getpgrp()):
            self._pass_on(signal.SIGCONT)  # the shell put us in the foreground, without a signal
            return
        self._terminal.pass_foreground(os.getpgrp(), child=self.pid)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)  # the kernel drops it if there is no shell that could continue us
        signal.signal(signal.SIGTSTP, no_action)
        was_continued = signals.drain(signal.SIGCONT)
        self._terminal.pass_foreground(self.pid, child=self.pid)
        if not was_continued and not self._terminal.has_in_foreground(self.pid):
            send_signal(self.pid, signal.SIGHUP)  # it will never be in the foreground: as the kernel does with orphans
        send_signal(self.pid, signal.SIGCONT)


def _wait_and_exec(reader: int, argv: list[str]) -> None:
    """Wait for the environment, then become the command. Returns if the pipe is closed before it is complete."""
    message = b""
    while received := os.read(reader, 65536):
        message += received
    if not message.endswith(b"\0\0"):
        return
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    variables = (variable.partition(b"=") for variable in message[:-2].split(b"\0"))
    environment = {name: value for name, _, value in variables}
    try:
        try:
            if not argv[0]:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            os.execvpe(argv[0], argv, environment)
        except OSError as error:
            if error.errno != errno.ENOEXEC or "/" not in argv[0]:
                raise
            os.execve("/bin/sh", ["sh", *argv], environment)  # a script without #!, which a shell runs, too
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError) or _is_hidden(argv[0], environment)
        reason = os.strerror(errno.ENOENT) if is_missing else error.strerror or ""
        os.write(2, b"holdfast: cannot run %s: %s\n" % (os.fsencode(argv[0]), reason.encode()))
        os._exit(NOT_FOUND if is_missing else NOT_EXECUTABLE)


def _is_hidden(name: str, environment: Mapping[bytes, bytes]) -> bool:
    """Whether the error of a search came from a folder on PATH that we may not enter, and no other folder has the
    command."""
    import shutil

    path = os.fsdecode(environment.get(b"PATH", os.defpath.encode()))
    return "/" not in name and shutil.which(name, os.F_OK, path) is None


def die_with(parent: int) -> None:
    """On Linux, have the kernel kill us when holdfast dies, even if the watchdog died first."""
    try:
        # private: _ctypes.call_function, dlopen, dlsym, tested in tests/test_private_names.py.
        # ctypes itself takes milliseconds to import.
        from _ctypes import call_function, dlopen, dlsym

        call_function(dlsym(dlopen("", 0), "prctl"), (_PR_SET_PDEATHSIG, signal.SIGKILL))
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(0)
