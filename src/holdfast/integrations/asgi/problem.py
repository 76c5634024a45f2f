"""The problems of the middleware, sent without a framework."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import holdfast
from holdfast.problem_json import MEDIA_TYPE, Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_SOON = {"retry-after": "1"}


async def send_problem(problem: Problem, scope: Scope, send: Send) -> None:
    """Send it, with the request id from ``scope["state"]["request_id"]`` if there is one."""
    request_id = (scope.get("state") or {}).get("request_id")
    body = problem.body(None if request_id is None else str(request_id))
    fields = {"content-type": MEDIA_TYPE, "content-length": str(len(body)), **problem.headers}
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _problem(status: int, kind: str, title: str, detail: str, **more: Any) -> Problem:
    """``kind`` is the end of the ``type``, and distinguishes problems of one status."""
    return Problem(status, detail, type=f"urn:holdfast:idempotency:{kind}", title=title, **more)


def problem_of(error: Exception) -> Problem:
    """The problem for an error of the operation. Any other error is raised."""
    match error:
        case Problem():
            return error
        case holdfast.OperationInProgress():
            detail = "A request with this Idempotency-Key is running. Send it again to get its answer."
            return _problem(409, "running", "The request is under way", detail, headers=RETRY_SOON)
        case holdfast.KeyReused():
            detail = (
                "This Idempotency-Key was sent with another request: a retry sends the same, a new request a new key."
            )
            return _problem(422, "reused", "The Idempotency-Key was used for another request", detail)
        case holdfast.OperationFailed():
            return interrupted(error.key)
        case holdfast.PolicyDenied():
            return _problem(403, "denied", "The request is refused", "A policy or a review denied it.")
        case holdfast.HoldfastError():
            detail = "Idempotency keys cannot be looked up at present. The application was not called."
            return _problem(503, "unavailable", "The store of idempotency keys is down", detail, headers=RETRY_SOON)
    raise error


def interrupted(operation: str) -> Problem:
    detail = (
        "An earlier attempt was interrupted, and its effect is not known. The request is not carried out again until "
        "an operator has resolved it."
    )
    return _problem(409, "interrupted", "The request was left half done", detail, operation=operation)


def gone(why: str) -> Problem:
    detail = f"The request was carried out, and its answer {why}. It is not carried out again."
    return _problem(410, "gone", "The answer was not kept", detail)


def missing() -> Problem:
    return _problem(400, "missing", "Idempotency-Key is missing", "This request needs the header Idempotency-Key.")


def malformed(why: ValueError) -> Problem:
    return _problem(
        400, "malformed", "Idempotency-Key is malformed", f"The header Idempotency-Key is malformed: {why}."
    )


def too_large(limit: int) -> Problem:
    detail = f"The body of a request with an Idempotency-Key may have {limit} bytes at most."
    return _problem(413, "too-large", "The request is too large", detail)
