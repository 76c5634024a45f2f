"""The controlling terminal, and the process group in its foreground."""

from __future__ import annotations

import os
import signal


class Terminal:
    """Passes the foreground between two process groups, ours and the child's. It does nothing while a third group is in
    the foreground, or where there is no terminal."""

    def __init__(self) -> None:
        try:
            self._terminal = os.open("/dev/tty", os.O_RDWR)
        except OSError:
            self._terminal = -1

    @property
    def exists(self) -> bool:
        return self._terminal >= 0

    def has_in_foreground(self, *groups: int) -> bool:
        """Whether one of these groups is in the foreground."""
        try:
            return self.exists and os.tcgetpgrp(self._terminal) in groups
        except OSError:  # the terminal was hung up
            return False

    def pass_foreground(self, to: int, *, child: int) -> None:
        """Put the group ``to`` in the foreground, if our group or that of the child is there."""
        if not self.has_in_foreground(os.getpgrp(), child):
            return
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.tcsetpgrp(self._terminal, to)
        except OSError:
            pass  # the group has ended
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
