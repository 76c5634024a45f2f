"""Whether a socket has something to read, asked of the kernel.

An event loop reports a readable socket until it has been read. uvloop reports a failed connection only once, and the
server's last message may arrive together with the failure. So a reader that expects more asks the kernel itself.
"""

from __future__ import annotations

import select


def is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
