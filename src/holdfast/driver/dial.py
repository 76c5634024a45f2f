"""A connection to a socket of the machine or of the network; its twin for asyncio is `dial_async`."""

from __future__ import annotations

import socket

_AT_ONCE = 65536


class Line:
    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def send(self, data: bytes, timeout: float) -> None:
        self._inner.settimeout(timeout)
        self._inner.sendall(data)

    def receive(self, timeout: float) -> bytes:
        """What has come, nothing at the end; TimeoutError when nothing comes."""
        self._inner.settimeout(timeout)
        return self._inner.recv(_AT_ONCE)

    def close(self) -> None:
        self._inner.close()


def dial(host: str, port: int | None, timeout: float) -> Line:
    if port is not None:
        return Line(socket.create_connection((host, port), timeout))
    inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        inner.settimeout(timeout)
        inner.connect(host)
    except BaseException:
        inner.close()
        raise
    return Line(inner)
