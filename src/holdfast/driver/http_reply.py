"""An HTTP/1.1 request as bytes, and an incremental parser of its response. Neither does I/O."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

_MAX_HEAD = 65_536


def parse_address(address: str) -> tuple[str, int | None]:
    """Where to connect: the path of a socket and None, or a host and its port."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return rest.removeprefix("//"), None
    parts = urlsplit(address)
    if scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"address must be unix:/path/to/driver.sock or http://host:port, not {address!r}")
    return parts.hostname, parts.port or 80


def build_request(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + body


class HttpReply:
    """``status`` is 0 until the head is parsed. ``feed`` raises ValueError for invalid or truncated responses."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._raw, self._body = bytearray(), bytearray()
        self._left: int | None = None
        """Bytes of the body, or of its chunk, still to come; None: a chunk's size comes next."""
        self._chunked = False

    def feed(self, data: bytes) -> None:
        """Parse the next bytes; empty bytes mean that the server has closed the connection."""
        self._raw += data
        if not self.status:
            self._read_head()
        if self.status:
            self._read_chunks() if self._chunked else self._read_rest()
        if not data and not self.complete:
            raise ValueError("the answer ended before it was complete")

    def take(self) -> bytes:
        """The bytes of the body that have come since the last call."""
        taken = bytes(self._body)
        self._body.clear()
        return taken

    def _read_head(self) -> None:
        """Parse status and headers once all have come. ValueError for what is not HTTP/1.x. Without Content-Length and
        chunks the body is empty: the driver never sends one that ends with the connection."""
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            if len(self._raw) > _MAX_HEAD:
                raise ValueError("the answer's head is too long")
            return
        first, *lines = bytes(head).decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
            raise ValueError("this is no answer of HTTP/1.1")
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        self._left = None if self._chunked else int(self.headers.get("content-length", "0"))
        self.status, self._raw = int(status[:3]), rest

    def _read_rest(self) -> None:
        assert self._left is not None
        self._body += self._raw[: self._left]
        self._left -= min(self._left, len(self._raw))
        self._raw.clear()
        self.complete = self._left == 0

    def _read_chunks(self) -> None:
        while not self.complete:
            if self._left is None:
                size, end, rest = self._raw.partition(b"\r\n")
                if not end:
                    return
                self._left, self._raw = int(size, 16), rest
            if len(self._raw) < self._left + 2:
                return
            self._body += self._raw[: self._left]
            del self._raw[: self._left + 2]
            self.complete, self._left = self._left == 0, None
