"""The user's command: forked before there is a thread, in a process group of its own, in the foreground if we are.

It waits for a word before it becomes the user's program, so that nothing runs without the lease, and starting it needs
no fork of a process with threads.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping

from holdfast.cli import group
from holdfast.cli.group import clock, tell
from holdfast.cli.signals import Bell, fork, nothing
from holdfast.cli.terminal import Terminal

NOT_FOUND, NOT_EXECUTABLE = 127, 126
_OURS_ALONE = (signal.SIGPIPE, signal.SIGXFSZ)
"""What Python ignores, and a program expects to be as it was."""


class Command:
    def __init__(self, argv: list[str]) -> None:
        self._terminal = Terminal()
        parent = os.getpid()
        reader, self._go = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            try:
                os.close(self._go)
                os.setpgid(0, 0)
                _die_with(parent)
                _become(reader, argv)
            finally:
                os._exit(NOT_EXECUTABLE)
        os.close(reader)
        try:
            os.setpgid(self.pid, self.pid)  # both of us do it, so that it is done whoever comes first
        except OSError:
            pass

    def start(self, environment: Mapping[bytes, bytes]) -> None:
        self._terminal.give(self.pid, of=self.pid)
        word = b"".join(b"%s=%s\0" % each for each in environment.items()) + b"\0"
        try:
            while word:
                word = word[os.write(self._go, word) :]
        except BrokenPipeError:
            pass  # killed while it waited: its exit code will tell
        os.close(self._go)

    def forget(self) -> None:
        """It is not to run after all."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._go)

    def wait(self, bell: Bell) -> int:
        """Its exit code; 128 + n when a signal ended it. Stops and goes on with it, as the shell expects."""
        whom = self.pid if os.getpid() != 1 else -1  # process 1 of a container buries every orphan
        while True:
            pid, status = os.waitpid(whom, os.WUNTRACED | os.WNOHANG)
            if pid == 0:
                for number in bell.wait():
                    self._pass_on(number)
            elif pid == self.pid and os.WIFSTOPPED(status):
                self._stop_with_it(os.WSTOPSIG(status), bell)
            elif pid == self.pid:
                self._terminal.give(os.getpgrp(), of=self.pid)
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)

    def end_group(self, grace: float, lost: Callable[[], bool]) -> None:
        """Nothing of it may outlive the lease: what the command left running is ended, too."""
        group.end(self.pid, clock() + grace)
        group.await_end(self.pid, lost)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGCONT:
            self._terminal.give(self.pid, of=self.pid)
        if number != signal.SIGCHLD:
            tell(self.pid, number)

    def _stop_with_it(self, number: int, bell: Bell) -> None:
        """Ctrl-Z, or a read from the background: the shell must see us stop. A mere `kill -STOP` of the command, where
        no terminal is involved, is between it and whoever sent it; the lease is kept meanwhile."""
        if not self._terminal.there or (number == signal.SIGSTOP and not self._terminal.belongs_to(self.pid)):
            return
        if number in (signal.SIGTTIN, signal.SIGTTOU) and self._terminal.belongs_to(os.getpgrp()):
            self._pass_on(signal.SIGCONT)  # brought to the foreground while it ran, of which a shell says nothing
            return
        self._terminal.give(os.getpgrp(), of=self.pid)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)  # the kernel forgets it when there is no shell that could wake us again
        signal.signal(signal.SIGTSTP, nothing)
        woken = bell.rang(signal.SIGCONT)
        self._terminal.give(self.pid, of=self.pid)
        if not woken and not self._terminal.belongs_to(self.pid):
            tell(self.pid, signal.SIGHUP)  # it will never be in the foreground: what the kernel does with orphans
        tell(self.pid, signal.SIGCONT)


def _become(reader: int, argv: list[str]) -> None:
    """Wait for the word, then be the user's program. Whoever closes the pipe before it is complete means no."""
    word = b""
    while received := os.read(reader, 65536):
        word += received
    if not word.endswith(b"\0\0"):
        return
    for number in _OURS_ALONE:
        signal.signal(number, signal.SIG_DFL)
    pairs = (each.partition(b"=") for each in word[:-2].split(b"\0"))
    environment = {name: value for name, _, value in pairs}
    try:
        try:
            if not argv[0]:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            os.execvpe(argv[0], argv, environment)
        except OSError as error:
            if error.errno != errno.ENOEXEC or "/" not in argv[0]:
                raise
            os.execve("/bin/sh", ["sh", *argv], environment)  # a script without a first line, as a shell would
    except OSError as error:
        os.write(2, b"holdfast: cannot run %s: %s\n" % (os.fsencode(argv[0]), (error.strerror or "").encode()))
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def _die_with(parent: int) -> None:
    """On Linux the kernel kills us when holdfast dies, even if the watcher died first."""
    try:
        from _ctypes import call_function, dlopen, dlsym  # what is above it in ctypes takes milliseconds to import

        call_function(dlsym(dlopen("", 0), "prctl"), (1, signal.SIGKILL))
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(0)
