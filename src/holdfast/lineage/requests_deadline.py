"""A deadline for a whole HTTP response. The timeout of requests limits only the wait for each piece: a server that
sends one byte at a time could block the relay for ever."""

from __future__ import annotations

import socket
import time
from http.client import HTTPResponse
from io import BufferedReader, RawIOBase
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3.poolmanager import pool_classes_by_scheme


class _DeadlineReader(RawIOBase):
    """Reads from a socket until the deadline. It starts with the response, with the timeout that the socket has."""

    def __init__(self, raw: RawIOBase, sock: socket.socket) -> None:
        self._raw, self._sock = raw, sock
        timeout = sock.gettimeout()
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._deadline is not None:
            if (left := self._deadline - time.monotonic()) <= 0:
                raise TimeoutError("the response was not complete in time")
            self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


# private: http.client.HTTPResponse.fp, http.client.HTTPConnection.response_class and
# urllib3.PoolManager.pool_classes_by_scheme, tested in tests/test_private_names.py
class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = BufferedReader(_DeadlineReader(self.fp.detach(), sock))


def _with_deadline(pool_class: Any) -> Any:
    connection = type("Connection", (pool_class.ConnectionCls,), {"response_class": _Response})
    return type("Pool", (pool_class,), {"ConnectionCls": connection})


_POOLS = {scheme: _with_deadline(pool_class) for scheme, pool_class in pool_classes_by_scheme.items()}


class DeadlineAdapter(HTTPAdapter):
    """Mount it on a ``requests.Session``: ``timeout`` then limits the whole response."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager
