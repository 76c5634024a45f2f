"""A TCP connection whose peer has sent bytes and then reset it, before this side reads."""

from __future__ import annotations

import socket
import struct


class BrokenOff:
    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.ours = socket.create_connection(listening.getsockname())
            theirs, _ = listening.accept()
        theirs.send(b"goodbye")
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST instead of FIN
        theirs.close()

    def read(self) -> None:
        """Read the bytes. Raises OSError the second time."""
        assert self.ours.recv(100) == b"goodbye"
