"""The controlling terminal, and whose turn it is to read from it."""

from __future__ import annotations

import os
import signal


class Terminal:
    """Of two process groups: ours, and the command's. In the hands of anybody else it is left alone, and so it is where
    there is none."""

    def __init__(self) -> None:
        try:
            self._terminal = os.open("/dev/tty", os.O_RDWR)
        except OSError:
            self._terminal = -1

    @property
    def there(self) -> bool:
        return self._terminal >= 0

    def belongs_to(self, *groups: int) -> bool:
        try:
            return self.there and os.tcgetpgrp(self._terminal) in groups
        except OSError:  # hung up
            return False

    def give(self, group: int, *, of: int) -> None:
        """Put ``group`` in the foreground, if ``of`` or we are there."""
        if not self.belongs_to(os.getpgrp(), of):
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.tcsetpgrp(self._terminal, group)
        except OSError:
            pass  # the group is gone already
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
