"""Whether a socket has more to say, asked of the system.

An event loop tells when there is something to read, again and again until it has been read. Of a connection that has
failed uvloop tells once, and never again: the server's last words may have come together with that. So whoever has read
something, and waits for more, looks itself.
"""

from __future__ import annotations

import select


def is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
