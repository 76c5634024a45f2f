"""What goes wrong as application/problem+json (RFC 9457), without a framework to say it with."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import holdfast

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

AGAIN = {"retry-after": "1"}


class Problem(Exception):
    """An answer instead of the application's. ``kind`` tells two of one status apart: it is the end of ``type``."""

    def __init__(
        self, status: int, kind: str, title: str, detail: str, *, headers: dict[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.status, self.headers = status, headers or {}
        said = {"type": f"urn:holdfast:idempotency:{kind}", "title": title, "status": status, "detail": detail}
        self.document = said | more

    async def send(self, scope: Scope, send: Send) -> None:
        """With the number of the request, if there is one in ``scope["state"]["request_id"]``."""
        known = (scope.get("state") or {}).get("request_id")
        body = json.dumps(self.document | ({} if known is None else {"requestId": str(known)})).encode()
        told = {"content-type": "application/problem+json", "content-length": str(len(body)), **self.headers}
        headers = [(name.encode(), value.encode()) for name, value in told.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def problem_of(error: Exception) -> Problem:
    """Why the application was not called; what has nothing to do with that is raised."""
    match error:
        case Problem():
            return error
        case holdfast.OperationInProgress():
            detail = "A request with this Idempotency-Key is being worked on. Ask again for its answer."
            return Problem(409, "running", "The request is under way", detail, headers=AGAIN)
        case holdfast.KeyReused():
            detail = (
                "This Idempotency-Key was sent with another request: a retry sends the same, a new request a new key."
            )
            return Problem(422, "reused", "The Idempotency-Key was used for another request", detail)
        case holdfast.OperationFailed():
            return interrupted(error.key)
        case holdfast.PolicyDenied():
            return Problem(403, "denied", "The request is refused", "A policy or a review says no.")
        case holdfast.HoldfastError():
            detail = "Idempotency keys cannot be looked up at present. The application was not called."
            return Problem(503, "unavailable", "The store of idempotency keys is down", detail, headers=AGAIN)
    raise error


def interrupted(operation: str) -> Problem:
    detail = (
        "An earlier attempt ended in the middle, and what it has done is not known. It is not carried out again before "
        "somebody has looked at it."
    )
    return Problem(409, "interrupted", "The request was left half done", detail, operation=operation)


def gone(why: str) -> Problem:
    detail = f"The request was carried out, and its answer {why}. It is not carried out again."
    return Problem(410, "gone", "The answer was not kept", detail)


def missing() -> Problem:
    return Problem(400, "missing", "Idempotency-Key is missing", "This request needs the header Idempotency-Key.")


def malformed(why: ValueError) -> Problem:
    return Problem(400, "malformed", "Idempotency-Key is malformed", f"The header Idempotency-Key is malformed: {why}.")


def too_large(most: int) -> Problem:
    detail = f"The body of a request with an Idempotency-Key may have {most} bytes at most."
    return Problem(413, "too-large", "The request is too large", detail)
