"""Signals to `holdfast run`: while it waits for the lease they end it; once the command runs they are passed on."""

from __future__ import annotations

import os
import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (
    *ENDING, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGWINCH, signal.SIGTSTP,
    signal.SIGCONT,
)  # fmt: skip
HANDLED = (*PASSED_ON, signal.SIGCHLD)


class RunInterrupted(BaseException):
    """A signal ended holdfast before the command was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_signal() -> None:
    """From here on a signal raises RunInterrupted; the same signal again kills the process. Signals that are ignored,
    as by nohup, stay ignored."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise)


def _raise(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise RunInterrupted(number)


class SignalPipe:
    """From here on signals are read from a pipe, in the order in which they arrive, in whichever thread.

    With ``guard`` SIGALRM keeps its default action: on systems without POSIX timers it is the kill timer's signal.
    """

    def __init__(self, *, guard: bool) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in HANDLED:
            if number == signal.SIGALRM and guard:
                signal.signal(number, signal.SIG_DFL)
            elif number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, no_action)

    def wait(self) -> bytes:
        """The numbers of the signals that have arrived; at least one."""
        return os.read(self._reader, 4096)

    def drain(self, number: int) -> bool:
        """Discard the signals that have arrived. Returns whether ``number`` is among them."""
        os.set_blocking(self._reader, False)
        try:
            return number in os.read(self._reader, 4096)
        except BlockingIOError:
            return False
        finally:
            os.set_blocking(self._reader, True)


def no_action(number: int, _: object) -> None:
    """A handler in place of the signal's default action: Python then writes the number to the pipe."""


def fork() -> int:
    """Fork. In the child the signals that we handle have their default actions again."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        pid = os.fork()
        if pid == 0:
            for number in HANDLED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
