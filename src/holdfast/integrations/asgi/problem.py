"""Errors as application/problem+json (RFC 9457), without a framework."""

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

RETRY_SOON = {"retry-after": "1"}


class IdempotencyProblem(Exception):
    """An error answer of the middleware. ``kind`` is the end of its ``type``, and distinguishes those of one status."""

    def __init__(
        self, status: int, kind: str, title: str, detail: str, *, headers: dict[str, str] | None = None, **fields: Any
    ) -> None:
        super().__init__(detail)
        self.status, self.headers = status, headers or {}
        document = {"type": f"urn:holdfast:idempotency:{kind}", "title": title, "status": status, "detail": detail}
        self.document = document | fields

    async def send(self, scope: Scope, send: Send) -> None:
        """Send it, with the request id from ``scope["state"]["request_id"]`` if there is one."""
        request_id = (scope.get("state") or {}).get("request_id")
        body = json.dumps(self.document | ({} if request_id is None else {"requestId": str(request_id)})).encode()
        fields = {"content-type": "application/problem+json", "content-length": str(len(body)), **self.headers}
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def problem_of(error: Exception) -> IdempotencyProblem:
    """The problem for an error of the operation. Any other error is raised."""
    match error:
        case IdempotencyProblem():
            return error
        case holdfast.OperationInProgress():
            detail = "A request with this Idempotency-Key is running. Send it again to get its answer."
            return IdempotencyProblem(409, "running", "The request is under way", detail, headers=RETRY_SOON)
        case holdfast.KeyReused():
            detail = (
                "This Idempotency-Key was sent with another request: a retry sends the same, a new request a new key."
            )
            return IdempotencyProblem(422, "reused", "The Idempotency-Key was used for another request", detail)
        case holdfast.OperationFailed():
            return interrupted(error.key)
        case holdfast.PolicyDenied():
            return IdempotencyProblem(403, "denied", "The request is refused", "A policy or a review denied it.")
        case holdfast.HoldfastError():
            detail = "Idempotency keys cannot be looked up at present. The application was not called."
            return IdempotencyProblem(
                503, "unavailable", "The store of idempotency keys is down", detail, headers=RETRY_SOON
            )
    raise error


def interrupted(operation: str) -> IdempotencyProblem:
    detail = (
        "An earlier attempt was interrupted, and its effect is not known. The request is not carried out again until "
        "an operator has resolved it."
    )
    return IdempotencyProblem(409, "interrupted", "The request was left half done", detail, operation=operation)


def gone(why: str) -> IdempotencyProblem:
    detail = f"The request was carried out, and its answer {why}. It is not carried out again."
    return IdempotencyProblem(410, "gone", "The answer was not kept", detail)


def missing() -> IdempotencyProblem:
    return IdempotencyProblem(
        400, "missing", "Idempotency-Key is missing", "This request needs the header Idempotency-Key."
    )


def malformed(why: ValueError) -> IdempotencyProblem:
    return IdempotencyProblem(
        400, "malformed", "Idempotency-Key is malformed", f"The header Idempotency-Key is malformed: {why}."
    )


def too_large(most: int) -> IdempotencyProblem:
    detail = f"The body of a request with an Idempotency-Key may have {most} bytes at most."
    return IdempotencyProblem(413, "too-large", "The request is too large", detail)
