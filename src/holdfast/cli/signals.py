"""Signals to `holdfast run`: while it waits for the lease they end it, and once the command runs they are passed on."""

from __future__ import annotations

import os
import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (
    *ENDING, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH, signal.SIGTSTP,
    signal.SIGCONT,
)  # fmt: skip
HANDLED = (*PASSED_ON, signal.SIGCHLD)


class Interrupted(BaseException):
    """Told to end before the command was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def interrupt_waiting() -> None:
    """From here on a signal raises Interrupted, the same once more ends us at once. What is ignored, as by nohup, stays
    ignored."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted(number)


class Bell:
    """From here on signals are read from a pipe, in the order they come, whichever thread the kernel gives them to.

    With ``guard`` SIGALRM keeps its default: where there is no better timer, it is the dead man's."""

    def __init__(self, *, guard: bool) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in HANDLED:
            if number == signal.SIGALRM and guard:
                signal.signal(number, signal.SIG_DFL)
            elif number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, nothing)

    def wait(self) -> bytes:
        """The numbers of those that have come, at least one."""
        return os.read(self._reader, 4096)

    def rang(self, number: int) -> bool:
        """Whether it is among those that have come meanwhile, which are forgotten."""
        os.set_blocking(self._reader, False)
        try:
            return number in os.read(self._reader, 4096)
        except BlockingIOError:
            return False
        finally:
            os.set_blocking(self._reader, True)


def nothing(number: int, _: object) -> None:
    """A handler, so that the signal does not do what it does by default, and rings the bell."""


def fork() -> int:
    """Fork; in the child the signals that we handle do what they did before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        pid = os.fork()
        if pid == 0:
            for number in HANDLED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
