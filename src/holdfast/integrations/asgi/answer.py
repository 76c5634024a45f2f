"""An answer as it is stored and replayed: status, the headers that may be repeated, and the body."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

from holdfast.integrations.asgi.problem import Send, gone

MAX_STORED = 1 << 20
"""Bytes: the limit of an operation's result."""
REPEATED = frozenset({
    "content-type", "content-encoding", "content-language", "content-location", "etag", "last-modified", "link",
    "location",
})  # fmt: skip
NEVER = frozenset({
    "set-cookie", "set-cookie2", "connection", "keep-alive", "upgrade", "trailer", "transfer-encoding",
    "content-length", "idempotent-replayed",
})  # fmt: skip
"""Headers of one client or one connection, and our own."""
_RETRYABLE = frozenset({307, 308, 401, 403, 408, 409, 425, 429})
_BODILESS = frozenset({204, 205, 304})


def is_final(status: int) -> bool:
    """Whether a retry gets the same answer again.

    Otherwise the request was not decided: it was redirected, not authorised, came at a bad time, or the server failed.
    Then the application is called again.
    """
    return status < 500 and status not in _RETRYABLE


class Answer(NamedTuple):
    """The answer to one request."""

    status: int
    headers: Sequence[tuple[str, str]] = ()
    body: bytes | None = b""
    """None if it was too large to be stored."""

    def dump(self, allowed: Collection[str], limit: int) -> bytes:
        """The stored form: without headers that may not be repeated, and without a body beyond ``limit`` bytes."""
        headers = [(name, value) for name, value in self.headers if name.lower() in allowed]
        complete = json.dumps([self.status, headers, True]).encode() + b"\n" + (self.body or b"")
        if self.body is None or len(complete) > limit:
            return json.dumps([self.status, [], False]).encode() + b"\n"
        return complete

    @classmethod
    def load(cls, stored: bytes) -> Answer:
        head, _, body = stored.partition(b"\n")
        status, headers, has_body = json.loads(head)
        return cls(status, [(name, value) for name, value in headers], body if has_body else None)

    async def replay(self, send: Send) -> None:
        """Send it again. Raises Problem (410) if its body was not stored."""
        if self.body is None:
            raise gone(f"(status {self.status}) was too large to be kept")
        headers = [*self.headers, ("idempotent-replayed", "true")]
        if self.status not in _BODILESS:
            headers.append(("content-length", str(len(self.body))))
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        await send({"type": "http.response.body", "body": self.body})
