"""An answer as it is kept, and given again: status, the headers that may be repeated, and the body byte by byte."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

from holdfast.integrations.asgi.problem import Send, gone

MOST_KEPT = 1 << 20
"""Bytes: what a result of an operation may have."""
REPEATED = frozenset({
    "content-type", "content-encoding", "content-language", "content-location", "etag", "last-modified", "link",
    "location",
})  # fmt: skip
NEVER = frozenset({
    "set-cookie", "set-cookie2", "connection", "keep-alive", "upgrade", "trailer", "transfer-encoding",
    "content-length", "idempotent-replayed",
})  # fmt: skip
"""Those of one client, of one connection, or our own."""
_PASSING = frozenset({307, 308, 401, 403, 408, 409, 425, 429})
_BODILESS = frozenset({204, 205, 304})


def is_final(status: int) -> bool:
    """Whether a retry gets the same again. What else there is says nothing of the request: who asked was sent elsewhere
    with it, where it has the same key, or was not let in, or came at a bad time, or the server failed. Then it may be
    tried again."""
    return status < 500 and status not in _PASSING


class Answer(NamedTuple):
    status: int
    headers: Sequence[tuple[str, str]] = ()
    body: bytes | None = b""
    """None: it was not kept."""

    def dump(self, allowed: Collection[str], most: int) -> bytes:
        """Without what may not be repeated; without the body, when all of it is more than ``most``."""
        headers = [(name, value) for name, value in self.headers if name.lower() in allowed]
        whole = json.dumps([self.status, headers, True]).encode() + b"\n" + (self.body or b"")
        if self.body is None or len(whole) > most:
            return json.dumps([self.status, [], False]).encode() + b"\n"
        return whole

    @classmethod
    def load(cls, kept: bytes) -> Answer:
        head, _, body = kept.partition(b"\n")
        status, headers, is_whole = json.loads(head)
        return cls(status, [(name, value) for name, value in headers], body if is_whole else None)

    async def replay(self, send: Send) -> None:
        if self.body is None:
            raise gone(f"(status {self.status}) was too large to be kept")
        headers = [*self.headers, ("idempotent-replayed", "true")]
        if self.status not in _BODILESS:
            headers.append(("content-length", str(len(self.body))))
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        await send({"type": "http.response.body", "body": self.body})
