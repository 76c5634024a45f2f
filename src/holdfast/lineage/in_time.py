"""HTTP answers that have to be there in time as a whole: requests bounds only the wait for each piece, and a server
that sends one byte after the other would keep us for ever."""

from __future__ import annotations

import socket
import time
from http.client import HTTPResponse
from io import BufferedReader, RawIOBase
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3.poolmanager import pool_classes_by_scheme


class _Pieces(RawIOBase):
    """What comes through a socket, until its time is up. That begins with the answer, for which it is set."""

    def __init__(self, pieces: RawIOBase, sock: socket.socket) -> None:
        self._pieces, self._sock = pieces, sock
        limit = sock.gettimeout()
        self._until = None if limit is None else time.monotonic() + limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._until is not None:
            if (left := self._until - time.monotonic()) <= 0:
                raise TimeoutError("the answer is not complete in time")
            self._sock.settimeout(left)
        return self._pieces.readinto(buffer)

    def close(self) -> None:
        self._pieces.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp = BufferedReader(_Pieces(self.fp.detach(), sock))


def _pool(known: Any) -> Any:
    connection = type("Connection", (known.ConnectionCls,), {"response_class": _Response})
    return type("Pool", (known,), {"ConnectionCls": connection})


_POOLS = {scheme: _pool(known) for scheme, known in pool_classes_by_scheme.items()}


class InTime(HTTPAdapter):
    """For a session of requests': ``timeout`` is what there is for the whole of an answer."""

    def init_poolmanager(self, *args: Any, **more: Any) -> None:
        super().init_poolmanager(*args, **more)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **more: Any) -> Any:
        made = super().proxy_manager_for(*args, **more)
        made.pool_classes_by_scheme = _POOLS
        return made
