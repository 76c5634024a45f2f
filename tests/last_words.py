"""A connection of which the other side says something, and then breaks it off: both have come before anybody looks."""

from __future__ import annotations

import socket
import struct


class BrokenOff:
    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.ours = socket.create_connection(listening.getsockname())
            theirs, _ = listening.accept()
        theirs.send(b"goodbye")
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # an error, not an end
        theirs.close()

    def read(self) -> None:
        """What has come; OSError the second time."""
        assert self.ours.recv(100) == b"goodbye"
