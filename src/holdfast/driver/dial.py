"""A connection to a unix socket or to a host and port; its twin for asyncio is `dial_async`."""

from __future__ import annotations

import socket

_CHUNK = 65536


class DriverConnection:
    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def send(self, data: bytes, timeout: float) -> None:
        self._inner.settimeout(timeout)
        self._inner.sendall(data)

    def receive(self, timeout: float) -> bytes:
        """The next bytes; empty at the end. Raises TimeoutError."""
        self._inner.settimeout(timeout)
        return self._inner.recv(_CHUNK)

    def close(self) -> None:
        self._inner.close()


def connect(host: str, port: int | None, timeout: float) -> DriverConnection:
    if port is not None:
        return DriverConnection(socket.create_connection((host, port), timeout))
    inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        inner.settimeout(timeout)
        inner.connect(host)
    except BaseException:
        inner.close()
        raise
    return DriverConnection(inner)
